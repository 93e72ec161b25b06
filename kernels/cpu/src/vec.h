// Vectors of the native width of this build, in GCC's vector extensions.
//
// Everything lies in a namespace of its own per instruction set: a function that two builds shared
// by name would be merged by the linker, and the wrong one might be kept. For the same reason
// nothing here, and nothing that includes it, uses a template of the standard library at run time.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

// half precision and int8 have no other way to the instruction
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef KVFERRY_ISA
#error "KVFERRY_ISA names the instruction set of this build"
#endif

#define KVFERRY_INLINE inline __attribute__((always_inline))
#define KVFERRY_UNROLL _Pragma("GCC unroll 16")

namespace kvferry {
namespace KVFERRY_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats per vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;  // 32 of them, not 16
#else
constexpr bool MANY_REGISTERS = false;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));
typedef double vd __attribute__((vector_size(8 * W)));
typedef int64_t vl __attribute__((vector_size(8 * W)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class To, class From>
KVFERRY_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

KVFERRY_INLINE vf splat(float x) { return x - vf{}; }

// Keeps a value in a register: the compiler would rather load it again for every use.
KVFERRY_INLINE void hold(vf& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
}

// --- scalars -------------------------------------------------------------------------------------

KVFERRY_INLINE float widen(float x) { return x; }
KVFERRY_INLINE float widen(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }
KVFERRY_INLINE float widen(f16 x) {
  uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  uint32_t wide = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  if (magnitude >= 0x0f800000) wide |= 0x7f800000;  // infinities and NaN
  return bits_as<float>(wide | uint32_t(x.bits & 0x8000) << 16);
}

KVFERRY_INLINE void narrow(float x, float* to) { *to = x; }
KVFERRY_INLINE void narrow(float x, bf16* to) {
  uint32_t bits = bits_as<uint32_t>(x);
  to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
KVFERRY_INLINE void narrow(float x, f16* to) {
  uint32_t bits = bits_as<uint32_t>(x), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) {
    bits = 0x7e00;
  } else if (bits >= 0x47800000) {
    bits = 0x7c00;
  } else if (bits < 0x38800000) {  // subnormal: the addition rounds
    bits = bits_as<uint32_t>(bits_as<float>(bits) + 0.5f) - 0x3f000000;
  } else {
    bits = (bits + 0xc8000fff + (bits >> 13 & 1)) >> 13;
  }
  to->bits = uint16_t(bits | sign);
}

// --- loads and stores of W elements, in order ----------------------------------------------------

template <class V, class T>
KVFERRY_INLINE V load_raw(const T* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

KVFERRY_INLINE vf load(const float* from) { return load_raw<vf>(from); }
KVFERRY_INLINE vf load(const bf16* from) {
  return bits_as<vf>(__builtin_convertvector(load_raw<vh>(from), vu) << 16);
}
KVFERRY_INLINE vf load(const f16* from) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, load_raw<__m256i>(from));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(load_raw<__m128i>(from));
#elif defined(__aarch64__)
  return vcvt_f32_f16(load_raw<float16x4_t>(from));
#else
  vu half = __builtin_convertvector(load_raw<vh>(from), vu);
  vu magnitude = (half & 0x7fff) << 13;
  vu wide = bits_as<vu>(bits_as<vf>(magnitude) * 0x1p112f);
  wide |= bits_as<vu>(magnitude >= 0x0f800000) & 0x7f800000;
  return bits_as<vf>(wide | (half & 0x8000) << 16);
#endif
}
KVFERRY_INLINE vf load(const int8_t* from) {
#if defined(__AVX512F__)
  vi wide = bits_as<vi>(_mm512_maskz_cvtepi8_epi32(0xffff, load_raw<__m128i>(from)));
#elif defined(__AVX2__)
  vi wide = bits_as<vi>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_raw<int64_t>(from))));
#else
  vi wide = __builtin_convertvector(load_raw<vb>(from), vi);
#endif
  return __builtin_convertvector(wide, vf);
}

// Integers of -128 to 127 as bytes.
KVFERRY_INLINE vb to_bytes(vi v) {
#if defined(__AVX512F__)
  return bits_as<vb>(_mm512_maskz_cvtepi32_epi8(0xffff, bits_as<__m512i>(v)));
#elif defined(__AVX2__)
  __m256i wide = bits_as<__m256i>(v);
  __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  return bits_as<vb>(_mm_cvtsi128_si64(_mm_packs_epi16(half, half)));
#else
  return __builtin_convertvector(v, vb);
#endif
}

KVFERRY_INLINE void store(float* to, vf v) { memcpy(to, &v, sizeof v); }
KVFERRY_INLINE void store(bf16* to, vf v) {
  vu bits = bits_as<vu>(v);
  vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  vu nan = bits_as<vu>(v != v);
  vh narrowed = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vh);
  memcpy(to, &narrowed, sizeof narrowed);
}
KVFERRY_INLINE void store(f16* to, vf v) {
#if defined(__AVX512F__)
  __m256i narrowed = _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
  memcpy(to, &narrowed, sizeof narrowed);
#elif defined(__F16C__)
  __m128i narrowed = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  memcpy(to, &narrowed, sizeof narrowed);
#elif defined(__aarch64__)
  float16x4_t narrowed = vcvt_f16_f32(v);
  memcpy(to, &narrowed, sizeof narrowed);
#else
  for (int i = 0; i < W; ++i) narrow(v[i], to + i);
#endif
}

