// Runs every kernel of one instruction set over random shapes and compares it with double precision.
//
// Other files add their kernels to the list; tests/kernels/drive.py builds the program. Its argument,
// if it has one, is a number N: every Nth round alone.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#endif

#define NAME(isa) #isa
#define NAME_OF(isa) NAME(isa)

namespace driver {
namespace {

constexpr int64_t GUARD = 64;  // bytes on either side
constexpr char GUARD_BYTE = 0x5b;

struct Record {
  int64_t compared = 0;
  double worst = 0;  // of what is allowed beyond the rounding
};

std::map<std::string, Record>& records() {
  static std::map<std::string, Record> all;
  return all;
}

struct Entry {
  int rounds;
  void (*run)(int round);
};

std::vector<Entry>& entries() {
  static std::vector<Entry> all;
  return all;
}

std::string kernel = "nothing";
char shape[400];
Record* record = nullptr;  // the kernel's

}  // namespace

Cases::Cases(int rounds, void (*run)(int round)) { entries().push_back({rounds, run}); }

void now(const char* name, const char* format, ...) {
  kernel = name;
  record = &records()[kernel];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(shape, sizeof shape, format, arguments);
  va_end(arguments);
}

void fail(const char* format, ...) {
  fprintf(stderr, "%s: %s, %s: ", NAME_OF(KVFERRY_ISA), kernel.c_str(), shape);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  _Exit(1);
}

void compare(int64_t index, double got, double wanted, double error, int dtype) {
  ++record->compared;
  if (std::isnan(wanted) ? std::isnan(got) : got == wanted) return;
  double rounding = half_ulp(std::fabs(wanted) + error, dtype), off = std::fabs(got - wanted);
  if (!(off <= error + rounding)) {
    fail("number %lld is %.9g, wanted %.9g within %.3g", (long long)index, got, wanted,
         error + rounding);
  }
  if (error > 0) record->worst = std::fmax(record->worst, (off - rounding) / error);
}

void compare_exactly(int64_t index, double got, double wanted, double from) {
  ++record->compared;
  if (std::isnan(wanted) ? std::isnan(got) : got == wanted) return;
  fail("number %lld is %.9g from %.9g, wanted %.9g", (long long)index, got, from, wanted);
}

void compare_bytes(const void* got, const void* wanted, int64_t bytes) {
  ++record->compared;
  const char *a = static_cast<const char*>(got), *b = static_cast<const char*>(wanted);
  for (int64_t i = 0; i < bytes; ++i) {
    if (a[i] != b[i]) fail("byte %lld is another", (long long)i);
  }
}

Memory::Memory(int64_t bytes, int64_t offset)
    : bytes_(bytes), all_((GUARD + offset + bytes + GUARD + 63) / 64 * 64) {
  base_ = static_cast<char*>(aligned_alloc(64, size_t(all_)));
  memset(base_, GUARD_BYTE, size_t(all_));
  data_ = base_ + GUARD + offset;
  ASAN_POISON_MEMORY_REGION(base_, size_t(GUARD + offset));
  ASAN_POISON_MEMORY_REGION(data_ + bytes_, size_t(all_ - GUARD - offset - bytes_));
}

Memory::Memory(int64_t count, int dtype, double (*value)())
    : Memory(count * size_of(dtype), size_of(dtype) * draw(0, 15)) {
  for (int64_t i = 0; i < count; ++i) put(data_, i, dtype, value());
}

Memory::~Memory() {
  ASAN_UNPOISON_MEMORY_REGION(base_, size_t(all_));
  for (int64_t i = 0; i < all_; ++i) {
    int64_t at = base_ + i - data_;
    if ((at < 0 || at >= bytes_) && base_[i] != GUARD_BYTE) {
      fail("byte %lld of %lld was written", (long long)at, (long long)bytes_);
    }
  }
  free(base_);
}

}  // namespace driver

int main(int argc, char** argv) {
  using namespace driver;
  int every = argc > 1 ? atoi(argv[1]) : 1;
  for (const Entry& entry : entries()) {
    for (int round = 0; round < entry.rounds; round += every) entry.run(round);
  }
  for (const auto& [name, of_kernel] : records()) {
    if (!of_kernel.compared) continue;
    printf("%s: %s: %lld compared, ", NAME_OF(KVFERRY_ISA), name.c_str(),
           (long long)of_kernel.compared);
    if (of_kernel.worst > 0) {
      printf("off by at most %.2f of what float32 is allowed\n", of_kernel.worst);
    } else {
      printf("all as wanted\n");
    }
  }
  return 0;
}
