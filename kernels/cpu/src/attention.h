// Paged attention: decode steps and prefill chunks of one batch, in one parallel region.
//
// Each sequence is cut into items whose bounds depend on that sequence alone, so that it gets the
// same bits alone and in a batch, on one thread and on many. A sequence with one query is cut along
// its keys (decode.h), one with more along its queries (prefill.h). Threads take the next item when
// they are free; what a sequence's key ranges gave is then put together in order.
#pragma once

#include "decode.h"
#include "kernels.h"
#include "layers.h"
#include "prefill.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

struct AttentionPlan {
  int64_t num_prefill, num_decode, num_splits, num_partials, bytes;
};

// Ranges of TOKENS_PER_SPLIT positions that the sequences with one query have.
inline int64_t count_ranges(const Attention& a) {
  int64_t count = 0;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    if (a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq] != 1) continue;
    count += (a.seq_lens[seq] + TOKENS_PER_SPLIT - 1) / TOKENS_PER_SPLIT;
  }
  return count;
}

// Fills `prefill`, `decode` and `splits` where they are given; counts in any case.
inline AttentionPlan plan_attention(const Attention& a, PrefillItem* prefill, DecodeItem* decode,
                                    SplitSequence* splits) {
  AttentionPlan plan = {};
  int64_t tile = queries_per_tile(a.heads / a.kv_heads);
  int64_t heads = heads_per_item(a, count_ranges(a), a.pool.dtype == F32 ? 4 : a.pool.dtype == I8 ? 1 : 2);
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    int64_t query_len = a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq], kv_len = a.seq_lens[seq];
    if (query_len == 0) continue;
    if (query_len > 1) {
      for (int64_t first = (query_len - 1) / tile * tile; first >= 0; first -= tile) {
        for (int64_t head = 0; head < a.kv_heads; ++head) {
          if (prefill) {
            prefill[plan.num_prefill] = {seq, head, first, smaller(tile, query_len - first)};
          }
          ++plan.num_prefill;
        }
      }
      plan.bytes += kv_len * query_len * a.heads * a.dim;  // computes rather than reads
      continue;
    }
    int64_t oldest = a.window ? larger(0, kv_len - a.window) : 0;
    int64_t begin = oldest / TOKENS_PER_SPLIT * TOKENS_PER_SPLIT;
    int64_t first = plan.num_partials;
    for (int64_t at = begin; at < kv_len; at += TOKENS_PER_SPLIT) {
      for (int64_t head = 0; head < a.kv_heads; head += heads) {
        if (decode) {
          decode[plan.num_decode] = {seq, head, smaller(heads, a.kv_heads - head), larger(at, oldest),
                                     smaller(at + TOKENS_PER_SPLIT, kv_len),
                                     plan.num_partials + head};
        }
        ++plan.num_decode;
      }
      plan.num_partials += a.kv_heads;
    }
    if (splits) splits[plan.num_splits] = {seq, first, plan.num_partials};
    ++plan.num_splits;
    plan.bytes += (kv_len - oldest) * a.kv_heads * a.dim * 8;
  }
  return plan;
}

struct AttentionMemory {
  PrefillItem* prefill;
  DecodeItem* decode;
  SplitSequence* splits;
  float* partials;  // [num_partials, partial_floats]
  float* scratch;   // [threads, scratch_floats]
  int64_t scratch_floats;
  size_t bytes;
};

inline AttentionMemory lay_out(const Attention& a, const AttentionPlan& plan, char* base) {
  AttentionMemory memory = {};
  size_t at = 0;
  auto take = [&](int64_t bytes) {
    char* here = base + at;
    at += size_t(round_up(bytes, 64));
    return here;
  };
  memory.prefill = reinterpret_cast<PrefillItem*>(take(plan.num_prefill * int64_t(sizeof(PrefillItem))));
  memory.decode = reinterpret_cast<DecodeItem*>(take(plan.num_decode * int64_t(sizeof(DecodeItem))));
  memory.splits = reinterpret_cast<SplitSequence*>(take(plan.num_splits * int64_t(sizeof(SplitSequence))));
  memory.partials = reinterpret_cast<float*>(take(plan.num_partials * partial_floats(a) * 4));
  int64_t floats = larger(plan.num_prefill ? prefill_floats(a) : 0, plan.num_decode ? decode_floats(a) : 0);
  memory.scratch_floats = round_up(floats, 16);
  memory.scratch = reinterpret_cast<float*>(take(a.threads * memory.scratch_floats * 4));
  memory.bytes = at;
  return memory;
}

inline size_t attention_workspace(const Attention& a) {
  return lay_out(a, plan_attention(a, nullptr, nullptr, nullptr), nullptr).bytes;
}

template <class T>
void attention_on(const Attention& a) {
  AttentionPlan plan = plan_attention(a, nullptr, nullptr, nullptr);
  AttentionMemory memory = lay_out(a, plan, a.workspace);
  plan_attention(a, memory.prefill, memory.decode, memory.splits);
  int64_t num_items = plan.num_prefill + plan.num_decode;
  int threads = int(smaller(threads_for(plan.bytes, a.threads), larger(1, num_items)));
  int64_t next_item = 0, next_split = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    int64_t thread = __atomic_fetch_add(&next_split, 1, __ATOMIC_RELAXED);  // any distinct numbers
    float* scratch = memory.scratch + thread * memory.scratch_floats;
    auto take = [&] { return __atomic_fetch_add(&next_item, 1, __ATOMIC_RELAXED); };
    for (int64_t item = take(), after; item < num_items; item = after) {
      after = take();  // known early, so that its first keys are on their way in time
      if (item < plan.num_prefill) {
        prefill_item<T>(a, memory.prefill[item], scratch);
      } else {
        int64_t at = item - plan.num_prefill;
        const DecodeItem* follower =
            after < num_items ? &memory.decode[after - plan.num_prefill] : nullptr;
        const DecodeItem& mine = memory.decode[at];
        decode_item<T>(a, mine, follower, memory.partials + mine.partial * partial_floats(a),
                       scratch);
      }
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < plan.num_splits; ++i) {
      finish_sequence<T>(a, memory.splits[i], memory.partials);
    }
  }
}

inline void attention(const Attention& a) {
  with_pool(a.pool.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    attention_on<T>(a);
  });
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry
