// The linears of one instruction set over random shapes, in buffers of exactly the size that is
// needed; see sanitize.cpp. tests/kernels/sanitize.py builds and runs it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "linear.h"

using namespace kvferry;

namespace {

std::mt19937 engine(1);

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(engine);
}

struct Buffer {
  explicit Buffer(int64_t bytes) : data(static_cast<char*>(aligned_alloc(64, (bytes + 63) / 64 * 64))) {}
  ~Buffer() { free(data); }
  char* data;
};

// `count` elements of -1, 0 or 1, in memory that ends with the last of them.
std::unique_ptr<char[]> numbers(int64_t count, int dtype) {
  int64_t size = dtype == F32 ? 4 : 2;
  std::unique_ptr<char[]> memory(new char[size_t(count * size)]);
  const uint16_t halves[3] = {uint16_t(dtype == F16 ? 0xbc00 : 0xbf80), 0,
                              uint16_t(dtype == F16 ? 0x3c00 : 0x3f80)};
  for (int64_t i = 0; i < count; ++i) {
    int64_t which = draw(0, 2);
    float value = float(which - 1);
    memcpy(&memory[size_t(i * size)], size == 4 ? static_cast<void*>(&value) : (void*)&halves[which],
           size_t(size));
  }
  return memory;
}

bool once() {
  const LinearTable& table = KVFERRY_ISA::linear_table;
  int64_t rows = draw(0, 3) ? draw(1, 40) : draw(480, 600), in = draw(1, 150), out = draw(1, 100);
  int kind = int(draw(0, 2)), weight_dtype = int(draw(0, 2)), dtype = int(draw(0, 1));
  int64_t padded = panels_of(out) * PANEL;
  auto weight = numbers(out * in, weight_dtype), x = numbers(rows * in, dtype);
  Buffer packed(padded * steps_of(in, kind) * 4);
  std::unique_ptr<float[]> scales(new float[size_t(padded)]()), bias(new float[size_t(padded)]());
  std::unique_ptr<int32_t[]> corrections(new int32_t[size_t(padded)]());
  table.pack({packed.data, weight.get(), scales.get(), corrections.get(), out, in, in, kind,
              weight_dtype, int(draw(1, 2))});
  std::unique_ptr<float[]> y(new float[size_t(rows * out)]);
  Linear a{};
  a.out = y.get(), a.x = x.get(), a.packed = packed.data, a.bias = draw(0, 1) ? bias.get() : nullptr;
  a.scales = scales.get(), a.corrections = corrections.get();
  a.rows = rows, a.out_size = out, a.in_size = in, a.x_stride = in, a.out_stride = out;
  a.kind = kind, a.dtype = dtype, a.out_dtype = F32, a.threads = int(draw(1, 3));
  Buffer workspace(int64_t(table.workspace(a)));
  a.workspace = workspace.data;
  table.linear(a);
  for (int64_t i = 0; i < rows * out; ++i) {
    if (!(y[size_t(i)] >= -float(in) - 1 && y[size_t(i)] <= float(in) + 1)) return false;
  }
  return true;
}

}  // namespace

int main() {
#if defined(__AMX_TILE__)
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;  // leave to use tiles
#endif
  for (int i = 0; i < 300; ++i) {
    if (!once()) {
      fprintf(stderr, "an output beyond what its inputs can give\n");
      return 1;
    }
  }
  return 0;
}
