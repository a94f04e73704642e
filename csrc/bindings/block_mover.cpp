// BlockMover and the plans of its kind: copies come as a sequence of (source, destination) pairs.
#include "tagma/block_mover.hpp"

#include <memory>
#include <utility>
#include <vector>

#include "bindings/py_util.hpp"

using tagma::BlockCopy;
using tagma::BlockMover;
using tagma::MovePlanner;
using tagma::UsageError;
using namespace tagma::py;

namespace {

// Lists of tuples (or of named tuples, as vLLM has them) take the short way.
std::vector<BlockCopy> copies_of(PyObject* pairs) {
  const PyRef fast_pairs(PyList_Check(pairs) ? Py_NewRef(pairs) : checked(PySequence_List(pairs)));
  std::vector<BlockCopy> out;
  const Py_ssize_t count = PyList_Size(fast_pairs.get());
  out.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const PyRef pair(Py_NewRef(checked(PyList_GetItem(fast_pairs.get(), i))));
    const PyRef tuple(PyTuple_Check(pair.get()) ? Py_NewRef(pair.get())
                                                : checked(PySequence_Tuple(pair.get())));
    if (PyTuple_Size(tuple.get()) != 2) {
      throw UsageError(tagma::message("a copy has ", PyTuple_Size(tuple.get()),
                                      " numbers, not a source and a destination"));
    }
    out.push_back({to_int32(checked(PyTuple_GetItem(tuple.get(), 0))),
                   to_int32(checked(PyTuple_GetItem(tuple.get(), 1)))});
  }
  return out;
}

// --- BlockMover ---------------------------------------------------------------------------------

struct MoverObject {
  PyObject ob_base;
  BlockMover* mover;
};

// Python's lock is not held while this lives.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

BlockMover& mover_of(PyObject* self) { return *reinterpret_cast<MoverObject*>(self)->mover; }

PyObject* construct_mover(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* const names[] = {"num_blocks", "regions", nullptr};
    int num_blocks = 0;
    PyObject* list = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO:BlockMover", const_cast<char**>(names),
                                     &num_blocks, &list)) {
      throw PythonError{};
    }
    std::vector<tagma::MoverRegion> regions;
    const PyRef iterator(checked(PyObject_GetIter(list)));
    while (const PyRef item = PyRef(PyIter_Next(iterator.get()))) {
      long long address = 0;
      long long stride = 0;
      long long bytes = 0;
      const PyRef tuple(checked(PySequence_Tuple(item.get())));
      if (!PyArg_ParseTuple(tuple.get(), "LLL:BlockMover", &address, &stride, &bytes)) {
        throw PythonError{};
      }
      regions.push_back({address, stride, bytes});
    }
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    auto mover = std::make_unique<BlockMover>(num_blocks, std::move(regions));
    PyObject* self = checked(PyType_GenericAlloc(type, 0));
    reinterpret_cast<MoverObject*>(self)->mover = mover.release();
    return self;
  });
}

void dealloc_mover(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<MoverObject*>(self)->mover;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* move(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("move", nargs, 2);
    BlockMover& mover = mover_of(self);
    const int32_t threads = to_int32(args[1]);
    if (threads < 1) throw UsageError(tagma::message("threads=", threads, " must be 1 or more"));
    const tagma::MovePlan plan = mover.plan(copies_of(args[0]));
    {
      const Unlocked unlocked;
      mover.run(plan, threads);
    }
    return PyLong_FromSize_t(plan.steps.size());
  });
}

PyObject* steps(PyObject* self, PyObject* pairs) {
  return guarded([&]() -> PyObject* {
    const tagma::MovePlan plan = mover_of(self).plan(copies_of(pairs));
    PyRef out(checked(PyList_New(0)));
    for (const tagma::MoveStep& step : plan.steps) {
      const PyRef nodes(checked(PyTuple_New(step.num_nodes)));
      for (int32_t i = 0; i < step.num_nodes; ++i) {
        const auto at = static_cast<size_t>(step.first_node + i);
        PyObject* node = checked(PyLong_FromLong(plan.nodes[at]));
        if (PyTuple_SetItem(nodes.get(), i, node) != 0) throw PythonError{};
      }
      const PyRef item(checked(
          Py_BuildValue("(OiO)", nodes.get(), step.count, step.closed ? Py_True : Py_False)));
      if (PyList_Append(out.get(), item.get()) != 0) throw PythonError{};
    }
    return out.release();
  });
}

PyMethodDef g_mover_methods[] = {
    {"move", fast(move), METH_FASTCALL,
     "move(copies, threads) -> int\n\nMakes (source, destination) copies as if all sources were "
     "read first, without Python's lock; returns the steps that it took."},
    {"steps", steps, METH_O,
     "steps(copies) -> list[(nodes, count, closed)]\n\nThe plan of move(): nodes[0] takes what "
     "nodes[1] holds and so on, `count` blocks each; if closed, the last takes nodes[0]'s."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot g_mover_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct_mover)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_mover)},
    {Py_tp_methods, g_mover_methods},
    {Py_tp_doc, const_cast<char*>("BlockMover(num_blocks, [(address, stride, bytes), ...])\n\n"
                                  "Copies blocks of host memory in place. The caller vouches for "
                                  "the memory.")},
    {0, nullptr}};

PyType_Spec g_mover_spec = {"vllm_tagma._native.BlockMover", sizeof(MoverObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, g_mover_slots};

// --- MovePlanner --------------------------------------------------------------------------------

struct PlannerObject {
  PyObject ob_base;
  MovePlanner* planner;
};

PyObject* construct_planner(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* const names[] = {"num_blocks", nullptr};
    int num_blocks = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i:MovePlanner", const_cast<char**>(names),
                                     &num_blocks)) {
      throw PythonError{};
    }
    auto planner = std::make_unique<MovePlanner>(num_blocks);
    PyObject* self = checked(PyType_GenericAlloc(type, 0));
    reinterpret_cast<PlannerObject*>(self)->planner = planner.release();
    return self;
  });
}

void dealloc_planner(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PlannerObject*>(self)->planner;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* segments(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("segments", nargs, 2);
    MovePlanner& planner = *reinterpret_cast<PlannerObject*>(self)->planner;
    const tagma::SegmentPlan plan = planner.plan_segments(copies_of(args[0]), to_int32(args[1]));
    std::vector<int32_t> out;
    out.reserve(3 * plan.segments.size() + 2 * plan.copies.size());
    for (const tagma::MoveSegment& segment : plan.segments) {
      out.insert(out.end(), {segment.first, segment.end, segment.kind});
    }
    for (const BlockCopy& copy : plan.copies) out.push_back(copy.from);
    for (const BlockCopy& copy : plan.copies) out.push_back(copy.to);
    const PyRef packed(
        checked(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(out.data()),
                                          static_cast<Py_ssize_t>(out.size() * sizeof(int32_t)))));
    return Py_BuildValue("(nnO)", static_cast<Py_ssize_t>(plan.segments.size()),
                         static_cast<Py_ssize_t>(plan.copies.size()), packed.get());
  });
}

PyMethodDef g_planner_methods[] = {
    {"segments", fast(segments), METH_FASTCALL,
     "segments(copies, batch) -> (num_segments, num_copies, packed)\n\npacked, int32: (first, end, "
     "kind) of each segment, all sources, all destinations; kernels/block_moves.py reads them."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot g_planner_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct_planner)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_planner)},
    {Py_tp_methods, g_planner_methods},
    {Py_tp_doc, const_cast<char*>("MovePlanner(num_blocks)\n\nOrders block copies for a device.")},
    {0, nullptr}};

PyType_Spec g_planner_spec = {"vllm_tagma._native.MovePlanner", sizeof(PlannerObject), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, g_planner_slots};

}  // namespace

int add_block_mover(PyObject* module) {
  const PyRef scratch(PyLong_FromLongLong(BlockMover::kScratch));
  if (!scratch || PyModule_AddObjectRef(module, "MOVER_SCRATCH", scratch.get()) < 0) return -1;
  if (add_type(module, &g_mover_spec, "BlockMover") == nullptr) return -1;
  return add_type(module, &g_planner_spec, "MovePlanner") == nullptr ? -1 : 0;
}
