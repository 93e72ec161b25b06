// Rows of activations as the linears read them: 4 bytes of a row after the other, as in a step.
#pragma once

#include "layers.h"
#include "linear.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

// `to` as floats, zeros behind in_size.
template <class T>
inline void take_floats(const T* x, int64_t in_size, int64_t count, float* to) {
  for_vectors(in_size, [&](int64_t i, int n) { store_n(to + i, load_n(x + i, n), n); });
  memset(to + in_size, 0, size_t(count - in_size) * sizeof(float));
}

template <class T>
inline void take_bf16(const T* x, int64_t in_size, int64_t count, bf16* to) {
  for_vectors(in_size, [&](int64_t i, int n) { store_n(to + i, load_n(x + i, n), n); });
  memset(to + in_size, 0, size_t(count - in_size) * sizeof(bf16));
}

// v, which no later addition is fused with: a tie is then rounded alike on every instruction set.
KVFERRY_INLINE vf not_fused(vf v) {
#if defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

// Symmetric int8 plus `offset`; returns the factor that undoes it: NaN where the row has a NaN or
// an infinity, so that its outputs have one too.
template <class T>
inline float take_int8(const T* x, int64_t in_size, int64_t count, int8_t* to, int offset) {
  vf most{}, poison{};
  for_vectors(in_size, [&](int64_t i, int n) {
    vf v = load_n(x + i, n);
    vf magnitude = bits_as<vf>(bits_as<vu>(v) & 0x7fffffff);
    most = larger(most, magnitude);
    poison += v * 0.0f;
  });
  float top = greatest(most), scale = top / 127;
  float inverse = top > 0 ? 127 / top : 0;
  if (!(inverse <= 3e38f)) inverse = 0;  // the row is zeros, but for what no bit is left for
  constexpr float magic = 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer
  for_vectors(in_size, [&](int64_t i, int n) {
    vf rounded = not_fused(load_n(x + i, n) * inverse) + magic;
    vi q = bits_as<vi>(rounded) - bits_as<int32_t>(magic) + offset;
    vb bytes = __builtin_convertvector(q, vb);
    memcpy(to + i, &bytes, size_t(n));
  });
  memset(to + in_size, offset, size_t(count - in_size));
  return scale + sum(poison);
}


}  // namespace KVFERRY_ISA
}  // namespace kvferry