// The first n < W elements, zeros behind them.
template <class T>
KVFERRY_INLINE vf load_some(const T* from, int64_t n) {
  T all[W] = {};
  memcpy(all, from, size_t(n) * sizeof(T));
  return load(all);
}
template <class T>
KVFERRY_INLINE void store_some(T* to, vf v, int64_t n) {
  T all[W];
  store(all, v);
  memcpy(to, all, size_t(n) * sizeof(T));
}

// Calls f(i, load, store) for each W of `size` elements, the last ones in part.
template <class F>
KVFERRY_INLINE void for_vectors(int64_t size, F f) {
  int64_t i = 0;
  for (; i + W <= size; i += W) f(i, W);
  if (i < size) f(i, int(size - i));
}
template <class T>
KVFERRY_INLINE vf load_n(const T* from, int n) {
  return n == W ? load(from) : load_some(from, n);
}
template <class T>
KVFERRY_INLINE void store_n(T* to, vf v, int n) {
  if (n == W) {
    store(to, v);
  } else {
    store_some(to, v, n);
  }
}

// --- loads of 2 W elements in whatever order is cheapest -----------------------------------------

// Where element d of 2 W lies: even ones first for bf16, whose widening is then one instruction per
// vector without a shuffle.
template <class T>
KVFERRY_INLINE int paired(int d) {
  return d;
}
template <>
KVFERRY_INLINE int paired<bf16>(int d) {
  return (d & 1) * W + (d >> 1);
}

template <class T>
KVFERRY_INLINE void load_pair(const T* from, vf& first, vf& second) {
  first = load(from);
  second = load(from + W);
}
template <>
KVFERRY_INLINE void load_pair<bf16>(const bf16* from, vf& first, vf& second) {
  vu both = load_raw<vu>(from);
  first = bits_as<vf>(both << 16);
  second = bits_as<vf>(both & 0xffff0000);
}

// --- across lanes --------------------------------------------------------------------------------

// Two rows become two: low takes the lanes without bit S of both, high those with it.
template <int S, size_t... L>
KVFERRY_INLINE void exchange(vf a, vf b, vf& low, vf& high, std::index_sequence<L...>) {
#if defined(__clang__)
  low = __builtin_shufflevector(a, b, (int(L) & S ? int(L) - S + W : int(L))...);
  high = __builtin_shufflevector(a, b, (int(L) & S ? int(L) + W : int(L) + S)...);
#else
  low = __builtin_shuffle(a, b, vi{(int(L) & S ? int(L) - S + W : int(L))...});
  high = __builtin_shuffle(a, b, vi{(int(L) & S ? int(L) + W : int(L) + S)...});
#endif
}
template <int S>
KVFERRY_INLINE void exchange(vf a, vf b, vf& low, vf& high) {
  exchange<S>(a, b, low, high, std::make_index_sequence<W>());
}

// The sums of N = W vectors: lane i holds that of rows[i].
template <int N>
KVFERRY_INLINE vf sums_of(const vf* rows) {
  if constexpr (N == 1) {
    return rows[0];
  } else {
    vf low, high;
    exchange<N / 2>(sums_of<N / 2>(rows), sums_of<N / 2>(rows + N / 2), low, high);
    return low + high;
  }
}

template <int S>
KVFERRY_INLINE void transpose(vf* rows) {
  if constexpr (S < W) {
    KVFERRY_UNROLL
    for (int i = 0; i < W; ++i) {
      if (!(i & S)) exchange<S>(rows[i], rows[i + S], rows[i], rows[i + S]);
    }
    transpose<2 * S>(rows);
  }
}

// Calls v = f(v, v with its halves exchanged), for ever smaller halves; every lane gets the result.
template <int S = W / 2, class F>
KVFERRY_INLINE float fold(vf v, F f) {
  vf low, high;
  exchange<S>(v, v, low, high);
  v = f(low, high);
  if constexpr (S > 1) {
    return fold<S / 2>(v, f);
  } else {
    return v[0];
  }
}

KVFERRY_INLINE float sum(vf v) {
  return fold(v, [](vf a, vf b) { return a + b; });
}
KVFERRY_INLINE float greatest(vf v) {
  return fold(v, [](vf a, vf b) { return a > b ? a : b; });
}

KVFERRY_INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

KVFERRY_INLINE vi lanes() {
  vi v;
  KVFERRY_UNROLL
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

// --- functions -----------------------------------------------------------------------------------

// e^x to 1e-7; 0 below -87, e^88 above 88; NaN stays. (Cephes' polynomial.)
KVFERRY_INLINE vf exp(vf x) {
  vi tiny = x < -87.0f;
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vf n = (x * 1.44269504f + magic) - magic;
  vf r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  vf power = bits_as<vf>((__builtin_convertvector(n, vi) + 127) << 23);
  vf y = p * power;
  return tiny ? vf{} : y;
}

KVFERRY_INLINE vf tanh(vf x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace KVFERRY_ISA
}  // namespace kvferry
