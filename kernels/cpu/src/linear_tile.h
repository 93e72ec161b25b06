// Products of a few rows with a panel, in vectors.
//
// A tile is R rows by NV vectors of sums in registers. Each step reads its weights once, and one
// broadcast of 4 bytes of x per row. A row's sum runs over the inputs in order, whatever R is: a row
// gets the same bits alone and in any batch.
#pragma once

#include "linear_rows.h"
#include "vec.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int NV = 2;
constexpr int ROWS = MANY_REGISTERS ? 14 : 6;  // ROWS * NV sums, NV weights, one broadcast
constexpr int PART = NV * W;                   // outputs of a tile
constexpr int UNROLLED = 4;                    // steps
static_assert(PANEL % PART == 0 && STEP_MULTIPLE % UNROLLED == 0, "whole tiles");

// Next memory to fetch while computing: `lines` per UNROLLED steps.
struct Ahead {
  const char* at;
  int lines;
  KVFERRY_INLINE void fetch() {
    for (int i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// float32 weights.
struct TimesF32 {
  using V = vf;
  static constexpr int UNITS = 1;  // per row and step
  static constexpr bool QUANTISED = false;
  static constexpr int OFFSET = 0;
  template <class T>
  static float take(const T* x, int64_t in_size, int64_t steps, uint32_t* to) {
    take_floats(x, in_size, steps, reinterpret_cast<float*>(to));
    return 1;
  }
  template <int R>
  static KVFERRY_INLINE void step(V (&sums)[R][NV], const uint32_t* x, const uint32_t* w) {
    vf weights[NV];
    KVFERRY_UNROLL
    for (int j = 0; j < NV; ++j) weights[j] = load_raw<vf>(w + j * W);
    KVFERRY_UNROLL
    for (int r = 0; r < R; ++r) {
      vf factor = splat(bits_as<float>(x[r]));
      KVFERRY_UNROLL
      for (int j = 0; j < NV; ++j) sums[r][j] += factor * weights[j];
    }
  }
};

// bf16 weights, widened: the same sums in the same order as float32 weights of the same values.
struct TimesWidened {
  using V = vf;
  static constexpr int UNITS = 2;
  static constexpr bool QUANTISED = false;
  static constexpr int OFFSET = 0;
  template <class T>
  static float take(const T* x, int64_t in_size, int64_t steps, uint32_t* to) {
    take_floats(x, in_size, 2 * steps, reinterpret_cast<float*>(to));
    return 1;
  }
  template <int R>
  static KVFERRY_INLINE void step(V (&sums)[R][NV], const uint32_t* x, const uint32_t* w) {
    vf even[NV], odd[NV];
    KVFERRY_UNROLL
    for (int j = 0; j < NV; ++j) {
      vu both = load_raw<vu>(w + j * W);
      even[j] = bits_as<vf>(both << 16);
      odd[j] = bits_as<vf>(both & 0xffff0000);
    }
    KVFERRY_UNROLL
    for (int r = 0; r < R; ++r) {
      vf factor = splat(bits_as<float>(x[r]));
      KVFERRY_UNROLL
      for (int j = 0; j < NV; ++j) sums[r][j] += factor * even[j];
    }
    KVFERRY_UNROLL
    for (int r = 0; r < R; ++r) {
      vf factor = splat(bits_as<float>(x[R + r]));
      KVFERRY_UNROLL
      for (int j = 0; j < NV; ++j) sums[r][j] += factor * odd[j];
    }
  }
};

#if defined(__AVX512BF16__)
// bf16 weights and activations.
struct TimesBF16 {
  using V = vf;
  static constexpr int UNITS = 1;
  static constexpr bool QUANTISED = false;
  static constexpr int OFFSET = 0;
  template <class T>
  static float take(const T* x, int64_t in_size, int64_t steps, uint32_t* to) {
    take_bf16(x, in_size, 2 * steps, reinterpret_cast<bf16*>(to));
    return 1;
  }
  template <int R>
  static KVFERRY_INLINE void step(V (&sums)[R][NV], const uint32_t* x, const uint32_t* w) {
    vu weights[NV];
    KVFERRY_UNROLL
    for (int j = 0; j < NV; ++j) weights[j] = load_raw<vu>(w + j * W);
    KVFERRY_UNROLL
    for (int r = 0; r < R; ++r) {
      vu pair = x[r] - vu{};
      KVFERRY_UNROLL
      for (int j = 0; j < NV; ++j) {
        sums[r][j] = bits_as<vf>(_mm512_dpbf16_ps(bits_as<__m512>(sums[r][j]),
                                                  bits_as<__m512bh>(weights[j]),
                                                  bits_as<__m512bh>(pair)));
      }
    }
  }
};
#else
using TimesBF16 = TimesWidened;
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// int8 weights times uint8 activations, which are 128 too large: `corrections` undo that.
struct TimesI8 {
  using V = vi;
  static constexpr int UNITS = 1;
  static constexpr int OFFSET = 128;
  static constexpr bool QUANTISED = true;
  template <class T>
  static float take(const T* x, int64_t in_size, int64_t steps, uint32_t* to) {
    return take_int8(x, in_size, 4 * steps, reinterpret_cast<int8_t*>(to), OFFSET);
  }
  template <int R>
  static KVFERRY_INLINE void step(V (&sums)[R][NV], const uint32_t* x, const uint32_t* w) {
    vu weights[NV];
    KVFERRY_UNROLL
    for (int j = 0; j < NV; ++j) weights[j] = load_raw<vu>(w + j * W);
    KVFERRY_UNROLL
    for (int r = 0; r < R; ++r) {
      vu four = x[r] - vu{};
      KVFERRY_UNROLL
      for (int j = 0; j < NV; ++j) {
#if defined(__AVX512VNNI__)
        sums[r][j] = bits_as<vi>(_mm512_dpbusd_epi32(
            bits_as<__m512i>(sums[r][j]), bits_as<__m512i>(four), bits_as<__m512i>(weights[j])));
#else
        sums[r][j] = bits_as<vi>(_mm256_dpbusd_avx_epi32(
            bits_as<__m256i>(sums[r][j]), bits_as<__m256i>(four), bits_as<__m256i>(weights[j])));
#endif
      }
    }
  }
};
#else
// Products of two int16, in pairs.
KVFERRY_INLINE vi pair_dot(vi a, vi b) {
#if defined(__AVX512BW__)
  return bits_as<vi>(_mm512_madd_epi16(bits_as<__m512i>(a), bits_as<__m512i>(b)));
#elif defined(__AVX2__)
  return bits_as<vi>(_mm256_madd_epi16(bits_as<__m256i>(a), bits_as<__m256i>(b)));
#elif defined(__SSE2__)
  return bits_as<vi>(_mm_madd_epi16(bits_as<__m128i>(a), bits_as<__m128i>(b)));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// int8 weights and activations as int16: inputs 0 and 2 of a step, then 1 and 3.
struct TimesI8 {
  using V = vi;
  static constexpr int UNITS = 2;
  static constexpr int OFFSET = 0;
  static constexpr bool QUANTISED = true;
  typedef int16_t vs __attribute__((vector_size(4 * W)));
  template <class T>
  static float take(const T* x, int64_t in_size, int64_t steps, uint32_t* to) {
    int8_t* bytes = reinterpret_cast<int8_t*>(to + steps);  // the second half; read before written
    float scale = take_int8(x, in_size, 4 * steps, bytes, OFFSET);
    for (int64_t s = 0; s < steps; ++s) {
      int8_t four[4];
      memcpy(four, bytes + 4 * s, 4);
      int16_t pairs[4] = {four[0], four[2], four[1], four[3]};
      memcpy(to + 2 * s, pairs, 8);
    }
    return scale;
  }
  template <int R>
  static KVFERRY_INLINE void step(V (&sums)[R][NV], const uint32_t* x, const uint32_t* w) {
    vi even[NV], odd[NV];
    KVFERRY_UNROLL
    for (int j = 0; j < NV; ++j) {
      vs four = load_raw<vs>(w + j * W);
      even[j] = bits_as<vi>(four << 8 >> 8);
      odd[j] = bits_as<vi>(four >> 8);
    }
    KVFERRY_UNROLL
    for (int r = 0; r < R; ++r) {
      vi first = int32_t(x[r]) - vi{}, second = int32_t(x[R + r]) - vi{};
      KVFERRY_UNROLL
      for (int j = 0; j < NV; ++j) {
        sums[r][j] += pair_dot(even[j], first) + pair_dot(odd[j], second);
      }
    }
  }
};
#endif

// sums [R, PANEL] (+)= x [steps, UNITS, R] times the PART of a panel at w.
template <class M, int R>
void tile(const uint32_t* x, const uint32_t* w, int64_t steps, uint32_t* sums, bool fresh,
          Ahead& ahead) {
  using V = typename M::V;
  V held[R][NV];
  KVFERRY_UNROLL
  for (int r = 0; r < R; ++r) {
    KVFERRY_UNROLL
    for (int j = 0; j < NV; ++j) held[r][j] = fresh ? V{} : load_raw<V>(sums + r * PANEL + j * W);
  }
  for (int64_t s = 0; s < steps; s += UNROLLED) {
    ahead.fetch();
    KVFERRY_UNROLL
    for (int u = 0; u < UNROLLED; ++u) {
      M::template step<R>(held, x, w);
      x += M::UNITS * R;
      w += PANEL;
    }
  }
  KVFERRY_UNROLL
  for (int r = 0; r < R; ++r) {
    KVFERRY_UNROLL
    for (int j = 0; j < NV; ++j) memcpy(sums + r * PANEL + j * W, &held[r][j], sizeof(V));
  }
}

// The same for a number of rows that is known at run time, 1 to ROWS.
template <class M, int R = ROWS>
void tile_of(int64_t rows, const uint32_t* x, const uint32_t* w, int64_t steps, uint32_t* sums,
             bool fresh, Ahead& ahead) {
  if constexpr (R > 0) {
    if (rows == R) return tile<M, R>(x, w, steps, sums, fresh, ahead);
    tile_of<M, R - 1>(rows, x, w, steps, sums, fresh, ahead);
  }
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry
