// Runs every kernel of one instruction set over random shapes, in buffers of exactly the size that
// is needed, for AddressSanitizer and UndefinedBehaviorSanitizer to watch. tests/kernels/sanitize.py
// builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels.h"

using namespace kvferry;

namespace {

const KernelTable& table = KVFERRY_ISA::table;
std::mt19937 engine(1);

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(engine);
}
int64_t one_of(std::vector<int64_t> values) { return values[size_t(draw(0, values.size() - 1))]; }

int64_t size_of(int dtype) { return dtype == F32 ? 4 : 2; }

// `count` small numbers of a dtype, in a buffer that ends with the last of them.
std::unique_ptr<char[]> numbers(int64_t count, int dtype) {
  std::unique_ptr<char[]> memory(new char[size_t(count * size_of(dtype))]);
  for (int64_t i = 0; i < count; ++i) {
    float value = float(draw(-100, 100)) / 64;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (dtype == F32) memcpy(&memory[size_t(4 * i)], &value, 4);
    uint16_t half = dtype == BF16 ? uint16_t(bits >> 16) : uint16_t(draw(0, 0x3c00));
    if (dtype != F32) memcpy(&memory[size_t(2 * i)], &half, 2);
  }
  return memory;
}

void layers() {
  int dtype = int(draw(0, 1)), threads = int(draw(1, 3));
  int64_t rows = draw(0, 5), inner = draw(1, 3), size = draw(1, 200), margin = draw(0, 3);
  auto x = numbers(rows * inner * (size + margin), dtype), weight = numbers(size, dtype);
  auto out = numbers(rows * inner * size, dtype), residual = numbers(rows * inner * size, dtype);
  table.rms_norm({out.get(), x.get(), draw(0, 1) ? residual.get() : nullptr, weight.get(), rows,
                  inner, size, inner * (size + margin), size + margin, 1e-5f, dtype, threads});
  auto gate_up = numbers(rows * 2 * size, dtype), gated = numbers(rows * size, dtype);
  table.silu_mul({gated.get(), gate_up.get(), rows, size, 2 * size, dtype, threads});
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < rows; ++i) positions.push_back(draw(0, 1 << 20));
  auto inv_freq = numbers(size, F32);
  auto cos = numbers(rows * 2 * size, dtype), sin = numbers(rows * 2 * size, dtype);
  table.rope_tables({cos.get(), sin.get(), positions.data(),
                     reinterpret_cast<float*>(inv_freq.get()), rows, size, 1.0f, dtype, threads});
}

Pool make_pool(std::unique_ptr<char[]>& memory, int64_t blocks, int64_t block_size, int64_t heads,
               int64_t dim) {
  int dtype = int(draw(0, 3));
  int64_t run = block_size * dim, count = blocks * 2 * heads;
  if (dtype == I8) run = (run + 3) / 4 * 4 + 4 * block_size;  // of floats: sound as scales
  memory = dtype == I8 ? numbers(count * run / 4, F32) : numbers(count * run, dtype);
  return {memory.get(), blocks, block_size, 2 * heads * run, heads * run, run, dtype};
}

void rope() {
  int dtype = int(draw(0, 1));
  int64_t tokens = draw(0, 6), heads = draw(0, 4), kv_heads = draw(1, 3), dim = 2 * draw(1, 70);
  int64_t block_size = draw(1, 20), blocks = tokens / block_size + 1;
  std::unique_ptr<char[]> memory;
  Pool pool = make_pool(memory, blocks, block_size, kv_heads, dim);
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < tokens; ++i) slots.push_back(blocks * block_size - 1 - i);
  auto x = numbers(tokens * (heads + kv_heads) * dim, dtype);
  auto v = numbers(tokens * kv_heads * dim, dtype), out = numbers(tokens * heads * dim, dtype);
  auto cos = numbers(tokens * dim, dtype), sin = numbers(tokens * dim, dtype);
  bool turned = heads || draw(0, 1);
  table.rope({out.get(), x.get(), v.get(), turned ? cos.get() : nullptr,
              turned ? sin.get() : nullptr, slots.data(), tokens, heads, kv_heads, dim,
              (heads + kv_heads) * dim, dim, kv_heads * dim, dim, dim, pool, dtype,
              int(draw(1, 3))});
}

void blocks() {
  int64_t count = draw(0, 5), bytes = draw(1, 300);
  std::unique_ptr<char[]> from(new char[size_t(5 * bytes)]()), to(new char[size_t(5 * bytes)]());
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(4 - i);
  table.move_blocks({to.get(), from.get(), draw(0, 1) ? ids.data() : nullptr,
                     draw(0, 1) ? ids.data() : nullptr, count, bytes, int(draw(1, 3))});
}

void attention() {
  int64_t seqs = draw(1, 4), kv_heads = draw(1, 3), group = draw(1, 8);
  int64_t dim = one_of({2, 17, 24, 64, 80, 96, 128, 256}), block_size = draw(1, 40);
  std::vector<int32_t> bounds = {0}, lengths, tables;
  int64_t width = 0;
  for (int64_t i = 0; i < seqs; ++i) {
    int64_t queries = one_of({0, 1, 1, 1, 2, draw(3, 90)});
    lengths.push_back(int32_t(queries + one_of({0, draw(0, 40), 127, 512, 700})));
    bounds.push_back(bounds.back() + int32_t(queries));
    width = std::max(width, (lengths.back() + block_size - 1) / block_size);
  }
  int64_t num_blocks = width + 1, tokens = bounds.back(), heads = kv_heads * group;
  for (int64_t i = 0; i < seqs * width; ++i) tables.push_back(int32_t(draw(0, num_blocks - 1)));
  std::unique_ptr<char[]> memory;
  Attention a = {};
  a.pool = make_pool(memory, num_blocks, block_size, kv_heads, dim);
  a.dtype = int(draw(0, 1));
  auto q = numbers(tokens * heads * dim, a.dtype), out = numbers(tokens * heads * dim, a.dtype);
  a.out = out.get(), a.q = q.get();
  a.block_tables = tables.data(), a.cu_seqlens_q = bounds.data(), a.seq_lens = lengths.data();
  a.num_seqs = seqs, a.table_stride = width, a.heads = heads, a.kv_heads = kv_heads, a.dim = dim;
  a.q_token_stride = heads * dim, a.q_head_stride = dim;
  a.window = draw(0, 1) ? draw(1, 100) : 0;
  a.scale = 0.1f, a.soft_cap = draw(0, 3) ? 0.0f : 5.0f;
  a.threads = int(draw(1, 3));
  size_t bytes = table.attention_workspace(a);
  a.workspace = static_cast<char*>(aligned_alloc(64, bytes));
  table.attention(a);
  free(a.workspace);
  for (int64_t i = 0; i < tokens * heads * dim && a.dtype == F32; ++i) {
    if (!std::isfinite(reinterpret_cast<float*>(out.get())[i])) {
      fprintf(stderr, "%s: output %lld is not finite\n", table.isa, (long long)i);
      exit(1);
    }
  }
}

}  // namespace

int main() {
  for (int i = 0; i < 150; ++i) {
    layers();
    rope();
    blocks();
    attention();
  }
  printf("%s: sound\n", table.isa);
}
