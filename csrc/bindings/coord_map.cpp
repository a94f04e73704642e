// CoordMap and RegionMap for Python: closed-form coordinates and addresses of the KV cache.
#include <memory>
#include <utility>
#include <vector>

#include "bindings/block_ranges.hpp"
#include "bindings/buffers.hpp"
#include "bindings/py_util.hpp"
#include "tagma/kv_coord_map.hpp"
#include "tagma/kv_region_map.hpp"

int add_coord_map(PyObject* module);

namespace {

using tagma::KvCoord;
using tagma::KvCoordMap;
using tagma::KvRegionMap;
using namespace tagma::py;

struct CoordMapObject {
  PyObject ob_base;
  KvCoordMap* map;
};

const KvCoordMap& map_of(PyObject* self) { return *reinterpret_cast<CoordMapObject*>(self)->map; }

PyObject* construct(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"layers", "blocks", "tokens_per_block", "bytes_per_token",
                                  nullptr};
    long long layers = 0;
    long long blocks = 0;
    long long tokens = 0;
    long long bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLLL:CoordMap", const_cast<char**>(names),
                                     &layers, &blocks, &tokens, &bytes)) {
      throw PythonError{};
    }
    auto map = std::make_unique<KvCoordMap>(layers, blocks, tokens, bytes);
    PyObject* self = checked(PyType_GenericAlloc(type, 0));
    reinterpret_cast<CoordMapObject*>(self)->map = map.release();
    return self;
  });
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<CoordMapObject*>(self)->map;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* tuple_of(const KvCoord& c) {
  return Py_BuildValue("(LLL)", static_cast<long long>(c.layer), static_cast<long long>(c.block),
                       static_cast<long long>(c.token));
}

PyObject* n(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("n", nargs, 3);
    return PyLong_FromLongLong(
        map_of(self).n(to_int64(args[0]), to_int64(args[1]), to_int64(args[2])));
  });
}

PyObject* offset_bytes(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("offset_bytes", nargs, 3);
    return PyLong_FromLongLong(
        map_of(self).offset_bytes(to_int64(args[0]), to_int64(args[1]), to_int64(args[2])));
  });
}

PyObject* coord(PyObject* self, PyObject* arg) {
  return guarded([&] { return tuple_of(map_of(self).coord(to_int64(arg))); });
}

PyObject* coord_of_offset(PyObject* self, PyObject* arg) {
  return guarded([&] { return tuple_of(map_of(self).coord_of_offset(to_int64(arg))); });
}

PyObject* get_size(PyObject* self, void*) { return PyLong_FromLongLong(map_of(self).size()); }
PyObject* get_size_bytes(PyObject* self, void*) {
  return PyLong_FromLongLong(map_of(self).size_bytes());
}

PyMethodDef g_methods[] = {
    {"n", fast(n), METH_FASTCALL, "n(layer, block, token) -> int"},
    {"offset_bytes", fast(offset_bytes), METH_FASTCALL, "offset_bytes(layer, block, token) -> int"},
    {"coord", coord, METH_O, "coord(n) -> (layer, block, token)"},
    {"coord_of_offset", coord_of_offset, METH_O,
     "coord_of_offset(offset_bytes) -> (layer, block, token)"},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef g_getset[] = {{"size", get_size, nullptr, "Tokens in all layers.", nullptr},
                          {"size_bytes", get_size_bytes, nullptr, "Bytes in all layers.", nullptr},
                          {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot g_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, g_methods},
    {Py_tp_getset, g_getset},
    {Py_tp_doc, const_cast<char*>("CoordMap(layers, blocks, tokens_per_block, bytes_per_token)\n\n"
                                  "n = (layer * blocks + block) * tokens_per_block + token")},
    {0, nullptr}};

PyType_Spec g_spec = {"vllm_tagma._native.CoordMap", sizeof(CoordMapObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, g_slots};

// --- RegionMap ----------------------------------------------------------------------------------

struct RegionMapObject {
  PyObject ob_base;
  KvRegionMap* map;
};

const KvRegionMap& regions_of(PyObject* self) {
  return *reinterpret_cast<RegionMapObject*>(self)->map;
}

PyObject* construct_regions(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"regions", nullptr};
    PyObject* list = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:RegionMap", const_cast<char**>(names),
                                     &list)) {
      throw PythonError{};
    }
    std::vector<tagma::KvRegion> regions;
    PyRef iterator(checked(PyObject_GetIter(list)));
    while (PyRef item = PyRef(PyIter_Next(iterator.get()))) {
      long long address = 0;
      long long blocks = 0;
      long long bytes = 0;
      PyRef tuple(checked(PySequence_Tuple(item.get())));
      if (!PyArg_ParseTuple(tuple.get(), "LLL:RegionMap", &address, &blocks, &bytes)) {
        throw PythonError{};
      }
      regions.push_back({address, blocks, bytes});
    }
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    auto map = std::make_unique<KvRegionMap>(std::move(regions));
    PyObject* self = checked(PyType_GenericAlloc(type, 0));
    reinterpret_cast<RegionMapObject*>(self)->map = map.release();
    return self;
  });
}

