// Norm, gated activation, rotary embedding with the writing of KV, and block moves.
#include <algorithm>
#include <numeric>

#include "check.h"

namespace driver {
namespace {

const KernelTable& table = KVFERRY_ISA::table;

int some_threads() { return int(draw(1, 3)); }

// --- norm ----------------------------------------------------------------------------------------

void rms_norm(int round) {
  int dtype = round % 2;
  bool large = round % 16 < 2, adds = draw(0, 1);  // a second thread wants 256 KB
  int64_t outer = large ? 64 : draw(0, 5), inner = draw(1, 3);
  int64_t size = large ? draw(1024, 2048) : draw(1, 200);
  int64_t inner_stride = size + draw(0, 3), outer_stride = inner * inner_stride + draw(0, 3);
  if (adds) inner_stride = size, outer_stride = inner * size;
  now("rms_norm", "%s [%lld, %lld, %lld]%s", name_of(dtype), (long long)outer, (long long)inner,
      (long long)size, adds ? " plus residual" : "");
  Memory x(outer * outer_stride, dtype, number), weight(size, dtype, number);
  Memory residual(outer * inner * size, dtype, number), out(outer * inner * size, dtype, nothing);
  std::vector<char> before = residual.copy();
  constexpr float eps = 1e-5f;
  table.rms_norm({out.data(), x.data(), adds ? residual.data() : nullptr, weight.data(), outer,
                  inner, size, outer_stride, inner_stride, eps, dtype, some_threads()});
  for (int64_t row = 0; row < outer * inner; ++row) {
    int64_t from = row / inner * outer_stride + row % inner * inner_stride;
    std::vector<double> values;
    for (int64_t i = 0; i < size; ++i) {
      double value = get(x.data(), from + i, dtype);
      if (adds) {  // what is normalised is the sum as it was rounded
        value += get(before.data(), row * size + i, dtype);
        double rounded_sum = get(residual.data(), row * size + i, dtype);
        compare(row * size + i, rounded_sum, value, UNIT * std::fabs(value), dtype);
        value = rounded_sum;
      }
      values.push_back(value);
    }
    double squares = std::inner_product(values.begin(), values.end(), values.begin(), 0.0);
    double factor = 1 / std::sqrt(squares / double(size) + double(eps));
    for (int64_t i = 0; i < size; ++i) {
      double wanted = values[size_t(i)] * factor * get(weight.data(), i, dtype);
      double error = (4 * UNIT + sum_error(size) / 2) * std::fabs(wanted);
      compare(row * size + i, get(out.data(), row * size + i, dtype), wanted, error, dtype);
    }
  }
}

// --- gated activation ----------------------------------------------------------------------------

double wide_number() { return once_in(4) ? 90 * number() : number(); }

void silu_mul(int round) {
  int dtype = round % 2;
  int64_t rows = round % 16 < 2 ? 64 : draw(0, 5), size = round % 16 < 2 ? 800 : draw(1, 200);
  int64_t stride = 2 * size + draw(0, 3);
  now("silu_mul", "%s [%lld, %lld]", name_of(dtype), (long long)rows, (long long)size);
  Memory gate_up(rows * stride, dtype, wide_number), out(rows * size, dtype, nothing);
  table.silu_mul({out.data(), gate_up.data(), rows, size, stride, dtype, some_threads()});
  for (int64_t i = 0; i < rows * size; ++i) {
    int64_t at = i / size * stride + i % size;
    double gate = get(gate_up.data(), at, dtype), up = get(gate_up.data(), at + size, dtype);
    double wanted = gate / (1 + std::exp(-gate)) * up;
    double error = 8 * UNIT * std::fabs(wanted) + 1e-30;  // e^-88 is the least that there is
    compare(i, get(out.data(), i, dtype), wanted, error, dtype);
  }
}

// --- rotary embedding ----------------------------------------------------------------------------

void rope_tables(int round) {
  int dtype = round % 2;
  int64_t tokens = round % 16 < 2 ? 60 : draw(0, 5), half = round % 16 < 2 ? 128 : draw(1, 100);
  float factor = draw(0, 1) ? 1.0f : 1.3f;
  now("rope_tables", "%s [%lld, 2 * %lld]", name_of(dtype), (long long)tokens, (long long)half);
  Memory inv_freq(half, F32, [] { return std::fabs(number()); });
  Memory cos(tokens * 2 * half, dtype, nothing), sin(tokens * 2 * half, dtype, nothing);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < tokens; ++i) positions.push_back(draw(0, once_in(2) ? 1 << 20 : 4096));
  table.rope_tables({cos.data(), sin.data(), positions.data(), inv_freq.as<float>(), tokens, half,
                     factor, dtype, some_threads()});
  for (int64_t i = 0; i < tokens * 2 * half; ++i) {
    float position = float(positions[size_t(i / (2 * half))]);
    double angle = inv_freq.as<float>()[i % half] * position;  // in float32, as transformers has it
    compare(i, get(cos.data(), i, dtype), std::cos(angle) * double(factor), 2 * UNIT, dtype);
    compare(i, get(sin.data(), i, dtype), std::sin(angle) * double(factor), 2 * UNIT, dtype);
  }
}

void rope(int round) {
  int dtype = round % 2, pool_dtype = round / 2 % 3;
  int64_t heads = draw(0, 4), kv_heads = draw(1, 3), dim = 2 * draw(1, 70);
  int64_t tokens = round % 12 < 6 ? draw(0, 6) : draw(40, 90), block_size = draw(1, 20);
  bool turned = heads || draw(0, 1), writes = !turned || draw(0, 3);
  now("rope", "%s, pool %s, tokens %lld, heads %lld + %lld of %lld%s", name_of(dtype),
      name_of(pool_dtype), (long long)tokens, (long long)heads, (long long)kv_heads,
      (long long)dim, turned ? "" : ", not turned");
  int64_t blocks = tokens / block_size + 1, plane = kv_heads * block_size * dim;
  int64_t block_stride = 2 * plane * draw(1, 2);  // one layer of two
  Memory pool(blocks * block_stride, pool_dtype, number);
  std::vector<char> wanted_pool = pool.copy();
  std::vector<int64_t> slots(size_t(blocks * block_size));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), engine);
  int64_t head_stride = dim + draw(0, 2), stride = (heads + kv_heads) * head_stride + draw(0, 2);
  int64_t table_stride = dim + draw(0, 2);
  Memory x(tokens * stride, dtype, number), v(tokens * kv_heads * dim, dtype, number);
  Memory out(tokens * heads * dim, dtype, nothing);
  Memory cos(tokens * table_stride, dtype, number), sin(tokens * table_stride, dtype, number);
  table.rope({out.data(), x.data(), v.data(), turned ? cos.data() : nullptr,
              turned ? sin.data() : nullptr, slots.data(), tokens, heads, kv_heads, dim, stride,
              head_stride, kv_heads * dim, dim, table_stride,
              {writes ? pool.data() : nullptr, blocks, block_size, block_stride, plane,
               block_size * dim, pool_dtype},
              dtype, some_threads()});
  // Turns one element; what it may be off goes to `error`.
  auto element = [&](int64_t token, int64_t head, int64_t d, double& error) {
    int64_t at = token * stride + head * head_stride, half = dim / 2;
    double a = get(x.data(), at + d, dtype), b = get(x.data(), at + (d + half) % dim, dtype);
    error = 0;
    if (!turned) return a;
    a *= get(cos.data(), token * table_stride + d, dtype);
    b *= get(sin.data(), token * table_stride + d, dtype);
    error = 2 * UNIT * (std::fabs(a) + std::fabs(b));
    return d < half ? a - b : a + b;
  };
  double error;
  for (int64_t i = 0; i < tokens * heads * dim; ++i) {
    double wanted = element(i / (heads * dim), i / dim % heads, i % dim, error);
    compare(i, get(out.data(), i, dtype), wanted, error, dtype);
  }
  for (int64_t i = 0; writes && i < tokens * kv_heads * dim; ++i) {
    int64_t token = i / (kv_heads * dim), head = i / dim % kv_heads, slot = slots[size_t(token)];
    int64_t at = slot / block_size * block_stride + (head * block_size + slot % block_size) * dim +
                 i % dim;
    double wanted = element(token, heads + head, i % dim, error);
    double key = get(pool.data(), at, pool_dtype);
    compare(at, key, wanted, error, pool_dtype);
    put(wanted_pool.data(), at, pool_dtype, key);
    put(wanted_pool.data(), at + plane, pool_dtype, get(v.data(), i, dtype));
  }
  compare_bytes(pool.data(), wanted_pool.data(), pool.bytes());  // values, and all else unchanged
}

// Every number of a half dtype, what lies between it and the next, and a little to either side,
// from float32 into the pool: rounded to the nearest, the even one of two.
void conversions(int round) {
  int dtype = round % 2 ? F16 : BF16;
  now("write_kv", "every %s", name_of(dtype));
  std::vector<float> values;
  for (int bits = 0; bits < 1 << 16; ++bits) {
    uint16_t this_one = uint16_t(bits), next = uint16_t(bits + 1);
    double value = get(&this_one, 0, dtype), after = get(&next, 0, dtype);
    float between = float((value + after) / 2);
    for (float f : {float(value), between, std::nextafter(between, 0.0f),
                    std::nextafter(between, float(after))}) {
      values.push_back(f);
    }
  }
  for (double big : {65519.9, 65520.0, 1e6, 3.4e38}) values.push_back(float(big));
  int64_t dim = 250, tokens = int64_t(values.size()) / dim + 1;  // not whole vectors
  Memory v(tokens * dim, F32, number), pool(tokens * 2 * dim, dtype, number);
  memcpy(v.data(), values.data(), values.size() * sizeof(float));
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  std::iota(slots.begin(), slots.end(), 0);
  table.rope({nullptr, v.data(), v.data(), nullptr, nullptr, slots.data(), tokens, 0, 1, dim, dim,
              dim, dim, dim, dim, {pool.data(), tokens, 1, 2 * dim, dim, dim, dtype}, F32, 2});
  for (int64_t i = 0; i < tokens * dim; ++i) {
    double value = get(v.data(), i, F32);
    int64_t at = i / dim * 2 * dim + i % dim;
    for (int64_t place : {at, at + dim}) {
      compare_exactly(place, get(pool.data(), place, dtype), rounded(value, dtype), value);
    }
  }
}

// --- blocks --------------------------------------------------------------------------------------

void move_blocks(int round) {
  constexpr int64_t BLOCKS = 7;
  int64_t count = draw(0, BLOCKS), bytes = round % 8 ? draw(1, 300) : 100000;
  now("move_blocks", "%lld of %lld bytes", (long long)count, (long long)bytes);
  Memory from(BLOCKS * bytes), to(BLOCKS * bytes, draw(0, 15));
  std::generate_n(from.data(), from.bytes(), [] { return char(engine()); });
  std::generate_n(to.data(), to.bytes(), [] { return char(engine()); });
  std::vector<int64_t> ids[2];
  bool given[2] = {once_in(2), once_in(2)};
  for (std::vector<int64_t>& some : ids) {
    some.resize(size_t(BLOCKS));
    std::iota(some.begin(), some.end(), 0);
    if (given[&some - ids]) std::shuffle(some.begin(), some.end(), engine);
  }
  std::vector<char> wanted = to.copy(), source = from.copy();
  for (int64_t i = 0; i < count; ++i) {
    memcpy(&wanted[size_t(ids[0][size_t(i)] * bytes)], from.data() + ids[1][size_t(i)] * bytes,
           size_t(bytes));
  }
  table.move_blocks({to.data(), from.data(), given[0] ? ids[0].data() : nullptr,
                     given[1] ? ids[1].data() : nullptr, count, bytes, some_threads()});
  compare_bytes(to.data(), wanted.data(), to.bytes());
  compare_bytes(from.data(), source.data(), from.bytes());
}

Cases cases[] = {{160, rms_norm},   {160, silu_mul},  {160, rope_tables},
                 {160, rope},       {2, conversions}, {160, move_blocks}};

}  // namespace
}  // namespace driver
