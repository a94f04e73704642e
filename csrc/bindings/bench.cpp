// The extension module vllm_tagma.lab._bench: the native benchmarks for Python. `tagma bench host`
// runs rounds of them by name, so that no Python call is inside the clock. A module of its own, so
// that what serving loads contains no benchmark.
#include <cstring>

#include "bench/registry.hpp"
#include "bindings/py_util.hpp"

namespace {

using tagma::UsageError;
using tagma::bench::Benchmark;
using tagma::bench::Round;
using namespace tagma::py;

PyObject* bench_names(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    PyRef out(checked(PyList_New(0)));
    for (const Benchmark& benchmark : tagma::bench::benchmarks()) {
      PyRef name(checked(PyUnicode_FromString(benchmark.name)));
      if (PyList_Append(out.get(), name.get()) < 0) throw PythonError{};
    }
    return out.release();
  });
}

PyObject* result_of(const Round& round) {
  PyRef counters(checked(PyDict_New()));
  for (const auto& [name, value] : round.counters()) {
    PyRef number(checked(PyLong_FromLongLong(value)));
    if (PyDict_SetItemString(counters.get(), name.c_str(), number.get()) < 0) throw PythonError{};
  }
  return checked(Py_BuildValue("(LO)", static_cast<long long>(round.ns()), counters.get()));
}

PyObject* bench(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("bench", nargs, 2);
    Py_ssize_t length = 0;
    const char* wanted = PyUnicode_AsUTF8AndSize(args[0], &length);
    if (wanted == nullptr) throw PythonError{};
    const int64_t iterations = to_int64(args[1]);
    if (iterations < 1) {
      throw UsageError(tagma::message("iterations=", iterations, " is below 1"));
    }
    for (const Benchmark& benchmark : tagma::bench::benchmarks()) {
      if (std::strcmp(benchmark.name, wanted) != 0) continue;
      Round round(iterations);
      benchmark.run(round);
      return result_of(round);
    }
    throw UsageError(tagma::message("no benchmark is named '", wanted, "'; see bench_names()"));
  });
}

PyMethodDef g_functions[] = {
    {"bench_names", bench_names, METH_NOARGS, "bench_names() -> list[str]"},
    {"bench", fast(bench), METH_FASTCALL,
     "bench(name, iterations) -> (ns, counters)\n\nOne round: set-up, one warm-up call, then "
     "`iterations` calls on the clock. ns is their sum."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef g_module = {PyModuleDef_HEAD_INIT,
                        "_bench",
                        "The native benchmarks of vllm-tagma.",
                        -1,
                        g_functions,
                        nullptr,
                        nullptr,
                        nullptr,
                        nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__bench() { return PyModule_Create(&g_module); }
