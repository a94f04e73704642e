// Shared by the bindings: owning references, argument parsing, translation of exceptions.
#pragma once

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include <cstdint>
#include <limits>
#include <new>

#include "tagma/errors.hpp"

namespace tagma::py {

// Thrown when a Python exception is already set.
struct PythonError {};

// Owns one reference.
class PyRef {
 public:
  explicit PyRef(PyObject* object = nullptr) : object_(object) {}
  ~PyRef() { Py_XDECREF(object_); }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;
  PyRef(PyRef&& other) noexcept : object_(other.release()) {}
  PyRef& operator=(PyRef&& other) noexcept {
    PyObject* old = object_;
    object_ = other.release();
    Py_XDECREF(old);
    return *this;
  }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* release() {
    PyObject* out = object_;
    object_ = nullptr;
    return out;
  }

 private:
  PyObject* object_;
};

// The object, or PythonError if it is null.
inline PyObject* checked(PyObject* object) {
  if (object == nullptr) throw PythonError{};
  return object;
}

// Sets the Python exception for the C++ exception in flight. Call inside a catch block.
inline void translate_exception() {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const UsageError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

// Runs `body` and turns what it throws into a Python exception and a null result.
template <typename Body>
PyObject* guarded(Body&& body) {
  try {
    return body();
  } catch (...) {
    translate_exception();
    return nullptr;
  }
}

inline int64_t to_int64(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
  return value;
}

inline int32_t to_int32(PyObject* object) {
  const int64_t value = to_int64(object);
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    throw UsageError(message(value, " does not fit in 32 bits"));
  }
  return static_cast<int32_t>(value);
}

// Throws unless exactly `want` positional arguments were given.
inline void check_nargs(const char* name, Py_ssize_t got, Py_ssize_t want) {
  if (got == want) return;
  PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments (%zd given)", name, want, got);
  throw PythonError{};
}

// METH_FASTCALL functions are stored as PyCFunction; the cast is the documented one.
using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
inline PyCFunction fast(FastCall function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Creates a heap type, adds it to the module under its own name and returns it (borrowed).
inline PyObject* add_type(PyObject* module, PyType_Spec* spec, const char* name) {
  PyObject* type = PyType_FromSpec(spec);
  if (type == nullptr) return nullptr;
  if (PyModule_AddObjectRef(module, name, type) < 0) {
    Py_DECREF(type);
    return nullptr;
  }
  Py_DECREF(type);
  return type;
}

}  // namespace tagma::py
