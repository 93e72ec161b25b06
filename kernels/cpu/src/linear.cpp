// The linears for one instruction set: compiled once for each, with KVFERRY_ISA naming it.
//
// A panel of weights comes from memory once and is multiplied with all rows while it lies in cache,
// in chunks of its steps; while one chunk is in use the next is fetched, a share of it per tile, so
// that memory does not rest while several tiles compute. Threads take panels as they come.
#include "linear.h"

#include <omp.h>

#include <type_traits>

#include "linear_amx.h"
#include "linear_pack.h"
#include "linear_rows.h"
#include "linear_tile.h"

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int64_t MAX_ROWS = 512;      // of x in the workspace,
constexpr int64_t X_BYTES = 1 << 20;   // and of their bytes: they are read again for every panel
constexpr int64_t CHUNK_STEPS = 256;   // 32 KB of a panel
constexpr int64_t LINE = 64;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a row of x takes at most, in the bytes of a row of its steps.
inline int64_t copies_of_row(const Linear& a) {
#if defined(__AMX_TILE__)
  return a.kind == WEIGHT_BF16 && a.dtype == F32 ? AmxF32::PARTS : 1;
#else
  return a.kind == WEIGHT_F32 ? 1 : 2;
#endif
}

// A number of rows at a time, and where in the workspace what belongs to them lies: their factors,
// x, and for each thread sums [rows, PANEL] and one row of x.
struct Block {
  const Linear& a;
  int64_t first, count, steps, at_once;

  explicit Block(const Linear& of) : a(of), first(0), steps(steps_of(of.in_size, of.kind)) {
    at_once = smaller(MAX_ROWS, larger(1, X_BYTES / row_bytes() / 32) * 32);
    count = smaller(a.rows, at_once);
  }
  int64_t padded() const { return round_up(smaller(a.rows, at_once), 32); }
  int64_t row_bytes() const { return steps * 4 * copies_of_row(a); }
  int64_t sums_bytes() const { return padded() * copies_of_row(a) * PANEL * 4; }
  int64_t thread_bytes() const { return sums_bytes() + row_bytes(); }
  size_t bytes() const {
    return size_t(padded() * 4 + padded() * row_bytes() + thread_bytes() * a.threads);
  }

  float* factors() const { return reinterpret_cast<float*>(a.workspace); }
  char* x() const { return a.workspace + padded() * 4; }
  uint32_t* sums() const {
    return reinterpret_cast<uint32_t*>(x() + padded() * row_bytes() +
                                       thread_bytes() * omp_get_thread_num());
  }
  uint32_t* row() const { return sums() + sums_bytes() / 4; }
  const char* panel(int64_t index) const {
    return static_cast<const char*>(a.packed) + index * steps * PANEL * 4;
  }
  template <class T>
  const T* row_of_x(int64_t r) const {
    return static_cast<const T*>(a.x) + (first + r) * a.x_stride;
  }
};

size_t workspace_of(const Linear& a) { return Block(a).bytes(); }

// Rows [begin, end) of sums [count, PARTS, PANEL] of one panel to out.
template <bool QUANTISED, int OFFSET, int PARTS, class TOut>
void finish(const Block& b, int64_t panel, const uint32_t* sums, int64_t begin, int64_t end) {
  const Linear& a = b.a;
  int64_t at = panel * PANEL, width = smaller(PANEL, a.out_size - at);
  for (int64_t r = begin; r < end; ++r) {
    TOut* to = static_cast<TOut*>(a.out) + (b.first + r) * a.out_stride + at;
    for_vectors(width, [&](int64_t i, int n) {
      vf y;
      if constexpr (QUANTISED) {
        vi total = load_raw<vi>(sums + r * PANEL + i);
        if (OFFSET) total -= load_raw<vi>(a.corrections + at + i);
        y = __builtin_convertvector(total, vf) * (b.factors()[r] * load(a.scales + at + i));
      } else {
        y = load_raw<vf>(sums + (r * PARTS + PARTS - 1) * PANEL + i);
        for (int p = PARTS - 2; p >= 0; --p) y += load_raw<vf>(sums + (r * PARTS + p) * PANEL + i);
      }
      if (a.bias) y += load(a.bias + at + i);
      store_n(to + i, y, n);
    });
  }
}

