// Attention of a single query over a range of its keys: bound by reading them.
//
// Keys are read in tiles of TILE tokens through a table of row pointers, so that no block size is
// special, while the rows of the next tile are fetched into the second-level cache. Each row is
// widened once for up to four query heads. Scores leave as partial sums, a vector per token and
// head, and a network of shuffles adds up the lanes of W tokens at a time.
#pragma once

#include "int8_pool.h"
#include "kernels.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int64_t TOKENS_PER_SPLIT = 512;
constexpr int TILE = 128;                             // tokens
constexpr int ROWS = MANY_REGISTERS ? 4 : 2;          // tokens whose scores are summed at once
constexpr int HEADS = 4;                              // query heads at once
constexpr int COLUMNS = MANY_REGISTERS ? 4 : 2;       // vectors of the output at once
constexpr float NOTHING = -__builtin_inff();

struct DecodeItem {
  int64_t seq, kv_head, begin, end;  // key positions
};
struct SplitSequence {
  int64_t seq, first_item, last_item;  // split-major: item = first + split * kv_heads + kv_head
};

inline int64_t padded_dim(const Attention& a) { return round_up(a.dim, W); }

// A partial result: per head of the group its sum, its maximum, and the unnormalised output.
inline int64_t partial_floats(const Attention& a) {
  return a.heads / a.kv_heads * (padded_dim(a) + 2);
}

// Where element d of a row lies after `load_pair`.
template <class T>
inline int64_t place(int64_t d, int64_t dim) {
  int64_t pair = d / (2 * W);
  bool whole = (pair + 1) * 2 * W <= dim;
  return whole ? pair * 2 * W + paired<T>(int(d % (2 * W))) : d;
}

struct DecodeScratch {
  float* q;         // [group, padded_dim], in the order of the pool's rows
  float* out;       // the same
  float* scores;    // [group, TILE]
  vf* partial;      // [HEADS, W]
  float* wide;      // [2, TILE, padded_dim], rows that are widened beforehand
  float* maximum;   // [group]
  float* total;     // [group]
};

inline int64_t decode_floats(const Attention& a) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  return round_up(group * dim, 16) * 2 + group * TILE + HEADS * W * W + 2 * TILE * dim +
         round_up(group, 16) * 2;
}

inline DecodeScratch decode_scratch(const Attention& a, float* base) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  DecodeScratch s;
  s.partial = reinterpret_cast<vf*>(base);
  s.q = base + HEADS * W * W;
  s.out = s.q + round_up(group * dim, 16);
  s.scores = s.out + round_up(group * dim, 16);
  s.wide = s.scores + group * TILE;
  s.maximum = s.wide + 2 * TILE * dim;
  s.total = s.maximum + round_up(group, 16);
  return s;
}

// The rows of a tile of keys; `values` is from each key to its value.
template <class T>
struct TileRows {
  const T* k[TILE];
  int count;
};

template <class T>
KVFERRY_INLINE void find_rows(const Attention& a, int64_t seq, int64_t kv_head, int64_t begin,
                              int64_t end, TileRows<T>& rows) {
  const int32_t* table = a.block_tables + seq * a.table_stride;
  const T* base = static_cast<const T*>(a.pool.data) + kv_head * a.pool.head_stride;
  int64_t block = begin / a.pool.block_size, slot = begin % a.pool.block_size;
  int n = 0;
  for (int64_t left = end - begin; left > 0; slot = 0, ++block) {
    const T* row = base + table[block] * a.pool.block_stride + slot * a.dim;
    int here = int(smaller(a.pool.block_size - slot, left));
    left -= here;
    TileScales<T, TILE>::fetch(a, row - slot * a.dim, slot, here);
    for (int i = 0; i < here; ++i, row += a.dim) rows.k[n++] = row;
  }
  rows.count = n;
}

template <class T>
KVFERRY_INLINE void fetch_row(const T* row, int64_t dim) {
  const char* at = reinterpret_cast<const char*>(row);
  for (int64_t i = 0; i < dim * int64_t(sizeof(T)); i += 64) __builtin_prefetch(at + i, 0, 2);
}

