// The instruction sets that were built, which of them this processor has, and the one in force.
//
// Knows no Python. One is in force per process, and is not changed while a kernel runs.
#pragma once

#include "kernels.h"
#include "linear.h"

namespace kvferry {

struct Isa {
  const char* name;
  const KernelTable* kernels;
  const LinearTable* linears;
};

// Those that were built, best first; behind them one whose name is null.
const Isa* built();

bool runs_here(const Isa& isa);

// Puts the one of this name in force, or the best if it is null; false if none of them runs here.
bool put_in_force(const char* name);

const Isa& in_force();

}  // namespace kvferry
