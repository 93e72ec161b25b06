// What the linears take, and the table of them that each instruction set fills.
//
// A packed weight has the same layout on every instruction set: panels of PANEL outputs, in a panel
// one step after the other, in a step 4 bytes of inputs per output (1 float, 2 bf16 or 4 int8).
// That is one stream of memory for vectors (a step is two AVX-512 registers), and it is what AMX
// wants of its second operand. Zeros fill the last panel and the last steps. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

constexpr int64_t PANEL = 32;         // outputs side by side
constexpr int64_t STEP_MULTIPLE = 16;  // a panel's steps are a multiple of this: one AMX tile

enum WeightKind : int { WEIGHT_F32 = 0, WEIGHT_BF16 = 1, WEIGHT_I8 = 2 };

inline int64_t inputs_per_step(int kind) { return int64_t(1) << kind; }
inline int64_t steps_of(int64_t in_size, int kind) {
  int64_t inputs = inputs_per_step(kind) * STEP_MULTIPLE;
  return (in_size + inputs - 1) / inputs * STEP_MULTIPLE;
}
inline int64_t panels_of(int64_t out_size) { return (out_size + PANEL - 1) / PANEL; }

// packed = weight [out_size, in_size] in rows of row_stride elements. int8: symmetric per output,
// whose factor goes to `scales` and 128 times whose sum goes to `corrections`, both padded to PANEL.
struct PackLinear {
  void* packed;
  const void* weight;
  float* scales;
  int32_t* corrections;
  int64_t out_size, in_size, row_stride;
  int kind, dtype, threads;
};

// out[r, o] = sum over i of x[r, i] * weight[o, i], + bias[o] where bias (padded to PANEL) is given.
struct Linear {
  void* out;
  const void* x;
  const void* packed;
  const float* bias;
  const float* scales;
  const int32_t* corrections;
  int64_t rows, out_size, in_size, x_stride, out_stride;
  int kind, dtype, out_dtype, threads;
  char* workspace;  // 64-byte aligned, linear_workspace(...) bytes
};

struct LinearTable {
  void (*pack)(const PackLinear&);
  size_t (*workspace)(const Linear&);
  void (*linear)(const Linear&);
};

#define KVFERRY_DECLARE_LINEAR(isa) \
  namespace isa {                   \
  extern const LinearTable linear_table; \
  }
KVFERRY_DECLARE_LINEAR(amx)
KVFERRY_DECLARE_LINEAR(avx512_bf16)
KVFERRY_DECLARE_LINEAR(avx512)
KVFERRY_DECLARE_LINEAR(avx2_vnni)
KVFERRY_DECLARE_LINEAR(avx2)
KVFERRY_DECLARE_LINEAR(baseline)
KVFERRY_DECLARE_LINEAR(neon)
#undef KVFERRY_DECLARE_LINEAR

}  // namespace kvferry