void dealloc_regions(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<RegionMapObject*>(self)->map;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* address(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("address", nargs, 2);
    return PyLong_FromLongLong(regions_of(self).address(to_int32(args[0]), to_int64(args[1])));
  });
}

PyObject* locate(PyObject* self, PyObject* arg) {
  return guarded([&] {
    const tagma::KvPlace place = regions_of(self).locate(to_int64(arg));
    return Py_BuildValue("(iLL)", place.region, static_cast<long long>(place.block),
                         static_cast<long long>(place.byte));
  });
}

PyObject* spans(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    const std::vector<tagma::KvSpan> all = regions_of(self).spans(ranges_of(arg));
    PyRef out(checked(PyList_New(static_cast<Py_ssize_t>(all.size()))));
    for (size_t i = 0; i < all.size(); ++i) {
      PyObject* span = Py_BuildValue("(iLL)", all[i].region, static_cast<long long>(all[i].address),
                                     static_cast<long long>(all[i].bytes));
      if (PyList_SetItem(out.get(), static_cast<Py_ssize_t>(i), checked(span)) < 0) {
        throw PythonError{};
      }
    }
    return out.release();
  });
}

PyObject* write_descriptors(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("write_descriptors", nargs, 4);
    const KvRegionMap& map = regions_of(self);
    const Vector<int64_t> starts(args[0], "starts");
    const Vector<int64_t> counts(args[1], "counts");
    const int64_t device = to_int64(args[2]);
    const Vector<int64_t> out(args[3], "out", PyBUF_WRITABLE);
    if (counts.size() != starts.size()) {
      throw tagma::UsageError(
          tagma::message(starts.size(), " starts and ", counts.size(), " counts"));
    }
    const int64_t needed = int64_t{3} * map.num_regions() * starts.size();
    if (out.size() != needed) {
      throw tagma::UsageError(tagma::message("out holds ", out.size(), " numbers, ", starts.size(),
                                             " runs in ", map.num_regions(), " regions are ",
                                             needed));
    }
    map.write_descriptors(starts.data(), counts.data(), starts.size(), device, out.data());
    Py_RETURN_NONE;
  });
}

Py_ssize_t num_regions(PyObject* self) { return regions_of(self).num_regions(); }

PyMethodDef g_region_methods[] = {
    {"address", fast(address), METH_FASTCALL, "address(region, block) -> int"},
    {"locate", locate, METH_O, "locate(address) -> (region, block, byte in the block)"},
    {"spans", spans, METH_O,
     "spans(block_ranges) -> list[(region, address, bytes)]\n\nRegion by region, one span for each"
     " range; null blocks have none."},
    {"write_descriptors", fast(write_descriptors), METH_FASTCALL,
     "write_descriptors(starts, counts, device, out)\n\nint64 buffers; out takes (address, bytes,"
     " device) of each run in each region, region by region."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot g_region_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct_regions)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_regions)},
    {Py_tp_methods, g_region_methods},
    {Py_sq_length, reinterpret_cast<void*>(num_regions)},
    {Py_tp_doc,
     const_cast<char*>("RegionMap([(address, blocks, bytes_per_block), ...])\n\n"
                       "address(region, block) = region.address + block * bytes_per_block")},
    {0, nullptr}};

PyType_Spec g_region_spec = {"vllm_tagma._native.RegionMap", sizeof(RegionMapObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, g_region_slots};

}  // namespace

int add_coord_map(PyObject* module) {
  if (add_type(module, &g_spec, "CoordMap") == nullptr) return -1;
  return add_type(module, &g_region_spec, "RegionMap") == nullptr ? -1 : 0;
}
