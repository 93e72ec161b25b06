// AMX's tiles, of 16 rows by 64 bytes, for whatever is multiplied in them.
#pragma once

#include <cstdint>

#if defined(__AMX_TILE__)
#include <immintrin.h>

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int64_t AMX_ROWS = 16;
constexpr int64_t AMX_ROW_BYTES = 64;
constexpr int64_t AMX_TILE_BYTES = AMX_ROWS * AMX_ROW_BYTES;

struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// All eight tiles in full, as long as it lives.
struct TilesInUse {
  TilesInUse() {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) shapes.row_bytes[i] = AMX_ROW_BYTES, shapes.rows[i] = AMX_ROWS;
    _tile_loadconfig(&shapes);
  }
  ~TilesInUse() { _tile_release(); }
};

// What was stored before is in memory: GCC does not know that the loading of a tile reads it.
inline void before_tiles_load() { asm volatile("" ::: "memory"); }

}  // namespace KVFERRY_ISA
}  // namespace kvferry

#endif