template <class Way>
void finish(const Block& b, int64_t panel, const uint32_t* sums, int64_t begin, int64_t end) {
  if (b.a.out_dtype == BF16) {
    finish<Way::QUANTISED, Way::OFFSET, Way::PARTS, bf16>(b, panel, sums, begin, end);
  } else {
    finish<Way::QUANTISED, Way::OFFSET, Way::PARTS, float>(b, panel, sums, begin, end);
  }
}

// --- vectors -------------------------------------------------------------------------------------

template <class M>
struct ByVectors {
  static constexpr bool QUANTISED = M::QUANTISED;
  static constexpr int OFFSET = M::OFFSET;
  static constexpr int PARTS = 1;

  static int64_t tiles(int64_t rows) { return ceil_div(rows, ROWS); }
  // tiles as even as can be, of 1 to ROWS rows
  static int64_t begin_of(int64_t tile, int64_t rows) { return tile * rows / tiles(rows); }

  template <class T>
  static void take(const Block& b, int64_t tile) {
    int64_t units = b.steps * M::UNITS;
    int64_t begin = begin_of(tile, b.count), size = begin_of(tile + 1, b.count) - begin;
    uint32_t* to = reinterpret_cast<uint32_t*>(b.x()) + begin * units;
    uint32_t* row = b.row();
    for (int64_t r = 0; r < size; ++r) {
      b.factors()[begin + r] = M::take(b.template row_of_x<T>(begin + r), b.a.in_size, b.steps, row);
      for (int64_t i = 0; i < units; ++i) to[i * size + r] = row[i];
    }
  }

  static void panel(const Block& b, int64_t index, uint32_t* sums) {
    const uint32_t* weights = reinterpret_cast<const uint32_t*>(b.panel(index));
    const uint32_t* x = reinterpret_cast<const uint32_t*>(b.x());
    int64_t num_tiles = tiles(b.count), parts = num_tiles * (PANEL / PART);
    int lines = int(ceil_div(UNROLLED * PANEL * 4 / LINE, parts));
    for (int64_t step = 0; step < b.steps; step += CHUNK_STEPS) {
      int64_t steps = smaller(CHUNK_STEPS, b.steps - step);
      const uint32_t* chunk = weights + step * PANEL;
      Ahead ahead{reinterpret_cast<const char*>(chunk + steps * PANEL), lines};
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        int64_t begin = begin_of(tile, b.count), size = begin_of(tile + 1, b.count) - begin;
        const uint32_t* rows = x + begin * b.steps * M::UNITS + step * M::UNITS * size;
        for (int64_t part = 0; part < PANEL; part += PART) {
          tile_of<M>(size, rows, chunk + part, steps, sums + begin * PANEL + part, step == 0,
                     ahead);
        }
        if (step + steps == b.steps) finish<ByVectors>(b, index, sums, begin, begin + size);
      }
    }
  }

  struct Guard {};
};

// --- AMX -----------------------------------------------------------------------------------------

#if defined(__AMX_TILE__)
template <class M>
struct ByTiles {
  static constexpr bool QUANTISED = M::QUANTISED;
  static constexpr int OFFSET = 0;
  static constexpr int PARTS = M::PARTS;

  static int64_t tiles(int64_t rows) { return ceil_div(rows * PARTS, TILE_ROWS); }

