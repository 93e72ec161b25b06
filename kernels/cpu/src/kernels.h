// What the kernels take, and the table of them that each instruction set fills.
//
// Pointers come with strides in elements; whoever calls has checked every shape, block id and slot.
// Knows no Python. A further translation unit adds its arguments and its entries here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

enum DType : int { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 };  // I8 of pools only

// out[o, i, :] = weight * x / sqrt(mean(x^2) + eps), rows [outer, inner], out contiguous. Where
// `residual` is given (contiguous as out), it becomes residual + x, rounded, and that is normalised.
struct RmsNorm {
  void* out;
  const void* x;
  void* residual;
  const void* weight;
  int64_t outer, inner, size, outer_stride, inner_stride;
  float eps;
  int dtype, threads;
};

// out[r, :] = silu(gate_up[r, :size]) * gate_up[r, size:]
struct SiluMul {
  void* out;
  const void* gate_up;
  int64_t rows, size, row_stride;
  int dtype, threads;
};

// cos and sin [tokens, 2 * half]; both halves alike.
struct RopeTables {
  void* cos;
  void* sin;
  const int64_t* positions;
  const float* inv_freq;
  int64_t tokens, half;
  float factor;
  int dtype, threads;
};

// The pool of one layer: element (block, plane, head, slot, d) lies at
// data + block * block_stride + plane * plane_stride + head * head_stride + slot * dim + d. Of I8 the
// scales lie behind the rows: int8_pool.h.
struct Pool {
  void* data;
  int64_t num_blocks, block_size, block_stride, plane_stride, head_stride;
  int dtype;
};

// Turns the first `heads` of x into out (contiguous); with a pool (data not null) the next
// `kv_heads` are keys, turned and stored with the values v at `slots`. Without tables (cos null)
// nothing is turned, and x holds keys only: that is write_kv.
struct Rope {
  void* out;
  const void* x;
  const void* v;
  const void* cos;
  const void* sin;
  const int64_t* slots;
  int64_t tokens, heads, kv_heads, dim, x_token_stride, x_head_stride, v_token_stride,
      v_head_stride, table_stride;
  Pool pool;
  int dtype, threads;
};

// target[target_ids[i]] = source[source_ids[i]] for i < count; ids null: i itself.
struct MoveBlocks {
  char* target;
  const char* source;
  const int64_t* target_ids;
  const int64_t* source_ids;
  int64_t count, block_bytes;
  int threads;
};

// See kvferry.kernels.reference.paged_attention. window 0: none; soft_cap 0: none.
struct Attention {
  void* out;      // [tokens, heads, dim] contiguous
  const void* q;  // [tokens, heads, dim], strided
  const int32_t* block_tables;
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens;
  int64_t num_seqs, table_stride, heads, kv_heads, dim, q_token_stride, q_head_stride, window;
  Pool pool;
  float scale, soft_cap;
  int dtype, threads;
  char* workspace;  // 64-byte aligned, attention_workspace(...) bytes
};

struct KernelTable {
  const char* isa;
  void (*rms_norm)(const RmsNorm&);
  void (*silu_mul)(const SiluMul&);
  void (*rope_tables)(const RopeTables&);
  void (*rope)(const Rope&);
  void (*move_blocks)(const MoveBlocks&);
  size_t (*attention_workspace)(const Attention&);
  void (*attention)(const Attention&);
};

// One per build of kernels.cpp; each exists only where its macro says that it was built.
#define KVFERRY_DECLARE_TABLE(isa) \
  namespace isa {                  \
  extern const KernelTable table;  \
  }
KVFERRY_DECLARE_TABLE(avx512)
KVFERRY_DECLARE_TABLE(avx2)
KVFERRY_DECLARE_TABLE(baseline)
KVFERRY_DECLARE_TABLE(neon)
#undef KVFERRY_DECLARE_TABLE

}  // namespace kvferry
