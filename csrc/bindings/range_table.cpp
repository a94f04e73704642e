// RangeTable for Python: the worker's table of ranges over numpy buffers.
//
// The GIL is held throughout: mapping
// 4096 tokens takes a few microseconds, and letting go of it would allow another thread to change
// the rows being read.
#include "tagma/range_table.hpp"

#include <memory>
#include <vector>

#include "bindings/block_ranges.hpp"
#include "bindings/buffers.hpp"
#include "bindings/py_util.hpp"

int add_range_table(PyObject* module);

namespace {

using tagma::BlockId;
using tagma::RangeTable;
using tagma::UsageError;
using namespace tagma::py;

struct RangeTableObject {
  PyObject ob_base;
  RangeTable* table;
};

RangeTable& table_of(PyObject* self) { return *reinterpret_cast<RangeTableObject*>(self)->table; }

// Calls body() and returns what it says as an int. A refusal by the cap becomes a RuntimeError with
// args = (message, row, needed, cap): the Python face builds its own error from the numbers.
template <typename Body>
PyObject* capped(Body&& body) {
  try {
    return PyLong_FromLong(body());
  } catch (const tagma::RangeCapError& error) {
    PyRef numbers(checked(Py_BuildValue("(siLi)", error.what(), error.row(),
                                        static_cast<long long>(error.needed()), error.cap())));
    PyErr_SetObject(PyExc_RuntimeError, numbers.get());
    throw PythonError{};
  }
}

PyObject* construct(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* const names[] = {"max_rows", "max_ranges", nullptr};
    int max_rows = 0;
    int max_ranges = tagma::kMaxRanges;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|i:RangeTable", const_cast<char**>(names),
                                     &max_rows, &max_ranges)) {
      throw PythonError{};
    }
    auto table = std::make_unique<RangeTable>(max_rows, max_ranges);
    PyObject* self = checked(PyType_GenericAlloc(type, 0));
    reinterpret_cast<RangeTableObject*>(self)->table = table.release();
    return self;
  });
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<RangeTableObject*>(self)->table;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* write(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("write", nargs, 3);
    const int32_t row = to_int32(args[0]);
    const int32_t first = to_int32(args[1]);
    return capped([&] { return table_of(self).write(row, first, ranges_of(args[2])); });
  });
}

PyObject* check_write(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("check_write", nargs, 3);
    const int32_t row = to_int32(args[0]);
    const int32_t first = to_int32(args[1]);
    PyRef zero(capped([&] {
      table_of(self).check_write(row, first, ranges_of(args[2]));
      return 0;
    }));
    Py_RETURN_NONE;
  });
}

PyObject* append(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("append", nargs, 2);
    const int32_t row = to_int32(args[0]);
    return with_ids(args[1], [&](const BlockId* ids, int64_t count) {
      return capped([&] { return table_of(self).append(row, ids, count); });
    });
  });
}

PyObject* clear(PyObject* self, PyObject* row) {
  return guarded([&]() -> PyObject* {
    table_of(self).clear(to_int32(row));
    Py_RETURN_NONE;
  });
}

PyObject* move(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("move", nargs, 2);
    table_of(self).move(to_int32(args[0]), to_int32(args[1]));
    Py_RETURN_NONE;
  });
}

PyObject* swap(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("swap", nargs, 2);
    table_of(self).swap(to_int32(args[0]), to_int32(args[1]));
    Py_RETURN_NONE;
  });
}

PyObject* num_ranges(PyObject* self, PyObject* row) {
  return guarded([&] { return PyLong_FromLong(table_of(self).num_ranges(to_int32(row))); });
}

PyObject* num_blocks(PyObject* self, PyObject* row) {
  return guarded([&] { return PyLong_FromLong(table_of(self).num_blocks(to_int32(row))); });
}

PyObject* ranges(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    const int32_t row = to_int32(arg);
    const RangeTable& table = table_of(self);
    const int32_t count = table.num_ranges(row);
    PyRef list(checked(PyList_New(count)));
    for (int32_t i = 0; i < count; ++i) {
      const tagma::BlockRange range = table.range(row, i);
      PyObject* pair = checked(Py_BuildValue("(ii)", range.start, range.count));
      if (PyList_SetItem(list.get(), i, pair) != 0) throw PythonError{};
    }
    return list.release();
  });
}

PyObject* packed(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("packed", nargs, 2);
    const RangeTable& table = table_of(self);
    const int32_t row = to_int32(args[0]);
    const int32_t first = to_int32(args[1]);
    const int32_t count = table.num_ranges(row) - first;
    if (first < 0 || count < 0) {
      throw UsageError(tagma::message("ranges from ", first, " on of row ", row, ", which has ",
                                      table.num_ranges(row)));
    }
    std::vector<int32_t> out(table.range_starts(row) + first,
                             table.range_starts(row) + first + count);
    out.insert(out.end(), table.range_cums(row) + first, table.range_cums(row) + first + count);
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(out.data()),
                                     static_cast<Py_ssize_t>(out.size() * sizeof(int32_t)));
  });
}

PyObject* compute_slots(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("compute_slots", nargs, 6);
    const int32_t num_reqs = to_int32(args[0]);
    const Vector<int32_t> starts(args[1], "query_start_loc");
    const Vector<int64_t> positions(args[2], "positions");
    const Vector<int64_t> out(args[3], "out", PyBUF_WRITABLE);
    const int64_t pad_to = to_int64(args[4]);
    if (num_reqs < 0 || starts.size() <= num_reqs) {
      throw UsageError(tagma::message("query_start_loc has ", starts.size(), " entries; num_reqs=",
                                      num_reqs, " needs one more than that many"));
    }
    if (pad_to < 0 || pad_to > out.size()) {
      throw UsageError(tagma::message("pad_to=", pad_to, " is outside [0, ", out.size(),
                                      "], the length of out"));
    }
    return PyLong_FromLongLong(table_of(self).compute_slots(num_reqs, starts.data(),
                                                            positions.data(), positions.size(),
                                                            out.data(), pad_to, to_int32(args[5])));
  });
}

// The memory at `address`, for callers that have checked what lies there.
template <typename T>
T* at_address(PyObject* address) {
  void* memory = PyLong_AsVoidPtr(address);
  if (memory == nullptr && PyErr_Occurred() != nullptr) throw PythonError{};
  return static_cast<T*>(memory);
}

PyObject* compute_slots_at(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("compute_slots_at", nargs, 7);
    const auto* starts = at_address<const int32_t>(args[1]);
    const auto* positions = at_address<const int64_t>(args[2]);
    auto* out = at_address<int64_t>(args[4]);
    return PyLong_FromLongLong(table_of(self).compute_slots(to_int32(args[0]), starts, positions,
                                                            to_int64(args[3]), out,
                                                            to_int64(args[5]), to_int32(args[6])));
  });
}

PyMethodDef g_methods[] = {
    {"write", fast(write), METH_FASTCALL,
     "write(row, first_block, ranges) -> int\n\nThe row keeps its first blocks and consists of "
     "these BlockRanges behind them. Returns the first range that was written."},
    {"check_write", fast(check_write), METH_FASTCALL,
     "check_write(row, first_block, ranges)\n\nRaises what write() would raise."},
    {"append", fast(append), METH_FASTCALL,
     "append(row, ids) -> int\n\nAppends block ids, a list of ints or an int32 buffer; returns as "
     "write()."},
    {"clear", clear, METH_O, "clear(row)\n\nEmpties a row."},
    {"move", fast(move), METH_FASTCALL, "move(src, dst)\n\nRow src is left empty."},
    {"swap", fast(swap), METH_FASTCALL, "swap(a, b)\n\nExchanges two rows."},
    {"num_ranges", num_ranges, METH_O, "num_ranges(row) -> int"},
    {"num_blocks", num_blocks, METH_O, "num_blocks(row) -> int"},
    {"ranges", ranges, METH_O,
     "ranges(row) -> list[tuple[int, int]]\n\n(start, count); start 0 is a run of null blocks."},
    {"packed", fast(packed), METH_FASTCALL,
     "packed(row, first_range) -> bytes\n\nint32: the starts of the row's ranges from that one on, "
     "then their first logical blocks."},
    {"compute_slots", fast(compute_slots), METH_FASTCALL,
     "compute_slots(num_reqs, query_start_loc, positions, out, pad_to, block_size) -> int\n\n"
     "Writes out[:pad_to] and returns the number of descriptor look-ups."},
    {"compute_slots_at", fast(compute_slots_at), METH_FASTCALL,
     "compute_slots_at(num_reqs, query_start_loc, positions, num_tokens, out, pad_to, block_size)"
     " -> int\n\nThe same over the addresses of contiguous int32, int64 and int64 arrays. The "
     "caller vouches for num_reqs + 1, num_tokens and pad_to elements."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot g_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, g_methods},
    {Py_tp_doc, const_cast<char*>("RangeTable(max_rows, max_ranges=256): ranges per batch row.")},
    {0, nullptr}};

PyType_Spec g_spec = {"vllm_tagma._native.RangeTable", sizeof(RangeTableObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, g_slots};

}  // namespace

int add_range_table(PyObject* module) {
  return add_type(module, &g_spec, "RangeTable") == nullptr ? -1 : 0;
}
