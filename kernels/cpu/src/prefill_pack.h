// What AMX tiles want of the operands of attention: packed before, written back afterwards.
//
// Tiles lie one after the other, an operand's in the order of their use, zeros where nothing
// belongs: a head_dim fills up to a multiple of 32, tokens to one of TILE.
#pragma once

#include "amx.h"
#include "prefill.h"

#if defined(__AMX_TILE__)

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int64_t ROWS_IN_TILES = 192;  // of an item, at most
constexpr int64_t KEYS_IN_TILES = 128;  // packed at a time
constexpr int64_t ROW_BLOCK = 2 * W;    // rows side by side: two tiles
constexpr int64_t DEPTH = 32;           // numbers of bfloat16 in a row of a tile
static_assert(W == AMX_ROWS && KEYS_IN_TILES % TILE == 0, "vectors and tiles are as wide");

inline int64_t queries_in_tiles(const Attention& a) {
  return larger(1, ROWS_IN_TILES / (a.heads / a.kv_heads));
}

struct TiledScratch {
  char* q;         // [blocks of rows, depth / DEPTH, 2] tiles of pairs of numbers by rows
  char* keys;      // [KEYS_IN_TILES / 16, depth / DEPTH] tiles of keys by numbers
  char* values;    // [depth / 16, KEYS_IN_TILES / 32] tiles of numbers by keys
  char* weights;   // [KEYS_IN_TILES / 32, 2] tiles of pairs of keys by rows, of one block
  float* scores;   // [KEYS_IN_TILES, ROW_BLOCK] of one block
  float* out;      // [blocks of rows, depth, ROW_BLOCK]
  float* maximum;  // [rows], of the scores before they are scaled
  float* total;    // [rows]
  int64_t depth, floats;

  TiledScratch(const Attention& a, float* base) : depth(round_up(a.dim, DEPTH)), floats(0) {
    int64_t rows = round_up(queries_in_tiles(a) * (a.heads / a.kv_heads), ROW_BLOCK);
    auto take = [&](int64_t count) {
      floats += count;
      return base ? base + floats - count : nullptr;
    };
    auto take_tiles = [&](int64_t numbers) { return reinterpret_cast<char*>(take(numbers / 2)); };
    q = take_tiles(rows * depth);
    keys = take_tiles(KEYS_IN_TILES * depth);
    values = take_tiles(KEYS_IN_TILES * depth);
    weights = take_tiles(KEYS_IN_TILES * ROW_BLOCK);
    scores = take(KEYS_IN_TILES * ROW_BLOCK);
    out = take(rows * depth);
    maximum = take(rows);
    total = take(rows);
  }

  int64_t steps() const { return depth / DEPTH; }
  char* q_of(int64_t row) const { return q + row * depth * 2; }
  float* out_of(int64_t row) const { return out + row * depth; }
};

// DEPTH numbers or fewer, zeros behind them.
KVFERRY_INLINE vu load_depth(const bf16* from, int64_t count) {
  __mmask32 some = count < DEPTH ? (1u << count) - 1 : ~0u;
  return bits_as<vu>(_mm512_maskz_loadu_epi16(some, from));
}

KVFERRY_INLINE void transpose_words(vu* rows) {
  vf words[W];
  KVFERRY_UNROLL
  for (int i = 0; i < W; ++i) words[i] = bits_as<vf>(rows[i]);
  transpose<1>(words);
  KVFERRY_UNROLL
  for (int i = 0; i < W; ++i) rows[i] = bits_as<vu>(words[i]);
}

KVFERRY_INLINE void store_words(char* to, vu words) { memcpy(to, &words, sizeof words); }

