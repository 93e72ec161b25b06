// The Python module: arguments as integers and floats, checks of what only the data can say, and the
// lock of the interpreter released around every kernel.
//
// A function returns None, or the reason why it did nothing. Shapes, dtypes and strides have been
// checked by the callers in Python.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>
#include <initializer_list>

#include "isa.h"

using namespace kvferry;

namespace {

// --- instruction sets ----------------------------------------------------------------------------

PyObject* isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Isa* isa = built(); names && isa->name; ++isa) {
    if (!runs_here(*isa)) continue;
    PyObject* name = PyUnicode_FromString(isa->name);
    if (!name || PyList_Append(names, name)) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* isa(PyObject*, PyObject*) { return PyUnicode_FromString(in_force().name); }

// True if the name is one of isas(), and now in force.
PyObject* select_isa(PyObject*, PyObject* wanted) {
  const char* name = PyUnicode_AsUTF8(wanted);
  return name ? PyBool_FromLong(put_in_force(name)) : nullptr;
}

// --- arguments -----------------------------------------------------------------------------------

// Takes the arguments one after the other; remembers the first that is wrong.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), left_(count) {}

  int64_t integer() {
    PyObject* value = next();
    return value ? PyLong_AsLongLong(value) : 0;
  }
  int small() { return int(integer()); }
  float real() {
    PyObject* value = next();
    return value ? float(PyFloat_AsDouble(value)) : 0;
  }
  template <class T>
  T* pointer() {
    PyObject* value = next();
    return value ? static_cast<T*>(PyLong_AsVoidPtr(value)) : nullptr;
  }
  bool are_wrong() {
    if (left_ && !PyErr_Occurred()) {
      PyErr_Format(PyExc_TypeError, "%zd arguments too many", left_);
    }
    return PyErr_Occurred() != nullptr;
  }

 private:
  PyObject* next() {
    if (left_ == 0) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too few arguments");
      return nullptr;
    }
    --left_;
    return *values_++;
  }

  PyObject* const* values_;
  Py_ssize_t left_;
};

Pool take_pool(Arguments& given) {
  Pool pool;
  pool.data = given.pointer<void>();
  pool.num_blocks = given.integer();
  pool.block_size = given.integer();
  pool.block_stride = given.integer();
  pool.plane_stride = given.integer();
  pool.head_stride = given.integer();
  pool.dtype = given.small();
  return pool;
}

template <class Run>
PyObject* run_released(Run run) {
  Py_BEGIN_ALLOW_THREADS;
  run();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// Memory of the calling thread that kernels work in; grows to what was needed most.
class Workspace {
 public:
  ~Workspace() { free(data_); }
  char* of(size_t bytes) {
    if (bytes > size_) {
      free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(aligned_alloc(64, size_));
      if (!data_) size_ = 0;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};
thread_local Workspace workspace;

// --- what only the data can say ------------------------------------------------------------------

PyObject* bad_slot(const int64_t* slots, int64_t count, const Pool& pool) {
  int64_t limit = pool.num_blocks * pool.block_size;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0 || slots[i] >= limit) {
      return PyUnicode_FromFormat("slot_mapping[%lld] is %lld, wanted 0 to %lld", (long long)i,
                                  (long long)slots[i], (long long)limit - 1);
    }
  }
  return nullptr;
}

PyObject* bad_sequence(const Attention& a, int64_t tokens) {
  if (a.cu_seqlens_q[0] != 0 || a.cu_seqlens_q[a.num_seqs] != tokens) {
    return PyUnicode_FromFormat("cu_seqlens_q is %d .. %d, wanted 0 .. %lld, the rows of q",
                                a.cu_seqlens_q[0], a.cu_seqlens_q[a.num_seqs], (long long)tokens);
  }
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    int64_t query_len = int64_t(a.cu_seqlens_q[seq + 1]) - a.cu_seqlens_q[seq];
    int64_t kv_len = a.seq_lens[seq];
    if (query_len < 0) {
      return PyUnicode_FromFormat("cu_seqlens_q[%lld] is below the one before it",
                                  (long long)seq + 1);
    }
    if (query_len == 0) continue;
    if (kv_len < query_len || kv_len > a.table_stride * a.pool.block_size) {
      return PyUnicode_FromFormat(
          "seq_lens[%lld] is %lld, wanted %lld, its queries, to %lld, what its block table holds",
          (long long)seq, (long long)kv_len, (long long)query_len,
          (long long)(a.table_stride * a.pool.block_size));
    }
    int64_t oldest = a.window ? kv_len - query_len - a.window + 1 : 0;
    const int32_t* table = a.block_tables + seq * a.table_stride;
    for (int64_t i = (oldest > 0 ? oldest : 0) / a.pool.block_size; i * a.pool.block_size < kv_len;
         ++i) {
      if (table[i] < 0 || table[i] >= a.pool.num_blocks) {
        return PyUnicode_FromFormat("block_tables[%lld, %lld] is %d, wanted 0 to %lld",
                                    (long long)seq, (long long)i, table[i],
                                    (long long)a.pool.num_blocks - 1);
      }
    }
  }
  return nullptr;
}

