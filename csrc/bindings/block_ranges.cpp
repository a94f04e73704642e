#include "bindings/block_ranges.hpp"

#include <memory>
#include <utility>

#include "bindings/buffers.hpp"

namespace {

using tagma::BlockRange;
using tagma::RangeList;
using tagma::UsageError;
using namespace tagma::py;

struct BlockRangesObject {
  PyObject ob_base;
  RangeList* list;
  int64_t layout;
};

PyTypeObject* g_type = nullptr;  // one per process: the module is single-phase and never unloaded
PyObject* g_empty = nullptr;

const RangeList& list_of(PyObject* self) {
  return *reinterpret_cast<BlockRangesObject*>(self)->list;
}

PyObject* allocate(RangeList&& ranges, int64_t layout = -1) {
  auto list = std::make_unique<RangeList>(std::move(ranges));
  PyObject* self = checked(PyType_GenericAlloc(g_type, 0));
  reinterpret_cast<BlockRangesObject*>(self)->list = list.release();
  reinterpret_cast<BlockRangesObject*>(self)->layout = layout;
  return self;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<BlockRangesObject*>(self)->list;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// BlockRanges([(start, count), ...])
PyObject* construct(PyTypeObject*, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    if (kwargs != nullptr && PyDict_Size(kwargs) > 0) {
      PyErr_SetString(PyExc_TypeError, "BlockRanges() takes no keyword arguments");
      throw PythonError{};
    }
    PyObject* pairs = nullptr;
    if (!PyArg_ParseTuple(args, "|O:BlockRanges", &pairs)) throw PythonError{};
    RangeList list;
    if (pairs != nullptr) {
      PyRef iterator(checked(PyObject_GetIter(pairs)));
      while (PyRef item = PyRef(PyIter_Next(iterator.get()))) {
        long long start = 0;
        int count = 0;
        PyRef tuple(checked(PySequence_Tuple(item.get())));
        if (!PyArg_ParseTuple(tuple.get(), "Li:BlockRanges", &start, &count)) throw PythonError{};
        constexpr long long kLimit = std::numeric_limits<int32_t>::max();
        if (start < 0 || count <= 0 || start > kLimit - (count - 1)) {
          throw UsageError(tagma::message("range (", start, ", ", count, ") is not a block range"));
        }
        list.append({static_cast<int32_t>(start), count});
      }
      if (PyErr_Occurred() != nullptr) throw PythonError{};
    }
    return allocate(std::move(list));
  });
}

Py_ssize_t length(PyObject* self) { return list_of(self).num_blocks(); }

// list(range(start, end)), which fills a list faster than the limited API can. Worth its three
// calls for long ranges.
PyObject* list_of_range(const BlockRange& range) {
  auto* type = reinterpret_cast<PyObject*>(&PyRange_Type);
  PyObject* span = PyObject_CallFunction(type, "iL", range.start,
                                         static_cast<long long>(range.start) + range.count);
  if (span == nullptr) return nullptr;
  PyObject* out = PySequence_List(span);
  Py_DECREF(span);
  return out;
}

// A fresh list on every call: vLLM's worker extends the lists it receives.
PyObject* ids(PyObject* self, PyObject*) {
  const RangeList& list = list_of(self);
  if (list.num_ranges() == 1 && list.num_blocks() >= 32 && !list.ranges()[0].is_null()) {
    return list_of_range(list.ranges()[0]);
  }
  PyObject* out = PyList_New(list.num_blocks());
  if (out == nullptr) return nullptr;
  Py_ssize_t i = 0;
  for (const BlockRange& range : list.ranges()) {
    for (int32_t at = 0; at < range.count; ++at, ++i) {
      PyObject* id = PyLong_FromLong(range.at(at));
      if (id == nullptr || PyList_SetItem(out, i, id) < 0) {
        Py_DECREF(out);
        return nullptr;
      }
    }
  }
  return out;
}

PyObject* ranges(PyObject* self, PyObject*) {
  const RangeList& list = list_of(self);
  PyObject* out = PyList_New(list.num_ranges());
  if (out == nullptr) return nullptr;
  Py_ssize_t i = 0;
  for (const BlockRange& range : list.ranges()) {
    PyObject* pair = Py_BuildValue("(ii)", range.start, range.count);
    if (pair == nullptr || PyList_SetItem(out, i++, pair) < 0) {
      Py_DECREF(out);
      return nullptr;
    }
  }
  return out;
}

PyObject* truncated(PyObject* self, PyObject* arg) {
  return guarded([&] {
    RangeList list = list_of(self);
    list.truncate(to_int32(arg));
    return new_block_ranges(std::move(list), layout_of(self));
  });
}

PyObject* sliced(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("sliced", nargs, 2);
    const RangeList& list = list_of(self);
    const int32_t first = to_int32(args[0]);
    const int32_t last = to_int32(args[1]);
    if (first < 0 || last < first || last > list.num_blocks()) {
      throw UsageError(tagma::message("blocks [", first, ", ", last, ") of a list of ",
                                      list.num_blocks(), " blocks"));
    }
    return new_block_ranges(list.slice(first, last), layout_of(self));
  });
}