  template <class T>
  static void take(const Block& b, int64_t tile) {
    char* to = b.x() + tile * TILE_ROWS * b.steps * 4;
    const char* row = reinterpret_cast<const char*>(b.row());
    int64_t held = -1;  // the row of x whose parts `row` has
    for (int64_t i = 0; i < TILE_ROWS; ++i) {
      int64_t r = (tile * TILE_ROWS + i) / PARTS, part = (tile * TILE_ROWS + i) % PARTS;
      const char* from = row + part * b.steps * 4;
      if (r < b.count && r != held) {
        float factor = M::take(b.template row_of_x<T>(r), b.a.in_size, b.steps, b.row());
        if (QUANTISED) b.factors()[r] = factor;
        held = r;
      }
      for (int64_t at = 0; at < b.steps / STEP_MULTIPLE; ++at) {
        char* piece = to + (at * TILE_ROWS + i) * TILE_BYTES;
        if (r < b.count) {
          memcpy(piece, from + at * TILE_BYTES, TILE_BYTES);
        } else {
          memset(piece, 0, TILE_BYTES);
        }
      }
    }
  }

  static void panel(const Block& b, int64_t index, uint32_t* sums) {
    int64_t num_tiles = tiles(b.count), pairs = ceil_div(num_tiles, 2);
    int lines = int(ceil_div(STEP_MULTIPLE * PANEL * 4 / LINE, pairs));
    int64_t finished = 0;
    const char* weights = b.panel(index);
    const char* ahead = b.panel(index + 1);
    for (int64_t tile = 0; tile < num_tiles; tile += 2) {
      const char* x = b.x() + tile * TILE_ROWS * b.steps * 4;
      uint32_t* to = sums + tile * TILE_ROWS * PANEL;
      if (tile + 1 < num_tiles) {
        amx_tile<M, 2>(x, weights, b.steps, to, ahead, lines);
      } else {
        amx_tile<M, 1>(x, weights, b.steps, to, ahead, lines);
      }
      ahead += b.steps / STEP_MULTIPLE * lines * LINE;
      int64_t ready = smaller((tile + 2) * TILE_ROWS / PARTS, b.count);
      finish<ByTiles>(b, index, sums, finished, ready);
      finished = ready;
    }
  }

  using Guard = TilesInUse;
};
#endif

// --- either --------------------------------------------------------------------------------------

template <class Way, class T>
void linear_by(const Linear& a) {
  Block b(a);
  int64_t panels = panels_of(a.out_size), panel_bytes = b.steps * PANEL * 4;
  for (; b.first < a.rows; b.first += b.at_once) {
    b.count = smaller(b.at_once, a.rows - b.first);
    int64_t tiles = Way::tiles(b.count);
    int64_t work = panels * panel_bytes * larger(1, b.count / 16);
    int threads = int(smaller(threads_for(work, a.threads), panels));
    int64_t share = larger(1, panels / (threads * 8));
    if (tiles == 1) Way::template take<T>(b, 0);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      if (tiles > 1) {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; ++tile) Way::template take<T>(b, tile);
      }
      typename Way::Guard guard;
      (void)guard;
      uint32_t* sums = b.sums();
#pragma omp for schedule(dynamic, share)
      for (int64_t panel = 0; panel < panels; ++panel) Way::panel(b, panel, sums);
    }
  }
}

template <class Way>
void linear_by(const Linear& a) {
  if (a.dtype == BF16) {
    linear_by<Way, bf16>(a);
  } else {
    linear_by<Way, float>(a);
  }
}

void linear(const Linear& a) {
  if (a.kind == WEIGHT_F32) return linear_by<ByVectors<TimesF32>>(a);
#if defined(__AMX_TILE__)
  if (a.kind == WEIGHT_I8) return linear_by<ByTiles<AmxI8>>(a);
  if (a.dtype == BF16) return linear_by<ByTiles<AmxBF16>, bf16>(a);
#else
  if (a.kind == WEIGHT_I8) return linear_by<ByVectors<TimesI8>>(a);
  if (a.dtype == BF16) return linear_by<ByVectors<TimesBF16>, bf16>(a);
#endif
#if defined(__AMX_TILE__)
  linear_by<ByTiles<AmxF32>, float>(a);
#else
  linear_by<ByVectors<TimesWidened>, float>(a);
#endif
}

extern const LinearTable linear_table;
const LinearTable linear_table = {pack_linear, workspace_of, linear};

}  // namespace KVFERRY_ISA
}  // namespace kvferry
