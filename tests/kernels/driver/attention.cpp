// Paged attention: decode steps, prefill chunks and both in one batch. What no query may see is not
// a number, in the pool, and no block at all, in the tables.
#include <algorithm>
#include <numeric>

#include "check.h"

namespace driver {
namespace {

const KernelTable& table = KVFERRY_ISA::table;
constexpr int64_t MOST_WORK = 4000000;  // products of keys and queries in one case

struct Batch {
  Attention a = {};
  int64_t block_size, block_stride;
  std::vector<int32_t> bounds, lengths, tables;
  int pool_dtype;

  int64_t queries(int64_t seq) const { return bounds[size_t(seq) + 1] - bounds[size_t(seq)]; }
  int64_t tokens() const { return bounds.back(); }
  int64_t row_size() const { return a.heads * a.dim; }
  // The first position that a query at `position` sees.
  int64_t first_seen(int64_t position) const {
    return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
  }
  int64_t place(int64_t seq, int64_t position, int64_t kv_head) const {
    int64_t block = tables[size_t(seq * a.table_stride + position / block_size)];
    return block * block_stride + (kv_head * block_size + position % block_size) * a.dim;
  }
};

enum Mode { DECODE, PREFILL, BOTH };

void draw_shape(Batch& b, Mode mode) {
  Attention& a = b.a;
  int64_t work;
  do {
    a.num_seqs = draw(1, 4), a.kv_heads = draw(1, 3);
    a.heads = a.kv_heads * one_of({1, 2, 3, 4, 5, 7, 8, 12});
    b.bounds = {0}, b.lengths.clear();
    work = 0;
    for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
      int64_t queries = mode == DECODE    ? 1
                        : mode == PREFILL ? draw(2, 90)
                                          : one_of({0, 1, 1, 2, draw(3, 60)});
      int64_t length = queries + one_of({0, draw(0, 40), 127, 512, 700});
      b.bounds.push_back(b.bounds.back() + int32_t(queries));
      b.lengths.push_back(int32_t(length));
      work += queries * length * a.heads * a.dim;
    }
  } while (work > MOST_WORK);
}

// Tables of blocks in any order; the ids of those that are not read are no block's.
void draw_tables(Batch& b) {
  int64_t longest = *std::max_element(b.lengths.begin(), b.lengths.end());
  b.a.table_stride = (longest + b.block_size - 1) / b.block_size + draw(0, 2);
  std::vector<int32_t> ids(size_t(b.a.num_seqs * b.a.table_stride + 1));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), engine);
  b.a.pool.num_blocks = int64_t(ids.size());
  for (int64_t seq = 0; seq < b.a.num_seqs; ++seq) {
    int64_t length = b.lengths[size_t(seq)], first = b.first_seen(length - b.queries(seq));
    for (int64_t i = 0; i < b.a.table_stride; ++i) {
      bool is_read = (i + 1) * b.block_size > first && i * b.block_size < length;
      b.tables.push_back(is_read ? ids.back() : 0x7fffffff);
      ids.pop_back();
    }
  }
}

void fill_pool(const Batch& b, Memory& pool, int64_t plane) {
  for (int64_t seq = 0; seq < b.a.num_seqs; ++seq) {
    int64_t length = b.lengths[size_t(seq)];
    if (!b.queries(seq)) continue;
    for (int64_t at = b.first_seen(length - b.queries(seq)); at < length; ++at) {
      for (int64_t head = 0; head < b.a.kv_heads; ++head) {
        for (int64_t d = 0; d < b.a.dim; ++d) {
          put(pool.data(), b.place(seq, at, head) + d, b.pool_dtype, number());
          put(pool.data(), b.place(seq, at, head) + plane + d, b.pool_dtype, number());
        }
      }
    }
  }
}

// One query of one head, by the definition.
void check_row(const Batch& b, int64_t seq, int64_t row, int64_t head,
               const std::vector<double>& keys, const std::vector<double>& values, int64_t oldest) {
  const Attention& a = b.a;
  int64_t position = b.lengths[size_t(seq)] - b.bounds[size_t(seq) + 1] + row;
  int64_t first = b.first_seen(position), count = position + 1 - first;
  std::vector<double> q, weights;
  for (int64_t d = 0; d < a.dim; ++d) {
    q.push_back(get(a.q, row * a.q_token_stride + head * a.q_head_stride + d, a.dtype));
  }
  double most = -std::numeric_limits<double>::infinity(), magnitude = 0, total = 0;
  for (int64_t t = 0; t < count; ++t) {
    const double* key = &keys[size_t((first - oldest + t) * a.dim)];
    double score = 0, sizes = 0;
    for (int64_t d = 0; d < a.dim; ++d) {
      score += q[size_t(d)] * key[d] * double(a.scale);
      sizes += std::fabs(q[size_t(d)] * key[d] * double(a.scale));
    }
    if (a.soft_cap > 0) score = double(a.soft_cap) * std::tanh(score / double(a.soft_cap));
    weights.push_back(score);
    most = std::max(most, score), magnitude = std::max(magnitude, sizes);
  }
  for (double& weight : weights) total += weight = std::exp(weight - most);
  // scores that are off make weights that are off, of which the soft cap and e^x add their own
  double error = magnitude * sum_error(a.dim) + double(a.soft_cap) * 2 * UNIT + sum_error(count) +
                 8 * UNIT;
  for (int64_t d = 0; d < a.dim; ++d) {
    double wanted = 0, sizes = 0;
    for (int64_t t = 0; t < count; ++t) {
      double part = weights[size_t(t)] / total * values[size_t((first - oldest + t) * a.dim + d)];
      wanted += part, sizes += std::fabs(part);
    }
    int64_t at = row * b.row_size() + head * a.dim + d;
    compare(at, get(a.out, at, a.dtype), wanted, error * sizes, a.dtype);
  }
}

void check(const Batch& b) {
  const Attention& a = b.a;
  int64_t group = a.heads / a.kv_heads;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    int64_t length = b.lengths[size_t(seq)], oldest = b.first_seen(length - b.queries(seq));
    for (int64_t kv_head = 0; b.queries(seq) && kv_head < a.kv_heads; ++kv_head) {
      std::vector<double> keys, values;
      for (int64_t i = 0; i < (length - oldest) * a.dim; ++i) {
        int64_t at = b.place(seq, oldest + i / a.dim, kv_head) + i % a.dim;
        keys.push_back(get(a.pool.data, at, b.pool_dtype));
        values.push_back(get(a.pool.data, at + a.pool.plane_stride, b.pool_dtype));
      }
      for (int64_t row = b.bounds[size_t(seq)]; row < b.bounds[size_t(seq) + 1]; ++row) {
        for (int64_t h = 0; h < group; ++h) {
          check_row(b, seq, row, kv_head * group + h, keys, values, oldest);
        }
      }
    }
  }
}

void run(Batch& b) {
  Memory workspace(int64_t(table.attention_workspace(b.a)));
  memset(workspace.data(), 0xff, size_t(workspace.bytes()));  // not a number
  b.a.workspace = workspace.data();
  table.attention(b.a);
}

void attention(int round) {
  const char* names[] = {"attention, decode", "attention, prefill", "attention, both"};
  const int64_t dims[] = {2, 17, 24, 64, 80, 96, 128, 256};
  Batch b;
  Attention& a = b.a;
  b.pool_dtype = round % 3, a.dtype = round / 3 % 2, a.dim = dims[round / 6 % 8];
  Mode mode = Mode(round / 48 % 3);
  draw_shape(b, mode);
  b.block_size = draw(1, 40);
  a.window = draw(0, 1) ? draw(1, 100) : 0;
  a.scale = 1 / std::sqrt(float(a.dim)) * (once_in(4) ? 8.0f : 1.0f);
  a.soft_cap = once_in(4) ? 5.0f : 0.0f;
  now(names[mode], "q %s, pool %s, dim %lld, heads %lld of %lld, blocks of %lld, %lld sequences",
      name_of(a.dtype), name_of(b.pool_dtype), (long long)a.dim, (long long)a.heads,
      (long long)a.kv_heads, (long long)b.block_size, (long long)a.num_seqs);
  draw_tables(b);
  int64_t plane = a.kv_heads * b.block_size * a.dim;
  b.block_stride = 2 * plane * draw(1, 2);  // one layer of two
  Memory pool(a.pool.num_blocks * b.block_stride, b.pool_dtype, nothing);
  fill_pool(b, pool, plane);
  a.pool = {pool.data(), a.pool.num_blocks, b.block_size, b.block_stride,
            plane,       b.block_size * a.dim, b.pool_dtype};
  a.q_head_stride = a.dim + draw(0, 2), a.q_token_stride = a.heads * a.q_head_stride + draw(0, 2);
  Memory q(b.tokens() * a.q_token_stride, a.dtype, number);
  Memory out(b.tokens() * b.row_size(), a.dtype, nothing);
  a.out = out.data(), a.q = q.data(), a.block_tables = b.tables.data();
  a.cu_seqlens_q = b.bounds.data(), a.seq_lens = b.lengths.data();
  a.threads = int(draw(1, 3));
  run(b);
  check(b);
}

// Every number of a half dtype as the value of a single key, whose weight is 1.
void widening(int round) {
  Batch b;
  Attention& a = b.a;
  b.pool_dtype = round % 2 ? F16 : BF16, a.dtype = round / 2 % 2;
  a.dim = round / 4 ? 250 : 256;  // read as it is, and widened first
  now("attention, one key", "q %s, every %s, dim %lld", name_of(a.dtype), name_of(b.pool_dtype),
      (long long)a.dim);
  a.num_seqs = (65536 + a.dim - 1) / a.dim, a.heads = a.kv_heads = a.table_stride = 1;
  b.bounds.resize(size_t(a.num_seqs) + 1);
  std::iota(b.bounds.begin(), b.bounds.end(), 0);
  b.tables.assign(b.bounds.begin(), b.bounds.end() - 1), b.lengths.assign(size_t(a.num_seqs), 1);
  Memory pool(a.num_seqs * 2 * a.dim, b.pool_dtype, [] { return 0.0; });
  for (int64_t i = 0; i < 65536; ++i) {
    uint16_t bits = uint16_t(i);
    memcpy(pool.data() + 2 * ((i / a.dim * 2 + 1) * a.dim + i % a.dim), &bits, 2);
  }
  Memory q(a.num_seqs * a.dim, a.dtype, number), out(a.num_seqs * a.dim, a.dtype, nothing);
  a.pool = {pool.data(), a.num_seqs, 1, 2 * a.dim, a.dim, a.dim, b.pool_dtype};
  a.out = out.data(), a.q = q.data(), a.block_tables = b.tables.data();
  a.cu_seqlens_q = b.bounds.data(), a.seq_lens = b.lengths.data();
  a.q_token_stride = a.q_head_stride = a.dim, a.scale = 1, a.threads = 2;
  run(b);
  for (int64_t i = 0; i < a.num_seqs * a.dim; ++i) {
    double value = get(pool.data(), (i / a.dim * 2 + 1) * a.dim + i % a.dim, b.pool_dtype);
    compare_exactly(i, get(out.data(), i, a.dtype), rounded(value, a.dtype), value);
  }
}

Cases cases[] = {{288, attention}, {8, widening}};

}  // namespace
}  // namespace driver
