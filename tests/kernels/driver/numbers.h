// Random shapes and numbers, and the three dtypes as doubles: bit by bit, without the kernels' ways.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>

#include "kernels.h"

namespace driver {

using namespace kvferry;

inline std::mt19937 engine(1);

inline int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(engine);
}
inline int64_t one_of(std::initializer_list<int64_t> values) {
  return values.begin()[draw(0, int64_t(values.size()) - 1)];
}
inline bool once_in(int64_t times) { return draw(1, times) == 1; }

// From -1.5 to 1.5 in 31 bits, now and then much smaller, so that half precision gets subnormals.
inline double number() {
  double value = double(draw(-(1 << 30), 1 << 30)) / (1 << 30) * 1.5;
  return once_in(8) ? std::ldexp(value, -int(draw(1, 24))) : value;
}

// --- dtypes --------------------------------------------------------------------------------------

constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

inline const char* name_of(int dtype) { return dtype == F32 ? "f32" : dtype == BF16 ? "bf16" : "f16"; }
inline int64_t size_of(int dtype) { return dtype == F32 ? 4 : 2; }
inline int precision_of(int dtype) { return dtype == F32 ? 24 : dtype == BF16 ? 8 : 11; }  // bits
inline int exponent_limit(int dtype) { return dtype == F16 ? 15 : 127; }

// Half the distance between neighbours in the dtype, at this value: what rounding may cost.
inline double half_ulp(double value, int dtype) {
  int least = 1 - exponent_limit(dtype);
  int exponent = value == 0 || std::ilogb(value) < least ? least : std::ilogb(value);
  return std::ldexp(0.5, exponent - precision_of(dtype) + 1);
}

// The value's neighbour in the dtype; the even one of two.
inline double rounded(double value, int dtype) {
  if (!std::isfinite(value)) return value;
  double ulp = 2 * half_ulp(value, dtype), result = std::nearbyint(value / ulp) * ulp;
  bool finite = std::fabs(result) < std::ldexp(1, exponent_limit(dtype) + 1);
  return finite ? result : std::copysign(std::numeric_limits<double>::infinity(), value);
}

inline double value_of_half(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = std::numeric_limits<double>::infinity();
  if (exponent == 31 && fraction) value = NOT_A_NUMBER;
  if (exponent < 31) {
    value = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  }
  return bits & 0x8000 ? -value : value;
}

inline uint16_t half_of(double value) {  // one that half precision has
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  double size = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  if (size < std::ldexp(1, -14)) return sign | uint16_t(std::ldexp(size, 24));
  int exponent = std::ilogb(size);
  int32_t all = ((exponent + 14) << 10) + int32_t(std::ldexp(size, 10 - exponent));
  return uint16_t(sign | all);
}

inline double get(const void* data, int64_t i, int dtype) {
  const char* from = static_cast<const char*>(data) + i * size_of(dtype);
  uint32_t bits = 0;
  memcpy(&bits, from, size_t(size_of(dtype)));
  if (dtype == F16) return value_of_half(uint16_t(bits));
  if (dtype == BF16) bits <<= 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline void put(void* data, int64_t i, int dtype, double value) {
  char* to = static_cast<char*>(data) + i * size_of(dtype);
  float single = float(rounded(value, dtype));
  uint32_t bits;
  memcpy(&bits, &single, 4);
  if (dtype == BF16) bits = std::isnan(value) ? 0x7fc0 : bits >> 16;
  if (dtype == F16) bits = half_of(rounded(value, F16));
  memcpy(to, &bits, size_t(size_of(dtype)));  // little-endian, as every instruction set here
}

}  // namespace driver
