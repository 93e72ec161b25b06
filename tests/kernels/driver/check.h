// What makes a kernel fail: a number too far from the one in double precision, a byte written
// beside its memory, and under AddressSanitizer one read there.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace driver {

// What float32 rounds off: sums and functions are allowed multiples of it.
constexpr double UNIT = 1.0 / (1 << 24);

// What n float32 products may be off once added up, in units of the sum of their magnitudes.
inline double sum_error(int64_t n) { return (4 + std::sqrt(double(n))) * UNIT; }

// Says what is being run, for the message of a failure.
void now(const char* kernel, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Fails unless `got` is within `error`, and one rounding to its dtype, of what is wanted. Not a
// number matches not a number only, and infinity itself.
void compare(int64_t index, double got, double wanted, double error, int dtype);

// Fails unless `got` is what is wanted of `from`, bit by bit but for what is not a number.
void compare_exactly(int64_t index, double got, double wanted, double from);

// Fails unless the bytes are the same.
void compare_bytes(const void* got, const void* wanted, int64_t bytes);

// Memory of exactly this size between guards, which are looked at when it goes.
class Memory {
 public:
  // Begins so many bytes behind a multiple of 64.
  explicit Memory(int64_t bytes, int64_t offset = 0);
  // `count` numbers of a dtype, at any address that it may have.
  Memory(int64_t count, int dtype, double (*value)());
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  std::vector<char> copy() const { return std::vector<char>(data_, data_ + bytes_); }

 private:
  char* base_;
  char* data_;
  int64_t bytes_, all_;
};

inline double nothing() { return NOT_A_NUMBER; }  // for what a kernel has to write

// One kernel's cases: `rounds` times, each with its number.
struct Cases {
  Cases(int rounds, void (*run)(int round));
};

}  // namespace driver
