// The Python object around a pool, and its calls that name a request, group or pin.
#pragma once

#include <vector>

#include "bindings/block_hashes.hpp"
#include "bindings/block_ranges.hpp"
#include "bindings/py_util.hpp"
#include "tagma/kv_pool.hpp"

namespace tagma::py {

// The pool, and memory that its calls use again: one element a group.
struct PoolState {
  explicit PoolState(const tagma::PoolOptions& options)
      : pool(options),
        hits(options.groups.size()),
        needs(options.groups.size()),
        to_publish(options.groups.size()),
        added(options.groups.size()) {}

  KvPool pool;
  HashState hashes;
  std::vector<RangeList> hits;
  std::vector<Need> needs;
  std::vector<int32_t> to_publish;  // blocks
  std::vector<RangeList> added;
  std::vector<Publication> publications;
  uint64_t num_calls = 0;  // that use this memory
};

struct PoolObject {
  PyObject ob_base;
  PoolState* state;
};

inline PoolState& state_of(PyObject* self) { return *reinterpret_cast<PoolObject*>(self)->state; }
inline KvPool& pool_of(PyObject* self) { return state_of(self).pool; }

// METH_FASTCALL functions, in pool_requests.cpp; what each takes stands in pool.cpp's table.
PyObject* pool_lookup(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_admit(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_grow(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_publish(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_pass_over(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_skip(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_row_blocks(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_num_published(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_pin(PyObject* self, PyObject* const* args, Py_ssize_t nargs);
PyObject* pool_relocate(PyObject* self, PyObject* const* args, Py_ssize_t nargs);

// METH_O functions.
PyObject* pool_hold(PyObject* self, PyObject* arg);
PyObject* pool_free(PyObject* self, PyObject* arg);
PyObject* pool_pin_blocks(PyObject* self, PyObject* arg);
PyObject* pool_unpin(PyObject* self, PyObject* arg);

}  // namespace tagma::py