// scores[h * TILE + t] of G heads; `count` is a multiple of W.
template <class T, int G>
KVFERRY_INLINE void score_keys(const T* const* k, int count, const float* q, int64_t dim,
                               float* scores, vf* partial, const TileRows<T>* next) {
  int64_t pairs = dim / (2 * W), stride = round_up(dim, W);
  bool single = dim - pairs * 2 * W > 0;
  for (int t = 0; t < count; t += ROWS) {
    if (next) {
      for (int i = t; i < t + ROWS && i < next->count; ++i) fetch_row(next->k[i], dim);
    }
    vf sums[ROWS][G] = {};
    for (int64_t pair = 0; pair < pairs; ++pair) {
      vf row[ROWS][2];
      KVFERRY_UNROLL
      for (int i = 0; i < ROWS; ++i) {
        load_pair(k[t + i] + pair * 2 * W, row[i][0], row[i][1]);
        hold(row[i][0]);
        hold(row[i][1]);
      }
      KVFERRY_UNROLL
      for (int h = 0; h < G; ++h) {
        const float* from = q + h * stride + pair * 2 * W;
        vf first = load(from), second = load(from + W);
        KVFERRY_UNROLL
        for (int i = 0; i < ROWS; ++i) {
          sums[i][h] += row[i][0] * first;
          sums[i][h] += row[i][1] * second;
        }
      }
    }
    if (single) {
      KVFERRY_UNROLL
      for (int i = 0; i < ROWS; ++i) {
        vf row = load(k[t + i] + pairs * 2 * W);
        KVFERRY_UNROLL
        for (int h = 0; h < G; ++h) sums[i][h] += row * load(q + h * stride + pairs * 2 * W);
      }
    }
    KVFERRY_UNROLL
    for (int i = 0; i < ROWS; ++i) {
      KVFERRY_UNROLL
      for (int h = 0; h < G; ++h) partial[h * W + (t + i) % W] = sums[i][h];
    }
    if ((t + ROWS) % W == 0) {
      KVFERRY_UNROLL
      for (int h = 0; h < G; ++h) {
        store(scores + h * TILE + t + ROWS - W, sums_of<W>(partial + h * W));
      }
    }
  }
}

// scores[h, t] of a tile; `count` is a multiple of W, and the rows behind the last one repeat it.
template <class T>
KVFERRY_INLINE void score_tile(const T* const* k, int count, const float* q, int64_t group,
                               int64_t dim, DecodeScratch& s, const TileRows<T>* next) {
  for (int64_t head = 0; head < group; head += HEADS) {
    int heads = int(smaller(HEADS, group - head));
    const float* from = q + head * round_up(dim, W);
    float* scores = s.scores + head * TILE;
    switch (heads) {
      case 1: score_keys<T, 1>(k, count, from, dim, scores, s.partial, next); break;
      case 2: score_keys<T, 2>(k, count, from, dim, scores, s.partial, next); break;
      case 3: score_keys<T, 3>(k, count, from, dim, scores, s.partial, next); break;
      default: score_keys<T, 4>(k, count, from, dim, scores, s.partial, next); break;
    }
    next = nullptr;
  }
}

// out[h, :] += sum over t of weights[h, t] * value t, for C vectors of the output and G heads.
template <class T, int G, int C>
KVFERRY_INLINE void add_values(const T* const* k, int64_t values, int count, const float* weights,
                               float* out, int64_t stride, const TileRows<T>* next,
                               int64_t next_values, int64_t dim) {
  vf sums[G][C];
  KVFERRY_UNROLL
  for (int h = 0; h < G; ++h) {
    KVFERRY_UNROLL
    for (int c = 0; c < C; ++c) sums[h][c] = load(out + h * stride + c * W);
  }
  for (int t = 0; t < count; ++t) {
    if (next && t < next->count) fetch_row(next->k[t] + next_values, dim);
    vf row[C];
    if constexpr (C == 1) {
      row[0] = load(k[t] + values);
    } else {
      KVFERRY_UNROLL
      for (int c = 0; c < C; c += 2) load_pair(k[t] + values + c * W, row[c], row[c + 1]);
    }
    KVFERRY_UNROLL
    for (int h = 0; h < G; ++h) {
      vf weight = splat(weights[h * TILE + t]);
      KVFERRY_UNROLL
      for (int c = 0; c < C; ++c) sums[h][c] += weight * row[c];
    }
  }
  KVFERRY_UNROLL
  for (int h = 0; h < G; ++h) {
    KVFERRY_UNROLL
    for (int c = 0; c < C; ++c) store(out + h * stride + c * W, sums[h][c]);
  }
}

