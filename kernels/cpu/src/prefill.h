// Attention of a tile of queries: bound by computing.
//
// The rows of a tile are its queries times the query heads of one KV head, so that a tile of keys is
// widened, and transposed, once for all of them. Scores and outputs are matrix products of those
// tiles, BLOCK rows by COLUMN_VECTORS vectors in registers at a time. What lies wholly in the future
// of a block of rows is not computed.
#pragma once

#include "decode.h"
#include "kernels.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int BLOCK = 6;                                    // rows in registers
constexpr int COLUMN_VECTORS = MANY_REGISTERS ? 4 : 2;      // vectors beside them
constexpr int64_t ROWS_PER_TILE = 96;
constexpr int KEYS = 64;                                    // keys per tile
static_assert(KEYS <= TILE, "a tile of keys fits the rows that are found for it");

struct PrefillItem {
  int64_t seq, kv_head, first, count;  // queries of the sequence
};

inline int64_t queries_per_tile(int64_t group) { return larger(1, ROWS_PER_TILE / group); }
inline int64_t tile_rows(int64_t group) { return round_up(queries_per_tile(group) * group, BLOCK); }

struct PrefillScratch {
  float* q;        // [rows, padded_dim], scaled
  float* out;      // [rows, padded_dim]
  float* scores;   // [rows, KEYS]
  float* keys;     // [padded_dim, KEYS]
  float* values;   // [KEYS, padded_dim]
  float* maximum;  // [rows]
  float* total;    // [rows]
};

inline int64_t prefill_floats(const Attention& a) {
  int64_t rows = tile_rows(a.heads / a.kv_heads), dim = padded_dim(a);
  return rows * (2 * dim + KEYS) + 2 * KEYS * dim + 2 * round_up(rows, 16);
}

inline PrefillScratch prefill_scratch(const Attention& a, float* base) {
  int64_t rows = tile_rows(a.heads / a.kv_heads), dim = padded_dim(a);
  PrefillScratch s;
  s.keys = base;
  s.values = s.keys + KEYS * dim;
  s.q = s.values + KEYS * dim;
  s.out = s.q + rows * dim;
  s.scores = s.out + rows * dim;
  s.maximum = s.scores + rows * KEYS;
  s.total = s.maximum + round_up(rows, 16);
  return s;
}

// c[BLOCK, C vectors] (+)= a[BLOCK, depth] * b[depth, C vectors]
template <int C, bool ADD>
KVFERRY_INLINE void multiply_block(const float* a, int64_t a_stride, const float* b,
                                   int64_t b_stride, float* c, int64_t c_stride, int64_t depth) {
  vf sums[BLOCK][C];
  KVFERRY_UNROLL
  for (int i = 0; i < BLOCK; ++i) {
    KVFERRY_UNROLL
    for (int j = 0; j < C; ++j) sums[i][j] = ADD ? load(c + i * c_stride + j * W) : vf{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    vf row[C];
    KVFERRY_UNROLL
    for (int j = 0; j < C; ++j) row[j] = load(b + k * b_stride + j * W);
    KVFERRY_UNROLL
    for (int i = 0; i < BLOCK; ++i) {
      vf factor = splat(a[i * a_stride + k]);
      KVFERRY_UNROLL
      for (int j = 0; j < C; ++j) sums[i][j] += factor * row[j];
    }
  }
  KVFERRY_UNROLL
  for (int i = 0; i < BLOCK; ++i) {
    KVFERRY_UNROLL
    for (int j = 0; j < C; ++j) store(c + i * c_stride + j * W, sums[i][j]);
  }
}

// The same for `columns`, a multiple of W.
template <bool ADD>
inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int64_t depth, int64_t columns) {
  int64_t j = 0;
  for (; j + COLUMN_VECTORS * W <= columns; j += COLUMN_VECTORS * W) {
    multiply_block<COLUMN_VECTORS, ADD>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
  }
  for (; j < columns; j += W) {
    multiply_block<1, ADD>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
  }
}

// keys[d, t] = key t, element d, for t < KEYS; zeros behind the last row and the last element.
template <class T>
inline void transpose_keys(const TileRows<T>& rows, int64_t dim, float* keys) {
  for (int64_t t = 0; t < KEYS; t += W) {
    for_vectors(dim, [&](int64_t d, int n) {
      vf tile[W];
      KVFERRY_UNROLL
      for (int i = 0; i < W; ++i) {
        tile[i] = t + i < rows.count ? load_n(rows.k[t + i] + d, n) : vf{};
      }
      transpose<1>(tile);
      KVFERRY_UNROLL
      for (int i = 0; i < W; ++i) store(keys + (d + i) * KEYS + t, tile[i]);
    });
  }
}

