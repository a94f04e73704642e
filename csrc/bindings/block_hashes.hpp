// Block hashes as Python has them: lists of bytes, read in place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "bindings/py_util.hpp"
#include "tagma/kv_pool.hpp"

namespace tagma::py {

// What a pool remembers of the hashes it is given.
struct HashState {
  size_t bytes = 0;                  // of each; 0 until the first is seen
  std::vector<const uint8_t*> keys;  // scratch of Publication, kept for its memory
};

// The hashes of one request. The list must not change during the call (the GIL is held throughout).
class BlockHashes {
 public:
  // Sets TypeError and throws PythonError for anything but a list.
  BlockHashes(KvPool& pool, HashState& state, PyObject* list)
      : pool_(pool), state_(state), list_(list) {
    if (!PyList_Check(list)) {
      PyErr_Format(PyExc_TypeError, "block hashes must be a list of bytes, got %R", Py_TYPE(list));
      throw PythonError{};
    }
    size_ = PyList_Size(list);
  }

  int32_t size() const {
    return static_cast<int32_t>(std::min<Py_ssize_t>(size_, std::numeric_limits<int32_t>::max()));
  }

  // Throws UsageError for a hash that is not as long as the pool's others.
  const uint8_t* operator()(int32_t i) const {
    char* bytes = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(checked(PyList_GetItem(list_, i)), &bytes, &length) < 0) {
      throw PythonError{};
    }
    if (length == 0 || static_cast<size_t>(length) != state_.bytes) {
      pool_.set_key_bytes(static_cast<size_t>(length));  // throws unless it is the first
      state_.bytes = static_cast<size_t>(length);
    }
    return reinterpret_cast<const uint8_t*>(bytes);
  }

 private:
  KvPool& pool_;
  HashState& state_;
  PyObject* list_;
  Py_ssize_t size_;
};

// The block hashes that a call will publish in one group, read and checked while nothing has
// changed yet: the hashes [published, blocks) of a row that will hold `row_blocks` blocks.
class Publication {
 public:
  // Runs no Python code unless it throws.
  Publication(KvPool& pool, HashState& state, int32_t published, int32_t row_blocks, int32_t blocks,
              PyObject* hashes)
      : first_(published), last_(blocks), at_(state.keys.size()) {
    if (last_ <= 0) return;
    const BlockHashes keys(pool, state, hashes);
    last_ = std::min(last_, keys.size());
    if (last_ <= first_) return;
    if (last_ > row_blocks) {
      throw UsageError(message("publish ", last_, " blocks of a row of ", row_blocks));
    }
    pool.check_can_publish();
    state.keys.resize(at_ + static_cast<size_t>(last_ - first_));
    const uint8_t** out = state.keys.data() + at_;
    for (int32_t i = first_; i < last_; ++i) *out++ = keys(i);
  }

  void apply(KvPool& pool, const HashState& state, RowHandle row, int32_t group) const {
    if (last_ <= first_) return;
    // By value: what the pool writes could be these, for all that the compiler knows.
    const uint8_t* const* keys = state.keys.data() + at_;
    pool.publish(row, group, last_, [keys, first = first_](int32_t i) { return keys[i - first]; });
  }

 private:
  int32_t first_;
  int32_t last_;
  size_t at_;  // in the scratch
};

}  // namespace tagma::py
