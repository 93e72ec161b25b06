// Every kernel for one instruction set: compiled once for each, with KVFERRY_ISA naming it.
#include <initializer_list>
#include <type_traits>

#include "attention.h"
#include "kernels.h"
#include "layers.h"

namespace kvferry {
namespace KVFERRY_ISA {

#define KVFERRY_NAME(isa) #isa
#define KVFERRY_NAME_OF(isa) KVFERRY_NAME(isa)

extern const KernelTable table;
const KernelTable table = {
    KVFERRY_NAME_OF(KVFERRY_ISA), rms_norm, silu_mul, rope_tables, rope, move_blocks,
    attention_workspace,          attention,
};

}  // namespace KVFERRY_ISA
}  // namespace kvferry
