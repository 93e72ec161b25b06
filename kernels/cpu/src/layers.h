// Norm, gated activation, rotary embedding with the writing of KV, and the moving of blocks.
//
// Memory-bound: one pass over each row, float32 inside, one rounding at the end.
#pragma once

#include "int8_pool.h"
#include "kernels.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

// Below this many bytes a second thread costs more than it saves.
constexpr int64_t BYTES_PER_THREAD = 128 << 10;

inline int threads_for(int64_t bytes, int threads) {
  return int(larger(1, smaller(threads, bytes / BYTES_PER_THREAD)));
}

// Calls f with a null pointer of the element type.
template <class F>
void with_activation(int dtype, F f) {
  if (dtype == BF16) {
    f(static_cast<bf16*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}
template <class F>
void with_pool(int dtype, F f) {
  if (dtype == I8) {
    f(static_cast<int8_t*>(nullptr));
  } else if (dtype == F16) {
    f(static_cast<f16*>(nullptr));
  } else {
    with_activation(dtype, f);
  }
}

// --- norm ----------------------------------------------------------------------------------------

// x as it is, or residual + x, which is stored.
template <class T>
KVFERRY_INLINE vf norm_input(const T* x, T* residual, int n) {
  vf v = load_n(x, n);
  if (!residual) return v;
  store_n(residual, load_n(residual, n) + v, n);
  return load_n(residual, n);
}

template <class T>
KVFERRY_INLINE void norm_row(T* out, const T* x, T* residual, const T* weight, int64_t size,
                             float eps) {
  vf squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= size; i += 4 * W) {
    KVFERRY_UNROLL
    for (int j = 0; j < 4; ++j) {
      vf v = norm_input(x + i + j * W, residual ? residual + i + j * W : nullptr, W);
      squares[j] += v * v;
    }
  }
  for (; i < size; i += W) {
    int n = int(smaller(W, size - i));
    vf v = norm_input(x + i, residual ? residual + i : nullptr, n);
    squares[0] += v * v;
  }
  float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(size);
  float factor = 1.0f / __builtin_sqrtf(mean + eps);
  const T* from = residual ? residual : x;
  for_vectors(size, [&](int64_t at, int n) {
    store_n(out + at, load_n(from + at, n) * factor * load_n(weight + at, n), n);
  });
}

template <class T>
void rms_norm_of(const RmsNorm& a) {
  int64_t rows = a.outer * a.inner;
  int threads = threads_for(rows * a.size * int64_t(sizeof(T)), a.threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    int64_t from = row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
    norm_row(static_cast<T*>(a.out) + row * a.size, static_cast<const T*>(a.x) + from,
             a.residual ? static_cast<T*>(a.residual) + row * a.size : nullptr,
             static_cast<const T*>(a.weight), a.size, a.eps);
  }
}

inline void rms_norm(const RmsNorm& a) {
  with_activation(a.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    rms_norm_of<T>(a);
  });
}

// --- gated activation ----------------------------------------------------------------------------

template <class T>
void silu_mul_of(const SiluMul& a) {
  int threads = threads_for(3 * a.rows * a.size * int64_t(sizeof(T)), a.threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* gate = static_cast<const T*>(a.gate_up) + row * a.row_stride;
    const T* up = gate + a.size;
    T* out = static_cast<T*>(a.out) + row * a.size;
    for_vectors(a.size, [&](int64_t i, int n) {
      vf g = load_n(gate + i, n);
      store_n(out + i, g / (1.0f + exp(-g)) * load_n(up + i, n), n);
    });
  }
}

inline void silu_mul(const SiluMul& a) {
  with_activation(a.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    silu_mul_of<T>(a);
  });
}

// --- rotary embedding ----------------------------------------------------------------------------

// Sine and cosine in double, so that angles of a million radians keep float32's precision.
KVFERRY_INLINE void sine_cosine(vf angle, vf& sine, vf& cosine) {
  vd x = __builtin_convertvector(angle, vd);
  constexpr double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  vd n = (x * 0.63661977236758134308 + magic) - magic;
  vd r = x - n * 1.57079632679489655800;
  r = r - n * 6.12323399573676603587e-17;
  vd z = r * r;
  vd s = r + r * z * (-1.66666666666666324348e-1 + z * (8.33333333332248946124e-3 + z * (
      -1.98412698298579493134e-4 + z * (2.75573137070700676789e-6 + z * -2.50507602534068634195e-8))));
  vd c = 1.0 - 0.5 * z + z * z * (4.16666666666666019037e-2 + z * (-1.38888888888741095749e-3 + z * (
      2.48015872894767294178e-5 + z * (-2.75573143513906633035e-7 + z * 2.08757232129817482790e-9))));
  vl quadrant = __builtin_convertvector(n, vl);
  vl swapped = (quadrant & 1) != 0;
  vd first = swapped ? c : s, second = swapped ? s : c;
  sine = __builtin_convertvector((quadrant & 2) != 0 ? -first : first, vf);
  cosine = __builtin_convertvector(((quadrant + 1) & 2) != 0 ? -second : second, vf);
}