inline void pack_queries(const Attention& a, const PrefillItem& item, const TiledScratch& s) {
  int64_t group = a.heads / a.kv_heads, rows = item.count * group;
  const bf16* q = static_cast<const bf16*>(a.q) + item.kv_head * group * a.q_head_stride +
                  (a.cu_seqlens_q[item.seq] + item.first) * a.q_token_stride;
  for (int64_t row = 0; row < rows; row += W) {
    char* to = s.q_of(row / ROW_BLOCK * ROW_BLOCK) + row % ROW_BLOCK / W * AMX_TILE_BYTES;
    for (int64_t d = 0; d < s.depth; d += DEPTH, to += 2 * AMX_TILE_BYTES) {
      vu tile[W];
      for (int i = 0; i < W; ++i) {
        int64_t r = row + i;
        const bf16* from = q + r / group * a.q_token_stride + r % group * a.q_head_stride + d;
        tile[i] = r < rows ? load_depth(from, a.dim - d) : vu{};
      }
      transpose_words(tile);
      for (int i = 0; i < W; ++i) store_words(to + i * AMX_ROW_BYTES, tile[i]);
    }
  }
}

// Rows of keys from `t` on as they are.
inline void pack_keys(const TileRows<bf16>& rows, int64_t t, int64_t dim, const TiledScratch& s) {
  for (int64_t i = 0; i < TILE; ++i, ++t) {
    char* to = s.keys + t / AMX_ROWS * s.steps() * AMX_TILE_BYTES + t % AMX_ROWS * AMX_ROW_BYTES;
    for (int64_t d = 0; d < s.depth; d += DEPTH, to += AMX_TILE_BYTES) {
      store_words(to, i < rows.count ? load_depth(rows.k[i] + d, dim - d) : vu{});
    }
  }
}

// Rows of values from `t` on, transposed: 32 of them at a time in pairs, first the even numbers of
// each, then the odd ones.
inline void pack_values(const TileRows<bf16>& rows, int64_t plane, int64_t t, int64_t dim,
                        const TiledScratch& s) {
  constexpr int64_t TILES = KEYS_IN_TILES / DEPTH;
  for (int64_t first = 0; first < TILE; first += DEPTH, t += DEPTH) {
    for (int64_t d = 0; d < s.depth; d += DEPTH) {
      auto value = [&](int64_t i) {
        return i < rows.count ? load_depth(rows.k[i] + plane + d, dim - d) : vu{};
      };
      vu even[W], odd[W];
      for (int i = 0; i < W; ++i) {
        vu low = value(first + 2 * i), high = value(first + 2 * i + 1);
        even[i] = (low & 0xffff) | high << 16;
        odd[i] = low >> 16 | (high & 0xffff0000);
      }
      transpose_words(even);
      transpose_words(odd);
      char* to = s.values + (d / AMX_ROWS * TILES + t / DEPTH) * AMX_TILE_BYTES;
      for (int i = 0; i < W; ++i) {
        char* tile = to + 2 * i / AMX_ROWS * TILES * AMX_TILE_BYTES;
        char* pair = tile + 2 * i % AMX_ROWS * AMX_ROW_BYTES;
        store_words(pair, even[i]);
        store_words(pair + AMX_ROW_BYTES, odd[i]);
      }
    }
  }
}

inline void give_tiles(const Attention& a, const PrefillItem& item, const TiledScratch& s) {
  int64_t group = a.heads / a.kv_heads, rows = item.count * group;
  for (int64_t row = 0; row < rows; row += W) {
    const float* out = s.out_of(row / ROW_BLOCK * ROW_BLOCK) + row % ROW_BLOCK;
    vf factor = 1.0f / load(s.total + row);
    for_vectors(a.dim, [&](int64_t d, int n) {
      vf tile[W];
      for (int i = 0; i < W; ++i) tile[i] = load(out + (d + i) * ROW_BLOCK) * factor;
      transpose<1>(tile);
      for (int i = 0; i < W && row + i < rows; ++i) {
        int64_t r = row + i, token = a.cu_seqlens_q[item.seq] + item.first + r / group;
        bf16* to = static_cast<bf16*>(a.out);
        store_n(to + (token * a.heads + item.kv_head * group + r % group) * a.dim + d, tile[i], n);
      }
    });
  }
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry

#endif