PyObject* write_ids(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("write_ids", nargs, 2);
    const RangeList& list = list_of(self);
    const Vector<tagma::BlockId> out(args[0], "out", PyBUF_WRITABLE);
    const int64_t at = to_int64(args[1]);
    if (at < 0 || at > out.size() || list.num_blocks() > out.size() - at) {
      throw UsageError(tagma::message(list.num_blocks(), " block ids at index ", at,
                                      " of a buffer of ", out.size()));
    }
    tagma::BlockId* next = out.data() + at;
    for (const BlockRange& range : list.ranges()) {
      for (int32_t i = 0; i < range.count; ++i) *next++ = range.at(i);
    }
    Py_RETURN_NONE;
  });
}

PyObject* from_ids(PyObject*, PyObject* ids) {
  return guarded([&] {
    return with_ids(ids, [](const tagma::BlockId* values, int64_t count) {
      return new_block_ranges(RangeList::of(values, count));
    });
  });
}

// Pickled by value. What it was looked up as (its layout) stays behind.
PyObject* reduce(PyObject* self, PyObject*) {
  PyObject* pairs = ranges(self, nullptr);
  return pairs == nullptr ? nullptr : Py_BuildValue("(O(N))", g_type, pairs);
}

PyObject* get_num_ranges(PyObject* self, void*) {
  return PyLong_FromLong(list_of(self).num_ranges());
}

PyObject* repr(PyObject* self) {
  PyRef list(ranges(self, nullptr));
  return list ? PyUnicode_FromFormat("BlockRanges(%R)", list.get()) : nullptr;
}

PyObject* compare(PyObject* self, PyObject* other, int op) {
  if ((op != Py_EQ && op != Py_NE) || Py_TYPE(other) != g_type) Py_RETURN_NOTIMPLEMENTED;
  const bool equal = list_of(self).ranges() == list_of(other).ranges();
  return PyBool_FromLong(equal == (op == Py_EQ));
}

PyMethodDef g_methods[] = {
    {"ids", ids, METH_NOARGS,
     "ids() -> list[int]\n\nThe block ids in logical order, a fresh list."},
    {"ranges", ranges, METH_NOARGS,
     "ranges() -> list[tuple[int, int]]\n\n(start, count) of each maximal range, in logical "
     "order."},
    {"truncated", truncated, METH_O,
     "truncated(num_blocks) -> BlockRanges\n\nThe first num_blocks logical blocks."},
    {"sliced", fast(sliced), METH_FASTCALL,
     "sliced(first, last) -> BlockRanges\n\nThe logical blocks [first, last)."},
    {"write_ids", fast(write_ids), METH_FASTCALL,
     "write_ids(out, at)\n\nWrites the block ids to out[at:], a writable int32 buffer."},
    {"from_ids", from_ids, METH_O | METH_STATIC,
     "from_ids(ids) -> BlockRanges\n\nThe ranges that a list of ints or an int32 buffer of block "
     "ids forms."},
    {"__reduce__", reduce, METH_NOARGS, "Pickles the ranges."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef g_getset[] = {
    {"num_ranges", get_num_ranges, nullptr, "Number of maximal ranges.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot g_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(repr)},
    {Py_tp_richcompare, reinterpret_cast<void*>(compare)},
    {Py_tp_hash, reinterpret_cast<void*>(PyObject_HashNotImplemented)},
    {Py_tp_methods, g_methods},
    {Py_tp_getset, g_getset},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_tp_doc, const_cast<char*>("Immutable list of half-open ranges of block ids.")},
    {0, nullptr}};

PyType_Spec g_spec = {"vllm_tagma._native.BlockRanges", sizeof(BlockRangesObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, g_slots};

}  // namespace

namespace tagma::py {

PyObject* new_block_ranges(RangeList&& ranges, int64_t layout) {
  if (ranges.empty()) {
    Py_INCREF(g_empty);
    return g_empty;
  }
  return allocate(std::move(ranges), layout);
}

int64_t layout_of(PyObject* object) { return reinterpret_cast<BlockRangesObject*>(object)->layout; }

const RangeList& ranges_of(PyObject* object) {
  if (Py_TYPE(object) != g_type) {
    PyErr_Format(PyExc_TypeError, "expected BlockRanges, got %R", Py_TYPE(object));
    throw PythonError{};
  }
  return list_of(object);
}

}  // namespace tagma::py

int add_block_ranges(PyObject* module) {
  PyObject* type = add_type(module, &g_spec, "BlockRanges");
  if (type == nullptr) return -1;
  Py_INCREF(type);
  g_type = reinterpret_cast<PyTypeObject*>(type);
  g_empty = guarded([] { return allocate(RangeList()); });
  return g_empty == nullptr ? -1 : 0;
}
