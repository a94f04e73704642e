// Numbers that callers hand over in bulk: numpy buffers, borrowed for the length of a call and
// never kept, and lists of block ids.
#pragma once

#include <cstring>
#include <vector>

#include "bindings/py_util.hpp"
#include "tagma/block_range.hpp"

namespace tagma::py {

// A one-dimensional contiguous buffer of T, held for the length of a call.
template <typename T>
class Vector {
 public:
  Vector(PyObject* object, const char* name, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object, &view_, flags | PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
      throw PythonError{};
    }
    if (view_.ndim != 1 || !holds_t()) {
      PyErr_Format(PyExc_TypeError, "%s must be one-dimensional int%d, got %d dimensions of '%s'",
                   name, static_cast<int>(sizeof(T) * 8), view_.ndim, view_.format);
      fail();
    }
    if (size() > 1 && view_.strides[0] != static_cast<Py_ssize_t>(sizeof(T))) {
      PyErr_Format(PyExc_TypeError, "%s must be contiguous, got a stride of %zd bytes", name,
                   view_.strides[0]);
      fail();
    }
  }
  Vector(const Vector&) = delete;
  Vector& operator=(const Vector&) = delete;
  ~Vector() { PyBuffer_Release(&view_); }

  T* data() const { return static_cast<T*>(view_.buf); }
  Py_ssize_t size() const { return view_.shape[0]; }

 private:
  // Native signed integers only; "l" and "q" both name int64 on the platforms built for.
  bool holds_t() const {
    return view_.itemsize == static_cast<Py_ssize_t>(sizeof(T)) && std::strlen(view_.format) == 1 &&
           std::strchr("ilq", view_.format[0]) != nullptr;
  }

  [[noreturn]] void fail() {
    PyBuffer_Release(&view_);
    throw PythonError{};
  }

  Py_buffer view_{};
};

// Calls body(ids, count) with the block ids of a list of ints or of an int32 buffer.
template <typename Body>
auto with_ids(PyObject* ids, Body&& body) {
  if (PyList_Check(ids)) {
    const Py_ssize_t count = PyList_Size(ids);
    std::vector<BlockId> values;
    values.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      // An item's __index__ may take it out of the list.
      const PyRef item(Py_NewRef(checked(PyList_GetItem(ids, i))));
      values.push_back(to_int32(item.get()));
    }
    return body(values.data(), static_cast<int64_t>(values.size()));
  }
  const Vector<BlockId> buffer(ids, "ids");
  return body(static_cast<const BlockId*>(buffer.data()), static_cast<int64_t>(buffer.size()));
}

}  // namespace tagma::py