template <class T, int G>
KVFERRY_INLINE void add_values_of(const T* const* k, int64_t values, int count,
                                  const float* weights, float* out, int64_t dim,
                                  const TileRows<T>* next, int64_t next_values) {
  int64_t stride = round_up(dim, W), at = 0;
  for (; at + COLUMNS * W <= dim; at += COLUMNS * W, next = nullptr) {
    add_values<T, G, COLUMNS>(k, values + at, count, weights, out + at, stride, next, next_values,
                              dim);
  }
  for (; at + 2 * W <= dim; at += 2 * W, next = nullptr) {
    add_values<T, G, 2>(k, values + at, count, weights, out + at, stride, next, next_values, dim);
  }
  if (at < dim) {
    add_values<T, G, 1>(k, values + at, count, weights, out + at, stride, next, next_values, dim);
  }
}

template <class T>
KVFERRY_INLINE void add_tile(const T* const* k, int64_t values, int count, int64_t group,
                             int64_t dim, DecodeScratch& s, const TileRows<T>* next,
                             int64_t next_values) {
  for (int64_t head = 0; head < group; head += HEADS, next = nullptr) {
    const float* weights = s.scores + head * TILE;
    float* out = s.out + head * round_up(dim, W);
    switch (smaller(HEADS, group - head)) {
      case 1: add_values_of<T, 1>(k, values, count, weights, out, dim, next, next_values); break;
      case 2: add_values_of<T, 2>(k, values, count, weights, out, dim, next, next_values); break;
      case 3: add_values_of<T, 3>(k, values, count, weights, out, dim, next, next_values); break;
      default: add_values_of<T, 4>(k, values, count, weights, out, dim, next, next_values); break;
    }
  }
}

// Turns scores into weights relative to the new maximum: those of `first .. last - 1`; the others up
// to `width`, which is rounded up to whole vectors, become 0. Returns the factor for what has been
// summed so far.
KVFERRY_INLINE float weigh(float* scores, int first, int last, int width, float soft_cap,
                           float& maximum, float& total) {
  vf most = splat(NOTHING);
  for (int t = 0; t < width; t += W) {
    vf v = load(scores + t);
    if (soft_cap > 0) v = soft_cap * tanh(v / soft_cap);
    if (t < first) v = lanes() >= first - t ? v : splat(NOTHING);
    if (t + W > last) v = lanes() < last - t ? v : splat(NOTHING);
    store(scores + t, v);
    most = larger(v, most);
  }
  float before = maximum, now = greatest(most);
  now = now > before ? now : before;
  float subtracted = now == NOTHING ? 0.0f : now;
  vf sums = {};
  for (int t = 0; t < width; t += W) {
    vf weights = exp(load(scores + t) - subtracted);
    store(scores + t, weights);
    sums += weights;
  }
  float factor = before == now ? 1.0f : exp(splat(before - subtracted))[0];
  maximum = now;
  total = total * factor + sum(sums);
  return factor;
}

KVFERRY_INLINE void scale_row(float* row, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += W) store(row + i, load(row + i) * factor);
}

template <class T>
KVFERRY_INLINE void weigh_tile(const Attention& a, DecodeScratch& s, int count,
                               const TileScales<T, TILE>& scales) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  for (int64_t h = 0; h < group; ++h) {
    scales.scale_scores(s.scores + h * TILE, count);
    float factor = weigh(s.scores + h * TILE, 0, count, count, a.soft_cap, s.maximum[h],
                         s.total[h]);
    scales.scale_weights(s.scores + h * TILE, count);
    if (factor != 1.0f) scale_row(s.out + h * dim, dim, factor);
  }
}

// Rows in float32, whole vectors long: for a head_dim that is no multiple of W, and for groups of
// so many heads that widening each row for every few of them would cost more.
template <class T>
inline void widen_rows(const T* const* k, int64_t offset, int count, int64_t dim, float* to) {
  int64_t stride = round_up(dim, W);
  for (int t = 0; t < count; ++t) {
    for_vectors(dim, [&](int64_t i, int n) {
      store(to + t * stride + i, load_n(k[t] + offset + i, n));
    });
  }
}

template <class T>
KVFERRY_INLINE bool widens_first(const Attention& a) {
  bool narrow = sizeof(T) < sizeof(float);
  return a.dim % W != 0 || (narrow && a.heads / a.kv_heads > HEADS);
}

template <class T, class TQuery>
KVFERRY_INLINE void take_query(const Attention& a, const DecodeItem& item, bool widened, float* to) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  int64_t row = a.cu_seqlens_q[item.seq];
  const TQuery* q = static_cast<const TQuery*>(a.q) + row * a.q_token_stride +
                    item.kv_head * group * a.q_head_stride;
  memset(to, 0, size_t(group * dim) * sizeof(float));
  for (int64_t h = 0; h < group; ++h) {
    for (int64_t d = 0; d < a.dim; ++d) {
      int64_t at = widened ? d : place<T>(d, a.dim);
      to[h * dim + at] = widen(q[h * a.q_head_stride + d]) * a.scale;
    }
  }
}

