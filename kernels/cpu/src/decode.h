// Attention of a single query over a range of its keys: bound by reading them.
//
// Keys are read in tiles of TILE tokens through a table of row pointers, so that no block size is
// special, while the keys and values of the next tile are fetched (rows.h). A tile serves as many KV
// heads as its share of the second-level cache holds, one after the other. Each row is widened once
// for up to four query heads. Scores leave as partial sums, a vector per token and head, and a
// network of shuffles adds up the lanes of W tokens at a time.
#pragma once

#include "int8_pool.h"
#include "kernels.h"
#include "rows.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int64_t TOKENS_PER_SPLIT = 512;
constexpr int64_t TILE_BYTES = 128 << 10;             // of keys and values, at most
constexpr int ROWS = MANY_REGISTERS ? 4 : 2;          // tokens whose scores are summed at once
constexpr int HEADS = 4;                              // query heads at once
constexpr int COLUMNS = MANY_REGISTERS ? 4 : 2;       // vectors of the output at once
constexpr float NOTHING = -__builtin_inff();

struct DecodeItem {
  int64_t seq, first_head, heads;  // KV heads
  int64_t begin, end;              // key positions
  int64_t partial;                 // where its first head's result goes
};
struct SplitSequence {
  int64_t seq, first, last;  // partial results, split-major: first + split * kv_heads + kv_head
};

inline int64_t padded_dim(const Attention& a) { return round_up(a.dim, W); }

// A partial result: per head of the group its sum, its maximum, and the unnormalised output.
inline int64_t partial_floats(const Attention& a) {
  return a.heads / a.kv_heads * (padded_dim(a) + 2);
}

// KV heads of an item: as many as can be while there are items enough for all threads.
inline int64_t heads_per_item(const Attention& a, int64_t num_ranges, int64_t element_bytes) {
  int64_t fit = larger(1, TILE_BYTES / (2 * TILE * a.dim * element_bytes));
  int64_t heads = smaller(a.kv_heads, fit), wanted = a.threads > 1 ? 4 * a.threads : 1;
  while (heads > 1 && num_ranges * ((a.kv_heads + heads - 1) / heads) < wanted) heads = (heads + 1) / 2;
  return heads;
}

// Where element d of a row lies after `load_pair`.
template <class T>
inline int64_t place(int64_t d, int64_t dim) {
  int64_t pair = d / (2 * W);
  bool whole = (pair + 1) * 2 * W <= dim;
  return whole ? pair * 2 * W + paired<T>(int(d % (2 * W))) : d;
}

struct DecodeScratch {
  float* q;         // [heads of the item, padded_dim], in the order of the pool's rows
  float* out;       // the same
  float* scores;    // [group, TILE]
  vf* partial;      // [HEADS, W]
  float* wide;      // [2, TILE, padded_dim], rows that are widened beforehand
  float* maximum;   // [heads of the item]
  float* total;     // [heads of the item]
};

// For an item of every head.
inline int64_t decode_floats(const Attention& a) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  return round_up(a.heads * dim, 16) * 2 + group * TILE + HEADS * W * W + 2 * TILE * dim +
         round_up(a.heads, 16) * 2;
}

inline DecodeScratch decode_scratch(const Attention& a, float* base) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  DecodeScratch s;
  s.partial = reinterpret_cast<vf*>(base);
  s.q = base + HEADS * W * W;
  s.out = s.q + round_up(a.heads * dim, 16);
  s.scores = s.out + round_up(a.heads * dim, 16);
  s.wide = s.scores + group * TILE;
  s.maximum = s.wide + 2 * TILE * dim;
  s.total = s.maximum + round_up(a.heads, 16);
  return s;
}

