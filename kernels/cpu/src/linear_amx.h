// Products of rows with a panel in AMX tiles: 16 rows by 16 outputs by 64 bytes of inputs.
//
// Two tiles of rows by the two halves of a panel at a time; the sums of all inputs stay in tiles.
// Rows are padded to whole tiles, so a row's sum is the same alone and in any batch.
#pragma once

#include "amx.h"
#include "linear_rows.h"

#if defined(__AMX_TILE__)

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int64_t TILE_ROWS = AMX_ROWS;
constexpr int64_t TILE_BYTES = AMX_ROW_BYTES;

// What a row of x becomes: PARTS rows whose products add up to that of the row.
struct AmxBF16 {
  static constexpr bool QUANTISED = false;
  static constexpr int PARTS = 1;
  template <class T>
  static float take(const T* x, int64_t in_size, int64_t steps, uint32_t* to) {
    take_bf16(x, in_size, 2 * steps, reinterpret_cast<bf16*>(to));
    return 1;
  }
};

// float32 in three bf16 of 8 bits each, which add up to it exactly (but for what is below 1e-38):
// with bf16 weights every product is exact in float32, as with float32 instructions.
struct AmxF32 {
  static constexpr bool QUANTISED = false;
  static constexpr int PARTS = 3;
  template <class T>
  static float take(const T* x, int64_t in_size, int64_t steps, uint32_t* to) {
    bf16* parts = reinterpret_cast<bf16*>(to);
    int64_t count = 2 * steps;
    for_vectors(in_size, [&](int64_t i, int n) {
      vf rest = load_n(x + i, n);
      rest = rest == rest ? rest : splat(__builtin_nanf(""));
      KVFERRY_UNROLL
      for (int p = 0; p < PARTS; ++p) {
        vu part = bits_as<vu>(rest) & 0xffff0000;
        vh top = __builtin_convertvector(part >> 16, vh);
        memcpy(parts + p * count + i, &top, size_t(n) * sizeof(bf16));
        rest -= bits_as<vf>(part);
        rest = rest == rest ? rest : vf{};  // behind an infinity or NaN
      }
    });
    for (int p = 0; p < PARTS; ++p) {
      memset(parts + p * count + in_size, 0, size_t(count - in_size) * sizeof(bf16));
    }
    return 1;
  }
};

struct AmxI8 {
  static constexpr bool QUANTISED = true;
  static constexpr int PARTS = 1;
  template <class T>
  static float take(const T* x, int64_t in_size, int64_t steps, uint32_t* to) {
    return take_int8(x, in_size, 4 * steps, reinterpret_cast<int8_t*>(to), 0);
  }
};

#define KVFERRY_TILE_DOT(sums, x, w)   \
  if constexpr (M::QUANTISED) {        \
    _tile_dpbssd(sums, x, w);          \
  } else {                             \
    _tile_dpbf16ps(sums, x, w);        \
  }

// sums [TILES * TILE_ROWS, PANEL] = x times a panel; x [TILES, steps / 16, TILE_ROWS, TILE_BYTES].
template <class M, int TILES>
void amx_tile(const char* x, const char* w, int64_t steps, uint32_t* sums, const char* ahead,
              int lines) {
  constexpr int64_t panel_row = PANEL * 4, tile_bytes = TILE_ROWS * TILE_BYTES;
  const char* second = x + steps / STEP_MULTIPLE * tile_bytes;
  _tile_zero(0);
  _tile_zero(1);
  if (TILES > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; s += STEP_MULTIPLE) {
    for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    _tile_loadd(6, w, panel_row);
    _tile_loadd(7, w + TILE_BYTES, panel_row);
    _tile_loadd(4, x, TILE_BYTES);
    KVFERRY_TILE_DOT(0, 4, 6);
    KVFERRY_TILE_DOT(1, 4, 7);
    if (TILES > 1) {
      _tile_loadd(5, second, TILE_BYTES);
      KVFERRY_TILE_DOT(2, 5, 6);
      KVFERRY_TILE_DOT(3, 5, 7);
    }
    x += tile_bytes;
    second += tile_bytes;
    w += STEP_MULTIPLE * panel_row;
  }
  _tile_stored(0, sums, panel_row);
  _tile_stored(1, sums + TILE_ROWS, panel_row);
  if (TILES > 1) {
    _tile_stored(2, sums + TILE_ROWS * PANEL, panel_row);
    _tile_stored(3, sums + TILE_ROWS * PANEL + TILE_ROWS, panel_row);
  }
}
#undef KVFERRY_TILE_DOT

}  // namespace KVFERRY_ISA
}  // namespace kvferry

#endif
