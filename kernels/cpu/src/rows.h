// Where the rows of keys and values lie, and the fetching of them ahead of their use.
#pragma once

#include "int8_pool.h"
#include "kernels.h"
#include "vec.h"

namespace kvferry {
namespace KVFERRY_ISA {

constexpr int TILE = 64;  // tokens
constexpr int64_t LINE_BYTES = 64;

// The rows of a tile of keys.
template <class T>
struct TileRows {
  const T* k[TILE];
  int count;
};

template <class T>
KVFERRY_INLINE void find_rows(const Attention& a, int64_t seq, int64_t kv_head, int64_t begin,
                              int64_t end, TileRows<T>& rows) {
  const int32_t* table = a.block_tables + seq * a.table_stride;
  const T* base = static_cast<const T*>(a.pool.data) + kv_head * a.pool.head_stride;
  int64_t block = begin / a.pool.block_size, slot = begin % a.pool.block_size;
  int n = 0;
  for (int64_t left = end - begin; left > 0; slot = 0, ++block) {
    const T* row = base + table[block] * a.pool.block_stride + slot * a.dim;
    int here = int(smaller(a.pool.block_size - slot, left));
    left -= here;
    for (int i = 0; i < here; ++i, row += a.dim) rows.k[n++] = row;
  }
  rows.count = n;
}

// Fetches the keys and values of a range of positions into the second-level cache, a few lines at
// a time, in the order in which they lie: a block's keys of all heads, then its values. Read head
// by head instead, every run would begin on a page of its own.
template <class T>
class Ahead {
 public:
  // Nothing to fetch.
  explicit Ahead(const Attention& a)
      : a_(a), row_bytes_(a.dim * int64_t(sizeof(T))), at_(nullptr), end_(nullptr) {}

  void start(int64_t seq, int64_t first_head, int64_t heads, int64_t begin, int64_t end) {
    first_head_ = first_head, heads_ = heads, left_ = end - begin;
    block_ = a_.block_tables + seq * a_.table_stride + begin / a_.pool.block_size;
    slot_ = begin % a_.pool.block_size;
    plane_ = head_ = 0;
    here_ = smaller(a_.pool.block_size - slot_, left_);
    find_run();
  }

  // Lines per position and head that cover both planes in the end.
  int lines() const { return int(2 * (row_bytes_ + LINE_BYTES - 1) / LINE_BYTES); }

  KVFERRY_INLINE void fetch(int lines) {
    for (; lines > 0 && at_ < end_; --lines) {
      __builtin_prefetch(at_, 0, 2);
      at_ += LINE_BYTES;
      if (at_ >= end_) next_run();
    }
  }

 private:
  void find_run() {
    const T* run = static_cast<const T*>(a_.pool.data) + *block_ * a_.pool.block_stride +
                   plane_ * a_.pool.plane_stride + (first_head_ + head_) * a_.pool.head_stride;
    at_ = reinterpret_cast<const char*>(run + slot_ * a_.dim);
    end_ = at_ + here_ * row_bytes_;
    if constexpr (HAS_SCALES<T>) {
      end_ = reinterpret_cast<const char*>(run) + scale_offset(a_.pool, a_.dim, slot_ + here_);
    }
  }

  void next_run() {
    if (++head_ == heads_) {
      head_ = 0;
      if (++plane_ == 2) {
        plane_ = slot_ = 0;
        left_ -= here_;
        if (left_ <= 0) {
          at_ = end_ = nullptr;
          return;
        }
        ++block_;
        here_ = smaller(a_.pool.block_size, left_);
      }
    }
    find_run();
  }

  const Attention& a_;
  int64_t row_bytes_;
  int64_t first_head_ = 0, heads_ = 0, left_ = 0, slot_ = 0, here_ = 0, plane_ = 0, head_ = 0;
  const int32_t* block_ = nullptr;
  const char *at_, *end_;
};

}  // namespace KVFERRY_ISA
}  // namespace kvferry