// --- kernels -------------------------------------------------------------------------------------

PyObject* rms_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  RmsNorm a;
  a.out = given.pointer<void>();
  a.x = given.pointer<void>();
  a.residual = given.pointer<void>();
  a.weight = given.pointer<void>();
  a.outer = given.integer();
  a.inner = given.integer();
  a.size = given.integer();
  a.outer_stride = given.integer();
  a.inner_stride = given.integer();
  a.eps = given.real();
  a.dtype = given.small();
  a.threads = given.small();
  if (given.are_wrong()) return nullptr;
  return run_released([&] { in_force().kernels->rms_norm(a); });
}

PyObject* silu_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  SiluMul a;
  a.out = given.pointer<void>();
  a.gate_up = given.pointer<void>();
  a.rows = given.integer();
  a.size = given.integer();
  a.row_stride = given.integer();
  a.dtype = given.small();
  a.threads = given.small();
  if (given.are_wrong()) return nullptr;
  return run_released([&] { in_force().kernels->silu_mul(a); });
}

PyObject* rope_tables(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  RopeTables a;
  a.cos = given.pointer<void>();
  a.sin = given.pointer<void>();
  a.positions = given.pointer<int64_t>();
  a.inv_freq = given.pointer<float>();
  a.tokens = given.integer();
  a.half = given.integer();
  a.factor = given.real();
  a.dtype = given.small();
  a.threads = given.small();
  if (given.are_wrong()) return nullptr;
  return run_released([&] { in_force().kernels->rope_tables(a); });
}

PyObject* rope(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  Rope a;
  a.out = given.pointer<void>();
  a.x = given.pointer<void>();
  a.v = given.pointer<void>();
  a.cos = given.pointer<void>();
  a.sin = given.pointer<void>();
  a.slots = given.pointer<int64_t>();
  a.tokens = given.integer();
  a.heads = given.integer();
  a.kv_heads = given.integer();
  a.dim = given.integer();
  a.x_token_stride = given.integer();
  a.x_head_stride = given.integer();
  a.v_token_stride = given.integer();
  a.v_head_stride = given.integer();
  a.table_stride = given.integer();
  a.pool = take_pool(given);
  a.dtype = given.small();
  a.threads = given.small();
  if (given.are_wrong()) return nullptr;
  if (a.pool.data) {
    if (PyObject* refusal = bad_slot(a.slots, a.tokens, a.pool)) return refusal;
  }
  return run_released([&] { in_force().kernels->rope(a); });
}

PyObject* move_blocks(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  MoveBlocks a;
  a.target = given.pointer<char>();
  a.source = given.pointer<char>();
  a.target_ids = given.pointer<int64_t>();
  a.source_ids = given.pointer<int64_t>();
  a.count = given.integer();
  a.block_bytes = given.integer();
  int64_t num_blocks = given.integer();
  a.threads = given.small();
  if (given.are_wrong()) return nullptr;
  for (const int64_t* ids : {a.source_ids, a.target_ids}) {
    for (int64_t i = 0; ids && i < a.count; ++i) {
      if (ids[i] < 0 || ids[i] >= num_blocks) {
        return PyUnicode_FromFormat("block id %lld, wanted 0 to %lld", (long long)ids[i],
                                    (long long)num_blocks - 1);
      }
    }
  }
  return run_released([&] { in_force().kernels->move_blocks(a); });
}

PyObject* paged_attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  Attention a;
  a.out = given.pointer<void>();
  a.q = given.pointer<void>();
  a.block_tables = given.pointer<int32_t>();
  a.cu_seqlens_q = given.pointer<int32_t>();
  a.seq_lens = given.pointer<int32_t>();
  int64_t tokens = given.integer();
  a.num_seqs = given.integer();
  a.table_stride = given.integer();
  a.heads = given.integer();
  a.kv_heads = given.integer();
  a.dim = given.integer();
  a.q_token_stride = given.integer();
  a.q_head_stride = given.integer();
  a.window = given.integer();
  a.pool = take_pool(given);
  a.scale = given.real();
  a.soft_cap = given.real();
  a.dtype = given.small();
  a.threads = given.small();
  if (given.are_wrong()) return nullptr;
  if (PyObject* refusal = bad_sequence(a, tokens)) return refusal;
  a.workspace = workspace.of(in_force().kernels->attention_workspace(a));
  if (!a.workspace) return PyErr_NoMemory();
  return run_released([&] { in_force().kernels->attention(a); });
}

PyObject* pack_linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  PackLinear a;
  a.packed = given.pointer<void>();
  a.weight = given.pointer<void>();
  a.scales = given.pointer<float>();
  a.corrections = given.pointer<int32_t>();
  a.out_size = given.integer();
  a.in_size = given.integer();
  a.row_stride = given.integer();
  a.kind = given.small();
  a.dtype = given.small();
  a.threads = given.small();
  if (given.are_wrong()) return nullptr;
  return run_released([&] { in_force().linears->pack(a); });
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments given(values, count);
  Linear a;
  a.out = given.pointer<void>();
  a.x = given.pointer<void>();
  a.packed = given.pointer<void>();
  a.bias = given.pointer<float>();
  a.scales = given.pointer<float>();
  a.corrections = given.pointer<int32_t>();
  a.rows = given.integer();
  a.out_size = given.integer();
  a.in_size = given.integer();
  a.x_stride = given.integer();
  a.out_stride = given.integer();
  a.kind = given.small();
  a.dtype = given.small();
  a.out_dtype = given.small();
  a.threads = given.small();
  if (given.are_wrong()) return nullptr;
  a.workspace = workspace.of(in_force().linears->workspace(a));
  if (!a.workspace) return PyErr_NoMemory();
  return run_released([&] { in_force().linears->linear(a); });
}

#define KVFERRY_FAST(name) \
  {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, nullptr}

PyMethodDef methods[] = {
    {"isas", isas, METH_NOARGS, nullptr},
    {"isa", isa, METH_NOARGS, nullptr},
    {"select_isa", select_isa, METH_O, nullptr},
    KVFERRY_FAST(rms_norm),
    KVFERRY_FAST(silu_mul),
    KVFERRY_FAST(rope_tables),
    KVFERRY_FAST(rope),
    KVFERRY_FAST(move_blocks),
    KVFERRY_FAST(paged_attention),
    KVFERRY_FAST(pack_linear),
    KVFERRY_FAST(linear),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, -1, methods,
                          nullptr,               nullptr,    nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() {
  if (!put_in_force(nullptr)) {
    PyErr_SetString(PyExc_ImportError, "no instruction set of this processor was built");
    return nullptr;
  }
  PyObject* module = PyModule_Create(&definition);
  if (module && PyModule_AddStringConstant(module, "SOURCES", KVFERRY_SOURCES)) Py_CLEAR(module);
  return module;
}