template <class TQuery>
inline void take_queries(const Attention& a, const PrefillItem& item, float* to) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  const TQuery* q = static_cast<const TQuery*>(a.q) + item.kv_head * group * a.q_head_stride +
                    (a.cu_seqlens_q[item.seq] + item.first) * a.q_token_stride;
  for (int64_t row = 0; row < item.count * group; ++row, to += dim) {
    const TQuery* from = q + row / group * a.q_token_stride + row % group * a.q_head_stride;
    for_vectors(a.dim, [&](int64_t d, int n) { store(to + d, load_n(from + d, n) * a.scale); });
  }
}

template <class TQuery>
inline void give_rows(const Attention& a, const PrefillItem& item, const PrefillScratch& s) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  for (int64_t row = 0; row < item.count * group; ++row) {
    int64_t token = a.cu_seqlens_q[item.seq] + item.first + row / group;
    TQuery* to = static_cast<TQuery*>(a.out) +
                 (token * a.heads + item.kv_head * group + row % group) * a.dim;
    float factor = 1.0f / s.total[row];
    for_vectors(a.dim, [&](int64_t d, int n) {
      store_n(to + d, load(s.out + row * dim + d) * factor, n);
    });
  }
}

// One tile of keys, from position `at`, for one block of rows from `row`.
template <class T>
inline void attend_block(const Attention& a, const PrefillItem& item, PrefillScratch& s,
                         const TileScales<T, KEYS>& scales, int64_t row, int64_t at, int64_t count,
                         int64_t first_position) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a), rows = item.count * group;
  // the keys of the tile that query `r / group` sees
  auto last_of = [&](int64_t r) { return smaller(count, first_position + r / group + 1 - at); };
  auto first_of = [&](int64_t r) {
    return a.window ? larger(0, first_position + r / group - a.window + 1 - at) : 0;
  };
  int64_t end = smaller(row + BLOCK, rows), width = last_of(end - 1);
  if (width <= 0 || first_of(row) >= count) return;
  float* scores = s.scores + row * KEYS;
  multiply<false>(s.q + row * dim, dim, s.keys, KEYS, scores, KEYS, a.dim, round_up(width, W));
  for (int64_t r = row; r < end; ++r) {
    int first = int(smaller(first_of(r), count)), last = int(larger(0, last_of(r)));
    scales.scale_scores(s.scores + r * KEYS, int(width));
    float factor = weigh(s.scores + r * KEYS, first, last, int(width), a.soft_cap, s.maximum[r],
                         s.total[r]);
    scales.scale_weights(s.scores + r * KEYS, int(width));
    if (factor != 1.0f) scale_row(s.out + r * dim, dim, factor);
  }
  multiply<true>(scores, KEYS, s.values, dim, s.out + row * dim, dim, width, dim);
}

template <class T>
void prefill_item(const Attention& a, const PrefillItem& item, float* base) {
  int64_t group = a.heads / a.kv_heads, dim = padded_dim(a);
  int64_t rows = item.count * group, padded = round_up(rows, BLOCK);
  int64_t query_len = a.cu_seqlens_q[item.seq + 1] - a.cu_seqlens_q[item.seq];
  int64_t first_position = a.seq_lens[item.seq] - query_len + item.first;
  PrefillScratch s = prefill_scratch(a, base);
  memset(s.q, 0, size_t(padded * dim) * sizeof(float));
  memset(s.out, 0, size_t(padded * dim) * sizeof(float));
  memset(s.scores, 0, size_t(padded * KEYS) * sizeof(float));
  for (int64_t r = 0; r < padded; ++r) s.maximum[r] = NOTHING, s.total[r] = 0;
  if (a.dtype == BF16) {
    take_queries<bf16>(a, item, s.q);
  } else {
    take_queries<float>(a, item, s.q);
  }
  int64_t end = first_position + item.count;
  int64_t begin = a.window ? larger(0, first_position - a.window + 1) : 0;
  for (int64_t at = begin; at < end; at += KEYS) {
    TileRows<T> tile;
    find_rows(a, item.seq, item.kv_head, at, smaller(at + KEYS, end), tile);
    TileScales<T, KEYS> scales;
    scales.take(a, item.seq, item.kv_head, at, at + tile.count);
    transpose_keys(tile, a.dim, s.keys);
    widen_rows(tile.k, a.pool.plane_stride, tile.count, a.dim, s.values);
    for (int64_t row = 0; row < rows; row += BLOCK) {
      attend_block(a, item, s, scales, row, at, tile.count, first_position);
    }
  }
  if (a.dtype == BF16) {
    give_rows<bf16>(a, item, s);
  } else {
    give_rows<float>(a, item, s);
  }
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry
