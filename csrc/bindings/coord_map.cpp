// CoordMap for Python: closed-form coordinates of the KV cache.
#include <memory>

#include "bindings/py_util.hpp"
#include "tagma/kv_coord_map.hpp"

int add_coord_map(PyObject* module);

namespace {

using tagma::KvCoord;
using tagma::KvCoordMap;
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

}  // namespace

int add_coord_map(PyObject* module) {
  return add_type(module, &g_spec, "CoordMap") == nullptr ? -1 : 0;
}