template <class T>
void rope_tables_of(const RopeTables& a) {
  int threads = threads_for(a.tokens * a.half * 64, a.threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t token = 0; token < a.tokens; ++token) {
    T* cos = static_cast<T*>(a.cos) + token * 2 * a.half;
    T* sin = static_cast<T*>(a.sin) + token * 2 * a.half;
    float position = float(a.positions[token]);
    for_vectors(a.half, [&](int64_t i, int n) {
      vf sine, cosine;
      sine_cosine(load_n(a.inv_freq + i, n) * position, sine, cosine);
      for (int64_t at : {i, i + a.half}) {
        store_n(cos + at, cosine * a.factor, n);
        store_n(sin + at, sine * a.factor, n);
      }
    });
  }
}

inline void rope_tables(const RopeTables& a) {
  with_activation(a.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    rope_tables_of<T>(a);
  });
}

// Calls f(i, n, vector) for every vector of a row as it is, or turned.
template <class T, class F>
KVFERRY_INLINE void each_of(const T* from, int64_t size, F f) {
  for_vectors(size, [&](int64_t i, int n) { f(i, n, load_n(from + i, n)); });
}
template <class T, class F>
KVFERRY_INLINE void each_turned(const T* x, const T* cos, const T* sin, int64_t dim, F f) {
  int64_t half = dim / 2;
  for_vectors(half, [&](int64_t i, int n) {
    vf a = load_n(x + i, n), b = load_n(x + half + i, n);
    f(i, n, a * load_n(cos + i, n) - b * load_n(sin + i, n));
    f(half + i, n, b * load_n(cos + half + i, n) + a * load_n(sin + half + i, n));
  });
}

template <class T, class TPool>
KVFERRY_INLINE void rope_token(const Rope& a, int64_t token) {
  const T* x = static_cast<const T*>(a.x) + token * a.x_token_stride;
  const T* cos = static_cast<const T*>(a.cos) + token * a.table_stride;
  const T* sin = static_cast<const T*>(a.sin) + token * a.table_stride;
  T* out = static_cast<T*>(a.out) + token * a.heads * a.dim;
  for (int64_t head = 0; head < a.heads; ++head, out += a.dim) {
    each_turned(x + head * a.x_head_stride, cos, sin, a.dim,
                [&](int64_t i, int n, vf v) { store_n(out + i, v, n); });
  }
  if (!a.pool.data) return;
  x += a.heads * a.x_head_stride;
  const T* v = static_cast<const T*>(a.v) + token * a.v_token_stride;
  int64_t block = a.slots[token] / a.pool.block_size, slot = a.slots[token] % a.pool.block_size;
  TPool* run = static_cast<TPool*>(a.pool.data) + block * a.pool.block_stride;
  for (int64_t head = 0; head < a.kv_heads; ++head, run += a.pool.head_stride) {
    const T* key = x + head * a.x_head_stride;
    const T* value = v + head * a.v_head_stride;
    store_row(a.pool, a.dim, run, slot, [&](auto f) {
      if (a.cos) {
        each_turned(key, cos, sin, a.dim, f);
      } else {
        each_of(key, a.dim, f);
      }
    });
    store_row(a.pool, a.dim, run + a.pool.plane_stride, slot,
              [&](auto f) { each_of(value, a.dim, f); });
  }
}

inline void rope(const Rope& a) {
  int64_t bytes = a.tokens * (a.heads + 2 * a.kv_heads) * a.dim * 8;
  int threads = threads_for(bytes, a.threads);
  with_activation(a.dtype, [&](auto* t) {
    with_pool(a.pool.dtype, [&](auto* p) {
      using T = std::remove_pointer_t<decltype(t)>;
      using TPool = std::remove_pointer_t<decltype(p)>;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
      for (int64_t token = 0; token < a.tokens; ++token) rope_token<T, TPool>(a, token);
    });
  });
}

// --- blocks --------------------------------------------------------------------------------------

inline void move_blocks(const MoveBlocks& a) {
  int threads = threads_for(a.count * a.block_bytes, a.threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < a.count; ++i) {
    int64_t to = a.target_ids ? a.target_ids[i] : i, from = a.source_ids ? a.source_ids[i] : i;
    memcpy(a.target + to * a.block_bytes, a.source + from * a.block_bytes, size_t(a.block_bytes));
  }
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry
