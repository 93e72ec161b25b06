// Pools of int8: a row is integers, and a float32 scale that each of them is multiplied with.
//
// A run (one block, plane and head) is its rows, one after the other, then their scales, from a
// multiple of 4 bytes on. That of a slot means nothing until the slot is written.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

template <class T>
constexpr bool HAS_SCALES = false;
template <>
constexpr bool HAS_SCALES<int8_t> = true;

// Bytes from the first row of a run to the scale of a slot.
KVFERRY_INLINE int64_t scale_offset(const Pool& pool, int64_t dim, int64_t slot) {
  constexpr int64_t width = sizeof(float);
  return round_up(pool.block_size * dim, width) + slot * width;
}

// Quantises a row: symmetric, the largest magnitude becomes 127; a row with a NaN or an infinity has
// a NaN for its scale, and zeros. `each` calls what it is given with (i, n, vector) for every vector
// of the row, as often as it is asked to.
template <class Each>
KVFERRY_INLINE float store_int8(int8_t* to, Each each) {
  vf most = {}, poison = {};
  each([&](int64_t, int, vf v) {
    most = larger(most, bits_as<vf>(bits_as<vu>(v) & 0x7fffffff));
    poison += v * 0.0f;
  });
  float scale = greatest(most) / 127;
  scale = (scale > 0x1p-126f ? scale : 0x1p-126f) + sum(poison);  // no division by zero
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  each([&](int64_t i, int n, vf v) {
    vf quotient = v / scale;
    quotient = quotient == quotient ? quotient : vf{};
    vi q = bits_as<vi>(quotient + magic) - bits_as<int32_t>(magic);
    vb bytes = to_bytes(q);
    memcpy(to + i, &bytes, size_t(n));
  });
  return scale;
}

// Writes a row to a slot of a run, whatever the pool's elements are; `each` as in store_int8.
template <class T, class Each>
KVFERRY_INLINE void store_row(const Pool& pool, int64_t dim, T* run, int64_t slot, Each each) {
  T* to = run + slot * dim;
  if constexpr (HAS_SCALES<T>) {
    float scale = store_int8(to, each);
    memcpy(run + scale_offset(pool, dim, slot), &scale, sizeof scale);
  } else {
    each([&](int64_t i, int n, vf v) { store_n(to + i, v, n); });
  }
}

// The scales of the rows of a tile, for pools that have none: nothing happens.
template <class T, int N>
struct TileScales {
  void take(const Attention&, int64_t, int64_t, int64_t, int64_t) {}
  void scale_scores(float*, int) const {}
  void scale_weights(float*, int) const {}
};

// Keys and values are read unscaled: what comes of a key is scaled afterwards, what meets a value
// before.
template <int N>
struct TileScales<int8_t, N> {
  float keys[N], values[N];

  // Those of positions `begin` to `end - 1`.
  KVFERRY_INLINE void take(const Attention& a, int64_t seq, int64_t kv_head, int64_t begin,
                           int64_t end) {
    const int32_t* table = a.block_tables + seq * a.table_stride;
    const int8_t* base = static_cast<const int8_t*>(a.pool.data) + kv_head * a.pool.head_stride;
    for (int64_t at = begin, here; at < end; at += here) {
      int64_t slot = at % a.pool.block_size;
      here = smaller(a.pool.block_size - slot, end - at);
      const int8_t* from = base + table[at / a.pool.block_size] * a.pool.block_stride +
                           scale_offset(a.pool, a.dim, slot);
      memcpy(keys + (at - begin), from, size_t(here) * sizeof(float));
      memcpy(values + (at - begin), from + a.pool.plane_stride, size_t(here) * sizeof(float));
    }
  }

  KVFERRY_INLINE void scale_scores(float* scores, int count) const {
    for (int t = 0; t < count; ++t) scores[t] *= keys[t];
  }
  KVFERRY_INLINE void scale_weights(float* weights, int count) const {
    for (int t = 0; t < count; ++t) weights[t] *= values[t];
  }
};

}  // namespace KVFERRY_ISA
}  // namespace kvferry