template <class T>
void decode_item(const Attention& a, const DecodeItem& item, const DecodeItem* follower,
                 float* result, float* base) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a), values = a.pool.plane_stride;
  DecodeScratch s = decode_scratch(a, base);
  bool widened = widens_first<T>(a);
  if (a.dtype == BF16) {
    take_query<T, bf16>(a, item, widened, s.q);
  } else {
    take_query<T, float>(a, item, widened, s.q);
  }
  memset(s.out, 0, size_t(group * dim) * sizeof(float));
  for (int64_t h = 0; h < group; ++h) s.maximum[h] = NOTHING, s.total[h] = 0;

  TileRows<T> tiles[2];
  TileRows<T>*rows = &tiles[0], *next = &tiles[1];
  TileScales<T, TILE> scales;
  find_rows(a, item.seq, item.kv_head, item.begin, smaller(item.begin + TILE, item.end), *rows);
  for (int64_t at = item.begin; at < item.end; at += TILE) {
    next->count = 0;
    if (at + TILE < item.end) {
      find_rows(a, item.seq, item.kv_head, at + TILE, smaller(at + 2 * TILE, item.end), *next);
    } else if (follower) {
      find_rows(a, follower->seq, follower->kv_head, follower->begin,
                smaller(follower->begin + TILE, follower->end), *next);
    }
    int count = rows->count, whole = int(round_up(count, W));
    scales.take(a, item.seq, item.kv_head, at, at + count);
    if (widened) {
      const float* wide[TILE];
      for (int t = 0; t < whole; ++t) wide[t] = s.wide + (t < count ? t : count - 1) * dim;
      for (int t = 0; t < next->count; ++t) {
        fetch_row(next->k[t], a.dim);
        fetch_row(next->k[t] + values, a.dim);
      }
      widen_rows(rows->k, 0, count, a.dim, s.wide);
      widen_rows(rows->k, values, count, a.dim, s.wide + TILE * dim);
      score_tile<float>(wide, whole, s.q, group, dim, s, nullptr);
      weigh_tile(a, s, count, scales);
      add_tile<float>(wide, TILE * dim, count, group, dim, s, nullptr, 0);
    } else {
      for (int t = count; t < whole; ++t) rows->k[t] = rows->k[count - 1];
      score_tile<T>(rows->k, whole, s.q, group, a.dim, s, next);
      weigh_tile(a, s, count, scales);
      add_tile<T>(rows->k, values, count, group, a.dim, s, next, values);
    }
    TileRows<T>* done = rows;
    rows = next;
    next = done;
  }
  for (int64_t h = 0; h < group; ++h) {
    float* to = result + h * (dim + 2);
    to[dim] = s.total[h];
    to[dim + 1] = s.maximum[h];
    for (int64_t d = 0; d < a.dim; ++d) to[d] = s.out[h * dim + (widened ? d : place<T>(d, a.dim))];
  }
}

// Puts a sequence's partial results together, in order, and writes its row of the output.
template <class T>
void finish_sequence(const Attention& a, const SplitSequence& split, float* partials) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a), size = partial_floats(a);
  int64_t row = a.cu_seqlens_q[split.seq] * a.heads * a.dim;
  for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
    for (int64_t h = 0; h < group; ++h) {
      float* first = partials + (split.first_item + kv_head) * size + h * (dim + 2);
      for (int64_t item = split.first_item + kv_head + a.kv_heads; item < split.last_item;
           item += a.kv_heads) {
        const float* other = partials + item * size + h * (dim + 2);
        float most = other[dim + 1] > first[dim + 1] ? other[dim + 1] : first[dim + 1];
        float subtracted = most == NOTHING ? 0.0f : most;
        float keep = exp(splat(first[dim + 1] - subtracted))[0];
        float add = exp(splat(other[dim + 1] - subtracted))[0];
        for (int64_t d = 0; d < a.dim; ++d) first[d] = first[d] * keep + other[d] * add;
        first[dim] = first[dim] * keep + other[dim] * add;
        first[dim + 1] = most;
      }
      float factor = 1.0f / first[dim];
      int64_t to = row + (kv_head * group + h) * a.dim;
      for (int64_t d = 0; d < a.dim; ++d) {
        if (a.dtype == BF16) {
          narrow(first[d] * factor, static_cast<bf16*>(a.out) + to + d);
        } else {
          narrow(first[d] * factor, static_cast<float*>(a.out) + to + d);
        }
      }
    }
  }
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry
