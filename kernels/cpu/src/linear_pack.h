// A weight into panels, once, when it is loaded.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "layers.h"
#include "linear.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

// The larger, or NaN where one is.
inline float larger_of(float a, float b) { return a >= b || a != a ? a : b; }

inline int8_t quantised(float x, float inverse) {
  float q = __builtin_rintf(x * inverse);
  return int8_t(q > 127 ? 127 : q < -127 ? -127 : q);
}

// One output into place: `to` is its 4 bytes of the panel's first step.
template <class T>
void pack_output(const PackLinear& a, int64_t output, char* to, int64_t steps) {
  const T* row = static_cast<const T*>(a.weight) + output * a.row_stride;
  int64_t inputs = inputs_per_step(a.kind);
  float inverse = 0;
  if (a.kind == WEIGHT_I8) {
    float most = 0;
    for (int64_t i = 0; i < a.in_size; ++i) most = larger_of(most, __builtin_fabsf(widen(row[i])));
    a.scales[output] = most / 127;
    inverse = most > 0 ? 127 / most : 0;
  }
  int32_t total = 0;
  for (int64_t s = 0; s < steps; ++s, to += PANEL * 4) {
    for (int64_t j = 0; j < inputs; ++j) {
      int64_t i = s * inputs + j;
      float value = i < a.in_size ? widen(row[i]) : 0.0f;
      if (a.kind == WEIGHT_F32) {
        memcpy(to, &value, 4);
      } else if (a.kind == WEIGHT_BF16) {
        bf16 narrowed;
        narrow(value, &narrowed);
        memcpy(to + 2 * j, &narrowed, 2);
      } else {
        int8_t q = quantised(value, inverse);
        total += q;
        memcpy(to + j, &q, 1);
      }
    }
  }
  if (a.kind == WEIGHT_I8) a.corrections[output] = 128 * total;
}

// Pages of 2 MB where the system has them: a step of a decode reads every weight once.
inline void advise_huge_pages(char* begin, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));  // 4, 16 or 64 KB
  uintptr_t first = (uintptr_t(begin) + page - 1) / page * page;
  uintptr_t last = (uintptr_t(begin) + uintptr_t(bytes)) / page * page;
  if (last > first) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}

inline void pack_linear(const PackLinear& a) {
  int64_t steps = steps_of(a.in_size, a.kind), panels = panels_of(a.out_size);
  int64_t panel_bytes = steps * PANEL * 4;
  char* packed = static_cast<char*>(a.packed);
  advise_huge_pages(packed, panels * panel_bytes);
  with_pool(a.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
#pragma omp parallel for num_threads(a.threads) if (a.threads > 1) schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel) {
      char* to = packed + panel * panel_bytes;
      int64_t first = panel * PANEL, count = smaller(PANEL, a.out_size - first);
      if (count < PANEL) memset(to, 0, size_t(panel_bytes));
      for (int64_t i = 0; i < count; ++i) pack_output<T>(a, first + i, to + i * 4, steps);
    }
  });
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry
