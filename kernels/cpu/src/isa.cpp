#include "isa.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvferry {
namespace {

const Isa ISAS[] = {  // best first
#ifdef KVFERRY_HAVE_amx
    {"amx", &avx512::table, &amx::linear_table},
#endif
#ifdef KVFERRY_HAVE_avx512_bf16
    {"avx512_bf16", &avx512::table, &avx512_bf16::linear_table},
#endif
#ifdef KVFERRY_HAVE_avx512
    {"avx512", &avx512::table, &avx512::linear_table},
#endif
#ifdef KVFERRY_HAVE_avx2_vnni
    {"avx2_vnni", &avx2::table, &avx2_vnni::linear_table},
#endif
#ifdef KVFERRY_HAVE_avx2
    {"avx2", &avx2::table, &avx2::linear_table},
#endif
#ifdef KVFERRY_HAVE_baseline
    {"baseline", &baseline::table, &baseline::linear_table},
#endif
#ifdef KVFERRY_HAVE_neon
    {"neon", &neon::table, &neon::linear_table},
#endif
    {nullptr, nullptr, nullptr},
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// One bit of CPUID's leaf 7; `reg` counts eax, ebx, ecx, edx.
bool has_bit(unsigned subleaf, int reg, int bit) {
  unsigned regs[4];
  return __get_cpuid_count(7, subleaf, &regs[0], &regs[1], &regs[2], &regs[3]) &&
         (regs[reg] >> bit & 1);
}
bool has_avx512_bf16() { return has_avx512() && has_bit(1, 0, 5) && has_bit(0, 2, 11); }
bool has_avx2_vnni() { return has_avx2() && has_bit(1, 0, 4); }

// AMX: tiles, bf16, int8, and the kernel's leave to use their registers, which a process asks for.
bool has_amx() {
#if defined(__linux__)
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return has_avx512_bf16() && has_bit(0, 3, 24) && has_bit(0, 3, 22) && has_bit(0, 3, 25) &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

const Isa* chosen = nullptr;

}  // namespace

const Isa* built() { return ISAS; }

bool runs_here(const Isa& isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!strcmp(isa.name, "amx")) return has_amx();
  if (!strcmp(isa.name, "avx512_bf16")) return has_avx512_bf16();
  if (!strcmp(isa.name, "avx512")) return has_avx512();
  if (!strcmp(isa.name, "avx2_vnni")) return has_avx2_vnni();
  if (!strcmp(isa.name, "avx2")) return has_avx2();
#else
  (void)isa;  // the only one that is built
#endif
  return true;
}

bool put_in_force(const char* name) {
  for (const Isa* isa = ISAS; isa->name; ++isa) {
    if (name && strcmp(isa->name, name)) continue;
    if (!runs_here(*isa)) continue;
    chosen = isa;
    return true;
  }
  return false;
}

const Isa& in_force() { return *chosen; }

}  // namespace kvferry