// scores[h * TILE + t] of G heads; `count` is a multiple of W.
template <class T, int G>
KVFERRY_INLINE void score_keys(const T* const* k, int64_t head, int count, const float* q,
                               int64_t dim, float* scores, vf* partial, Ahead<T>& ahead,
                               int lines) {
  int64_t pairs = dim / (2 * W), stride = round_up(dim, W);
  bool single = dim - pairs * 2 * W > 0;
  for (int t = 0; t < count; t += ROWS) {
    ahead.fetch(lines * ROWS);
    vf sums[ROWS][G] = {};
    for (int64_t pair = 0; pair < pairs; ++pair) {
      vf row[ROWS][2];
      KVFERRY_UNROLL
      for (int i = 0; i < ROWS; ++i) {
        load_pair(k[t + i] + head + pair * 2 * W, row[i][0], row[i][1]);
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
        vf row = load(k[t + i] + head + pairs * 2 * W);
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

// scores[h, t] of a tile; `head` is from each row to that of the KV head, `count` is a multiple of
// W, and the rows behind the last one repeat it.
template <class T>
KVFERRY_INLINE void score_tile(const T* const* k, int64_t head, int count, const float* q,
                               int64_t group, int64_t dim, DecodeScratch& s, Ahead<T>& ahead,
                               int lines) {
  for (int64_t h = 0; h < group; h += HEADS) {
    const float* from = q + h * round_up(dim, W);
    float* to = s.scores + h * TILE;
    switch (smaller(HEADS, group - h)) {
      case 1: score_keys<T, 1>(k, head, count, from, dim, to, s.partial, ahead, lines); break;
      case 2: score_keys<T, 2>(k, head, count, from, dim, to, s.partial, ahead, lines); break;
      case 3: score_keys<T, 3>(k, head, count, from, dim, to, s.partial, ahead, lines); break;
      default: score_keys<T, 4>(k, head, count, from, dim, to, s.partial, ahead, lines); break;
    }
    lines = 0;
  }
}

// out[h, :] += sum over t of weights[h, t] * value t, for C vectors of the output and G heads.
template <class T, int G, int C>
KVFERRY_INLINE void add_values(const T* const* k, int64_t values, int count, const float* weights,
                               float* out, int64_t stride, Ahead<T>& ahead, int lines) {
  vf sums[G][C];
  KVFERRY_UNROLL
  for (int h = 0; h < G; ++h) {
    KVFERRY_UNROLL
    for (int c = 0; c < C; ++c) sums[h][c] = load(out + h * stride + c * W);
  }
  for (int t = 0; t < count; ++t) {
    ahead.fetch(lines);
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
                                  const float* weights, float* out, int64_t dim, Ahead<T>& ahead,
                                  int lines) {
  int64_t stride = round_up(dim, W), at = 0;
  for (; at + COLUMNS * W <= dim; at += COLUMNS * W, lines = 0) {
    add_values<T, G, COLUMNS>(k, values + at, count, weights, out + at, stride, ahead, lines);
  }
  for (; at + 2 * W <= dim; at += 2 * W, lines = 0) {
    add_values<T, G, 2>(k, values + at, count, weights, out + at, stride, ahead, lines);
  }
  if (at < dim) add_values<T, G, 1>(k, values + at, count, weights, out + at, stride, ahead, lines);
}

// Adds the weighted values of a tile; `values` is from each row to its value of the KV head.
template <class T>
KVFERRY_INLINE void add_tile(const T* const* k, int64_t values, int count, float* sums,
                             int64_t group, int64_t dim, DecodeScratch& s, Ahead<T>& ahead,
                             int lines) {
  for (int64_t h = 0; h < group; h += HEADS, lines = 0) {
    const float* weights = s.scores + h * TILE;
    float* out = sums + h * round_up(dim, W);
    switch (smaller(HEADS, group - h)) {
      case 1: add_values_of<T, 1>(k, values, count, weights, out, dim, ahead, lines); break;
      case 2: add_values_of<T, 2>(k, values, count, weights, out, dim, ahead, lines); break;
      case 3: add_values_of<T, 3>(k, values, count, weights, out, dim, ahead, lines); break;
      default: add_values_of<T, 4>(k, values, count, weights, out, dim, ahead, lines); break;
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

// Weights of a KV head's query heads; what they have summed so far follows a new maximum.
template <class T>
KVFERRY_INLINE void weigh_tile(const Attention& a, DecodeScratch& s, int64_t first, int count,
                               const TileScales<T, TILE>& scales) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  for (int64_t h = 0; h < group; ++h) {
    float* scores = s.scores + h * TILE;
    scales.scale_scores(scores, count);
    float factor = weigh(scores, 0, count, int(round_up(count, W)), a.soft_cap,
                         s.maximum[first + h], s.total[first + h]);
    scales.scale_weights(scores, count);
    if (factor != 1.0f) scale_row(s.out + (first + h) * dim, dim, factor);
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
                    item.first_head * group * a.q_head_stride;
  memset(to, 0, size_t(item.heads * group * dim) * sizeof(float));
  for (int64_t h = 0; h < item.heads * group; ++h) {
    for (int64_t d = 0; d < a.dim; ++d) {
      int64_t at = widened ? d : place<T>(d, a.dim);
      to[h * dim + at] = widen(q[h * a.q_head_stride + d]) * a.scale;
    }
  }
}

// One KV head of a tile of rows, found for the first head of the item.
template <class T>
KVFERRY_INLINE void decode_tile(const Attention& a, const DecodeItem& item, TileRows<T>& rows,
                                int64_t at, int64_t kv_head, bool widened, DecodeScratch& s,
                                Ahead<T>& ahead) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a), first = kv_head * group;
  int64_t head = kv_head * a.pool.head_stride, values = head + a.pool.plane_stride;
  const float* q = s.q + first * dim;
  float* out = s.out + first * dim;
  int count = rows.count, whole = int(round_up(count, W)), lines = ahead.lines() / 2;
  TileScales<T, TILE> scales;
  scales.take(a, item.seq, item.first_head + kv_head, at, at + count);
  if (widened) {
    const float* wide[TILE];
    Ahead<float> nothing(a);
    for (int t = 0; t < whole; ++t) wide[t] = s.wide + (t < count ? t : count - 1) * dim;
    ahead.fetch(2 * lines * count);
    widen_rows(rows.k, head, count, a.dim, s.wide);
    widen_rows(rows.k, values, count, a.dim, s.wide + TILE * dim);
    score_tile<float>(wide, 0, whole, q, group, dim, s, nothing, 0);
    weigh_tile(a, s, first, count, scales);
    add_tile<float>(wide, TILE * dim, count, out, group, dim, s, nothing, 0);
  } else {
    score_tile<T>(rows.k, head, whole, q, group, a.dim, s, ahead, lines);
    weigh_tile(a, s, first, count, scales);
    add_tile<T>(rows.k, values, count, out, group, a.dim, s, ahead, lines);
  }
}

// The partial results of an item; the first keys of its `follower`, if any, are fetched meanwhile.
template <class T>
void decode_item(const Attention& a, const DecodeItem& item, const DecodeItem* follower,
                 float* results, float* base) {
  int64_t group = a.heads / a.kv_heads, heads = item.heads * group, dim = padded_dim(a);
  DecodeScratch s = decode_scratch(a, base);
  bool widened = widens_first<T>(a);
  if (a.dtype == BF16) {
    take_query<T, bf16>(a, item, widened, s.q);
  } else {
    take_query<T, float>(a, item, widened, s.q);
  }
  memset(s.out, 0, size_t(heads * dim) * sizeof(float));
  for (int64_t h = 0; h < heads; ++h) s.maximum[h] = NOTHING, s.total[h] = 0;

  TileRows<T> rows;
  Ahead<T> ahead(a);
  for (int64_t at = item.begin; at < item.end; at += TILE) {
    if (at + TILE < item.end) {
      ahead.start(item.seq, item.first_head, item.heads, at + TILE,
                  smaller(at + 2 * TILE, item.end));
    } else if (follower) {
      ahead.start(follower->seq, follower->first_head, follower->heads, follower->begin,
                  smaller(follower->begin + TILE, follower->end));
    }
    find_rows(a, item.seq, item.first_head, at, smaller(at + TILE, item.end), rows);
    int whole = int(round_up(rows.count, W));
    for (int t = rows.count; t < whole; ++t) rows.k[t] = rows.k[rows.count - 1];
    for (int64_t h = 0; h < item.heads; ++h) {
      decode_tile(a, item, rows, at, h, widened, s, ahead);
    }
    ahead.fetch(ahead.lines() * TILE * int(item.heads));
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* to = results + h * (dim + 2);
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
      float* first = partials + (split.first + kv_head) * size + h * (dim + 2);
      for (int64_t item = split.first + kv_head + a.kv_heads; item < split.last;
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
