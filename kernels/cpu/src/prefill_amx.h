// Attention of a tile of queries in AMX tiles, where queries and pool are bfloat16.
//
// Everything is transposed: scores are keys times queries, outputs are values times weights. The
// rows of keys are then an operand as they lie, and a vector holds 16 rows of the tile (queries
// times heads, as in prefill.h), whose maxima, sums and weights need nothing across lanes. Queries
// are multiplied as they are; scores, maxima, sums and outputs are float32, weights are rounded to
// bfloat16 for the second product alone.
#pragma once

#include "amx.h"
#include "prefill.h"
#include "prefill_pack.h"

namespace kvferry {
namespace KVFERRY_ISA {

#if defined(__AMX_TILE__)

inline bool fits_tiles(const Attention& a) {
  return a.dtype == BF16 && a.pool.dtype == BF16 && a.scale > 0;
}

// scores [width, ROW_BLOCK] = keys times the queries of a block; of its tiles of rows Q are in use.
template <int Q>
inline void score_tiles(const TiledScratch& s, const char* q, int64_t width) {
  constexpr int64_t stride = ROW_BLOCK * sizeof(float);
  before_tiles_load();
  for (int64_t t = 0; t < width; t += 2 * AMX_ROWS) {
    const char* first = s.keys + t / AMX_ROWS * s.steps() * AMX_TILE_BYTES;
    const char* second = first + s.steps() * AMX_TILE_BYTES;
    const char* row = q;
    _tile_zero(0);
    _tile_zero(1);
    if (Q > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t step = 0; step < s.steps(); ++step) {
      _tile_loadd(4, first + step * AMX_TILE_BYTES, AMX_ROW_BYTES);
      _tile_loadd(6, row, AMX_ROW_BYTES);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, second + step * AMX_TILE_BYTES, AMX_ROW_BYTES);
      _tile_dpbf16ps(1, 5, 6);
      if (Q > 1) {
        _tile_loadd(7, row + AMX_TILE_BYTES, AMX_ROW_BYTES);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      row += 2 * AMX_TILE_BYTES;
    }
    float* to = s.scores + t * ROW_BLOCK;
    _tile_stored(0, to, stride);
    _tile_stored(1, to + AMX_ROWS * ROW_BLOCK, stride);
    if (Q > 1) {
      _tile_stored(2, to + W, stride);
      _tile_stored(3, to + AMX_ROWS * ROW_BLOCK + W, stride);
    }
  }
}

// out [depth, ROW_BLOCK] += values times weights, of `width` keys.
template <int Q>
inline void add_tiles(const TiledScratch& s, float* out, int64_t width) {
  constexpr int64_t stride = ROW_BLOCK * sizeof(float), TILES = KEYS_IN_TILES / DEPTH;
  before_tiles_load();
  for (int64_t d = 0; d < s.depth; d += 2 * AMX_ROWS) {
    const char* first = s.values + d / AMX_ROWS * TILES * AMX_TILE_BYTES;
    const char* second = first + TILES * AMX_TILE_BYTES;
    float* to = out + d * ROW_BLOCK;
    _tile_loadd(0, to, stride);
    _tile_loadd(1, to + AMX_ROWS * ROW_BLOCK, stride);
    if (Q > 1) {
      _tile_loadd(2, to + W, stride);
      _tile_loadd(3, to + AMX_ROWS * ROW_BLOCK + W, stride);
    }
    for (int64_t step = 0; step < width / DEPTH; ++step) {
      const char* weights = s.weights + step * 2 * AMX_TILE_BYTES;
      _tile_loadd(4, first + step * AMX_TILE_BYTES, AMX_ROW_BYTES);
      _tile_loadd(6, weights, AMX_ROW_BYTES);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, second + step * AMX_TILE_BYTES, AMX_ROW_BYTES);
      _tile_dpbf16ps(1, 5, 6);
      if (Q > 1) {
        _tile_loadd(7, weights + AMX_TILE_BYTES, AMX_ROW_BYTES);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to, stride);
    _tile_stored(1, to + AMX_ROWS * ROW_BLOCK, stride);
    if (Q > 1) {
      _tile_stored(2, to + W, stride);
      _tile_stored(3, to + AMX_ROWS * ROW_BLOCK + W, stride);
    }
  }
}

// 2^x to 2e-7 for x up to 127; exactly 1 of 0; 0 below -126, so that nothing is denormal, which
// would be slow; NaN stays.
KVFERRY_INLINE vf exp2(vf x) {
  __mmask16 kept = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ);
  vf r = _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = splat(1.8793186e-3f);
  p = p * r + 8.9909952e-3f;
  p = p * r + 5.5818676e-2f;
  p = p * r + 2.4015927e-1f;
  p = p * r + 6.9315174e-1f;
  p = p * r + 1.0f;
  return _mm512_maskz_scalef_ps(kept, p, x);  // by 2 to the whole part, rounded down
}

// Two keys' weights of 16 rows, a pair for each.
KVFERRY_INLINE vu pair_up(vf first, vf second) {
  typedef uint16_t words __attribute__((vector_size(64)));
  constexpr words interleave = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i both = bits_as<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  return bits_as<vu>(_mm512_maskz_permutexvar_epi16(~0u, bits_as<__m512i>(interleave), both));
}

// Caps the scores of a block: what is scaled comes out.
inline void cap_scores(float* scores, int64_t width, float scale, float cap) {
  for (int64_t i = 0; i < width * ROW_BLOCK; i += W) {
    store(scores + i, cap * tanh(load(scores + i) * scale / cap));
  }
}

// Turns the scores of a block into weights relative to the new maxima, and lets what has been
// summed so far follow these; `factor` is what makes scores exponents of 2.
template <int Q>
inline void weigh_tiles(const TiledScratch& s, int64_t row, int64_t width, float factor) {
  constexpr int AT_ONCE = 4;
  vf most[AT_ONCE][Q];
  for (int q = 0; q < Q; ++q) {
    for (int i = 0; i < AT_ONCE; ++i) most[i][q] = load(s.maximum + row + q * W);
  }
  for (int64_t t = 0; t < width; t += AT_ONCE) {
    KVFERRY_UNROLL
    for (int i = 0; i < AT_ONCE; ++i) {
      KVFERRY_UNROLL
      for (int q = 0; q < Q; ++q) {
        vf score = load(s.scores + (t + i) * ROW_BLOCK + q * W);
        most[i][q] = _mm512_maskz_max_ps(0xffff, score, most[i][q]);  // passes over NaN
      }
    }
  }
  vf base[Q], kept[Q], sums[2][Q] = {};
  bool same = true;
  KVFERRY_UNROLL
  for (int q = 0; q < Q; ++q) {
    vf before = load(s.maximum + row + q * W);
    vf now = larger(larger(most[0][q], most[1][q]), larger(most[2][q], most[3][q]));
    base[q] = now == NOTHING ? vf{} : now;
    kept[q] = exp2((before - base[q]) * factor);
    same = same && !_mm512_cmp_ps_mask(kept[q], splat(1.0f), _CMP_NEQ_UQ);
    store(s.maximum + row + q * W, now);
  }
  for (int64_t t = 0; t < width; t += 2) {
    char* to = s.weights + t / DEPTH * 2 * AMX_TILE_BYTES + t % DEPTH / 2 * AMX_ROW_BYTES;
    KVFERRY_UNROLL
    for (int q = 0; q < Q; ++q) {
      const float* scores = s.scores + t * ROW_BLOCK + q * W;
      vf first = exp2((load(scores) - base[q]) * factor);
      vf second = exp2((load(scores + ROW_BLOCK) - base[q]) * factor);
      sums[0][q] += first;
      sums[1][q] += second;
      store_words(to + q * AMX_TILE_BYTES, pair_up(first, second));
    }
  }
  KVFERRY_UNROLL
  for (int q = 0; q < Q; ++q) {
    float* total = s.total + row + q * W;
    store(total, load(total) * kept[q] + (sums[0][q] + sums[1][q]));
  }
  if (same) return;
  float* out = s.out_of(row);
  for (int64_t d = 0; d < s.depth; ++d, out += ROW_BLOCK) {
    KVFERRY_UNROLL
    for (int q = 0; q < Q; ++q) store(out + q * W, load(out + q * W) * kept[q]);
  }
}

// The tile of `count` keys from position `at` for one block of rows.
template <int Q>
inline void attend_tiles(const Attention& a, const PrefillItem& item, const TiledScratch& s,
                         int64_t row, int64_t at, int64_t count, int64_t first_position) {
  constexpr float LOG2_E = 1.44269504f;
  int64_t group = a.heads / a.kv_heads, rows = item.count * group;
  int64_t oldest = first_position + row / group;  // positions of the first and the last query
  int64_t newest = first_position + (smaller(row + ROW_BLOCK, rows) - 1) / group;
  if (newest < at || (a.window && oldest - a.window + 1 >= at + count)) return;
  int64_t width = round_up(smaller(count, newest + 1 - at), DEPTH);
  score_tiles<Q>(s, s.q_of(row), width);
  if (a.soft_cap > 0) cap_scores(s.scores, width, a.scale, a.soft_cap);
  if (at + width - 1 > oldest || (a.window && newest - a.window >= at)) {
    vi last[Q];  // that each row sees, counted from `at`
    for (int i = 0; i < Q * W; ++i) {
      last[i / W][i % W] = int32_t(first_position + (row + i) / group - at);
    }
    int window = int(a.window ? smaller(a.window, 1 << 30) : 1 << 30);
    for (int t = 0; t < width; ++t) {
      for (int q = 0; q < Q; ++q) {
        float* score = s.scores + t * ROW_BLOCK + q * W;
        vi seen = (last[q] >= t) & (last[q] - window < t);
        store(score, seen ? load(score) : splat(NOTHING));
      }
    }
  }
  weigh_tiles<Q>(s, row, width, a.soft_cap > 0 ? LOG2_E : a.scale * LOG2_E);
  add_tiles<Q>(s, s.out_of(row), width);
}

inline void prefill_in_tiles(const Attention& a, const PrefillItem& item, float* base) {
  int64_t rows = item.count * (a.heads / a.kv_heads), padded = round_up(rows, ROW_BLOCK);
  int64_t query_len = a.cu_seqlens_q[item.seq + 1] - a.cu_seqlens_q[item.seq];
  int64_t first_position = a.seq_lens[item.seq] - query_len + item.first;
  TiledScratch s(a, base);
  TilesInUse guard;
  memset(s.out, 0, size_t(padded * s.depth) * sizeof(float));
  for (int64_t r = 0; r < padded; ++r) s.maximum[r] = NOTHING, s.total[r] = 0;
  pack_queries(a, item, s);
  int64_t end = first_position + item.count;
  int64_t begin = a.window ? larger(0, first_position - a.window + 1) : 0;
  for (int64_t at = begin; at < end; at += KEYS_IN_TILES) {
    int64_t count = smaller(KEYS_IN_TILES, end - at);
    for (int64_t t = 0; t < count; t += TILE) {
      TileRows<bf16> found;
      find_rows(a, item.seq, item.kv_head, at + t, smaller(at + t + TILE, end), found);
      pack_keys(found, t, a.dim, s);
      pack_values(found, a.pool.plane_stride, t, a.dim, s);
    }
    for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
      if (rows - row > W) {
        attend_tiles<2>(a, item, s, row, at, count, first_position);
      } else {
        attend_tiles<1>(a, item, s, row, at, count, first_position);
      }
    }
  }
  give_tiles(a, item, s);
}

#else

inline bool fits_tiles(const Attention&) { return false; }

#endif

// --- either --------------------------------------------------------------------------------------

inline int64_t queries_per_item(const Attention& a) {
#if defined(__AMX_TILE__)
  if (fits_tiles(a)) return queries_in_tiles(a);
#endif
  return queries_per_tile(a.heads / a.kv_heads);
}

inline int64_t prefill_scratch_floats(const Attention& a) {
#if defined(__AMX_TILE__)
  if (fits_tiles(a)) return TiledScratch(a, nullptr).floats;
#endif
  return prefill_floats(a);
}

template <class T>
void prefill(const Attention& a, const PrefillItem& item, float* base) {
#if defined(__AMX_TILE__)
  if (fits_tiles(a)) return prefill_in_tiles(a, item, base);
#endif
  prefill_item<T>(a, item, base);
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry
