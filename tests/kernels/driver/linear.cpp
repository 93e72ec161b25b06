// The linears: weights of every dtype packed as every kind, and multiplied with rows of either dtype.
#include <algorithm>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "check.h"
#include "linear.h"

namespace driver {
namespace {

const LinearTable& table = KVFERRY_ISA::linear_table;
constexpr int64_t MOST_WORK = 2000000;  // products in one case

struct Shape {
  int64_t rows, in, out;
};

Shape draw_shape() {
  Shape s;
  do {
    s.rows = once_in(4) ? draw(480, 600) : draw(1, 40);
    s.in = once_in(4) ? draw(150, 2500) : draw(1, 150);
    s.out = draw(1, 100);
  } while (s.rows * s.in * s.out > MOST_WORK);
  return s;
}

// Symmetric int8 of `count` numbers, in float32 as is defined; returns the factor that undoes it.
double quantise(const double* from, int64_t count, double* to) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::fabs(float(from[i])));
  float inverse = most > 0 ? 127 / most : 0;
  for (int64_t i = 0; i < count; ++i) {
    float scaled = float(from[i]) * inverse;
    to[i] = std::nearbyint(double(scaled));
  }
  return double(most / 127);
}

std::vector<double> numbers_of(const Memory& from, int64_t rows, int64_t size, int64_t stride,
                               int dtype) {
  std::vector<double> numbers;
  for (int64_t i = 0; i < rows * size; ++i) {
    numbers.push_back(get(from.data(), i / size * stride + i % size, dtype));
  }
  return numbers;
}

void linear(int round) {
  const char* names[] = {"linear, f32", "linear, bf16", "linear, int8"};
  int kind = round % 3, weight_dtype = round / 3 % 3, dtype = round / 9 % 2;
  int out_dtype = round / 18 % 2;
  auto [rows, in, out] = draw_shape();
  now(names[kind], "weight %s [%lld, %lld], x %s [%lld, ...], out %s", name_of(weight_dtype),
      (long long)out, (long long)in, name_of(dtype), (long long)rows, name_of(out_dtype));
  int64_t padded = panels_of(out) * PANEL, weight_stride = in + draw(0, 3);
  int64_t x_stride = in + draw(0, 3), out_stride = out + draw(0, 3);
  Memory weight(out * weight_stride, weight_dtype, number), x(rows * x_stride, dtype, number);
  if (once_in(8)) put(x.data(), 0, dtype, NOT_A_NUMBER);  // of one row alone
  Memory packed(padded * steps_of(in, kind) * 4), y(rows * out_stride, out_dtype, number);
  Memory scales(padded, F32, [] { return 0.0; }), bias(padded, F32, number);
  Memory corrections(padded * 4);
  memset(corrections.data(), 0, size_t(corrections.bytes()));
  table.pack({packed.data(), weight.data(), scales.as<float>(), corrections.as<int32_t>(), out, in,
              weight_stride, kind, weight_dtype, int(draw(1, 2))});
  Linear a = {};
  a.out = y.data(), a.x = x.data(), a.packed = packed.data();
  a.bias = draw(0, 1) ? bias.as<float>() : nullptr;
  a.scales = scales.as<float>(), a.corrections = corrections.as<int32_t>();
  a.rows = rows, a.out_size = out, a.in_size = in, a.x_stride = x_stride, a.out_stride = out_stride;
  a.kind = kind, a.dtype = dtype, a.out_dtype = out_dtype, a.threads = int(draw(1, 3));
  Memory workspace(int64_t(table.workspace(a)));
  memset(workspace.data(), 0xff, size_t(workspace.bytes()));  // not a number
  a.workspace = workspace.data();
  std::vector<char> wanted_y = y.copy();
  table.linear(a);

  std::vector<double> w = numbers_of(weight, out, in, weight_stride, weight_dtype);
  std::vector<double> rows_of_x = numbers_of(x, rows, in, x_stride, dtype);
  std::vector<double> factors(size_t(rows), 1), weight_factors(size_t(out), 1);
  if (kind == WEIGHT_BF16) {
    for (double& value : w) value = rounded(value, BF16);
  }
  if (kind == WEIGHT_I8) {
    for (int64_t o = 0; o < out; ++o) {
      weight_factors[size_t(o)] = quantise(&w[size_t(o * in)], in, &w[size_t(o * in)]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      double* row = &rows_of_x[size_t(r * in)];
      bool poisoned = std::any_of(row, row + in, [](double value) { return std::isnan(value); });
      factors[size_t(r)] = poisoned ? NOT_A_NUMBER : quantise(row, in, row);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o) {
      double wanted = 0, sizes = 0;
      for (int64_t i = 0; i < in; ++i) {
        double product = rows_of_x[size_t(r * in + i)] * w[size_t(o * in + i)];
        wanted += product, sizes += std::fabs(product);
      }
      // sums of int8 are exact, and float32 then rounds them
      double factor = factors[size_t(r)] * weight_factors[size_t(o)];
      double error = kind == WEIGHT_I8 ? 4 * UNIT * std::fabs(wanted * factor) : sizes * sum_error(in);
      wanted *= factor;
      if (a.bias) {
        wanted += double(a.bias[o]);
        error += UNIT * (std::fabs(wanted) + std::fabs(double(a.bias[o])));
      }
      double got = get(y.data(), r * out_stride + o, out_dtype);
      compare(r * out_stride + o, got, wanted, std::isnan(error) ? 0 : error, out_dtype);
      memcpy(&wanted_y[size_t((r * out_stride + o) * size_of(out_dtype))],
             y.data() + (r * out_stride + o) * size_of(out_dtype), size_t(size_of(out_dtype)));
    }
  }
  compare_bytes(y.data(), wanted_y.data(), y.bytes());  // what lies between rows is unchanged
}

void start(int) {
#if defined(__AMX_TILE__)
  now("linear", "leave to use tiles");
  if (syscall(SYS_arch_prctl, 0x1023, 18)) fail("refused");
#endif
}

Cases cases[] = {{1, start}, {360, linear}};

}  // namespace
}  // namespace driver
