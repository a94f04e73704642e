// The extension module vllm_tagma._native: one file a type, all of them thin.
#include "bindings/block_ranges.hpp"
#include "bindings/py_util.hpp"

int add_block_mover(PyObject* module);
int add_coord_map(PyObject* module);
int add_pool(PyObject* module);
int add_range_table(PyObject* module);

namespace {

PyModuleDef g_module = {PyModuleDef_HEAD_INIT,
                        "_native",
                        "C++17 core of vllm-tagma: KV-cache blocks addressed by range.",
                        -1,
                        nullptr,
                        nullptr,
                        nullptr,
                        nullptr,
                        nullptr};

// What scheduler, workers and kernels must agree on; vllm_tagma/ranges.py says it to Python.
int add_constants(PyObject* module) {
  if (PyModule_AddIntConstant(module, "NULL_BLOCK", tagma::kNullBlock) < 0) return -1;
  if (PyModule_AddIntConstant(module, "PAD_SLOT_ID", static_cast<long>(tagma::kPadSlot)) < 0) {
    return -1;
  }
  if (PyModule_AddStringConstant(module, "__source__", TAGMA_CORE_SOURCE) < 0) return -1;
  return PyModule_AddIntConstant(module, "MAX_RANGES", tagma::kMaxRanges);
}

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject* module = PyModule_Create(&g_module);
  if (module == nullptr) return nullptr;
  if (add_block_ranges(module) < 0 || add_block_mover(module) < 0 || add_coord_map(module) < 0 ||
      add_pool(module) < 0 || add_range_table(module) < 0 || add_constants(module) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
