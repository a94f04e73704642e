// Pool for Python: construction, steps, moves and counters; the calls for requests are in
// pool_requests.cpp. Nothing per block is created except the id lists that vLLM wants.
#include <algorithm>
#include <memory>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/pool_object.hpp"

int add_pool(PyObject* module);

namespace {

using tagma::KvPool;
using tagma::UsageError;
using namespace tagma::py;

tagma::Compaction compaction_of(const char* name) {
  const std::string_view mode(name);
  if (mode == "off") return tagma::Compaction::kOff;
  if (mode == "idle") return tagma::Compaction::kIdle;
  if (mode == "live") return tagma::Compaction::kLive;
  throw UsageError(tagma::message("compaction='", name, "' is none of off, idle, live"));
}

tagma::GroupKind kind_of(const char* name) {
  const std::string_view kind(name);
  if (kind == "prefix") return tagma::GroupKind::kPrefix;
  if (kind == "window") return tagma::GroupKind::kWindow;
  if (kind == "state") return tagma::GroupKind::kState;
  if (kind == "chunk") return tagma::GroupKind::kChunk;
  throw UsageError(
      tagma::message("group kind '", name, "' is none of prefix, window, state, chunk"));
}

// Reads (kind, window_blocks, align_blocks) of each group.
std::vector<tagma::GroupSpec> groups_of(PyObject* list) {
  std::vector<tagma::GroupSpec> out;
  PyRef iterator(checked(PyObject_GetIter(list)));
  while (PyRef item = PyRef(PyIter_Next(iterator.get()))) {
    const char* kind = nullptr;
    tagma::GroupSpec spec;
    PyRef tuple(checked(PySequence_Tuple(item.get())));
    if (!PyArg_ParseTuple(tuple.get(), "sii:GroupSpec", &kind, &spec.window_blocks,
                          &spec.align_blocks)) {
      throw PythonError{};
    }
    spec.kind = kind_of(kind);
    out.push_back(spec);
  }
  if (PyErr_Occurred() != nullptr) throw PythonError{};
  return out;
}

PyObject* construct(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"num_blocks", "alignment",   "max_ranges", "record_evictions",
                                  "compaction", "copy_budget", "slack",      "most_slack",
                                  "groups",     nullptr};
    tagma::PoolOptions options;
    int record = 0;
    const char* compaction = "off";
    PyObject* groups = nullptr;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|$iipsiiiO:Pool", const_cast<char**>(names),
                                     &options.num_blocks, &options.alignment, &options.max_ranges,
                                     &record, &compaction, &options.copy_budget,
                                     &options.policy.slack, &options.policy.most_slack, &groups)) {
      throw PythonError{};
    }
    options.record_evictions = record != 0;
    options.compaction = compaction_of(compaction);
    if (groups != nullptr) options.groups = groups_of(groups);
    options.seed = (uint64_t{std::random_device{}()} << 32) | std::random_device{}();
    auto state = std::make_unique<PoolState>(options);
    PyObject* self = checked(PyType_GenericAlloc(type, 0));
    reinterpret_cast<PoolObject*>(self)->state = state.release();
    return self;
  });
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PoolObject*>(self)->state;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* begin_step(PyObject* self, PyObject*) {
  pool_of(self).begin_step();
  Py_RETURN_NONE;
}

PyObject* end_scheduling(PyObject* self, PyObject*) {
  pool_of(self).end_scheduling();
  Py_RETURN_NONE;
}

PyObject* evict(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    std::vector<tagma::BlockId> blocks;
    PyRef iterator(checked(PyObject_GetIter(arg)));
    while (PyRef item = PyRef(PyIter_Next(iterator.get()))) blocks.push_back(to_int32(item.get()));
    if (PyErr_Occurred() != nullptr) throw PythonError{};
    pool_of(self).evict(blocks);
    Py_RETURN_NONE;
  });
}

PyObject* reset(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(pool_of(self).reset() ? 1 : 0); });
}

PyObject* take_evicted(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const std::vector<tagma::EvictedBlock> evicted = pool_of(self).take_evicted();
    PyRef out(checked(PyList_New(static_cast<Py_ssize_t>(evicted.size()))));
    for (size_t i = 0; i < evicted.size(); ++i) {
      PyObject* pair =
          Py_BuildValue("(iiy#)", evicted[i].block, evicted[i].group, evicted[i].key.data(),
                        static_cast<Py_ssize_t>(evicted[i].key.size()));
      if (PyList_SetItem(out.get(), static_cast<Py_ssize_t>(i), checked(pair)) < 0) {
        throw PythonError{};
      }
    }
    return out.release();
  });
}

PyObject* take_copies(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const std::vector<tagma::BlockCopy> copies = pool_of(self).take_copies();
    PyRef out(checked(PyList_New(static_cast<Py_ssize_t>(copies.size()))));
    for (size_t i = 0; i < copies.size(); ++i) {
      PyObject* pair = Py_BuildValue("(ii)", copies[i].from, copies[i].to);
      if (PyList_SetItem(out.get(), static_cast<Py_ssize_t>(i), checked(pair)) < 0) {
        throw PythonError{};
      }
    }
    return out.release();
  });
}

PyObject* take_row_updates(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    std::vector<tagma::RowChange> changes = pool_of(self).take_row_changes();
    PyRef out(checked(PyList_New(static_cast<Py_ssize_t>(changes.size()))));
    for (size_t i = 0; i < changes.size(); ++i) {
      tagma::RowChange& change = changes[i];
      PyRef blocks(new_block_ranges(std::move(change.blocks)));
      PyObject* update = Py_BuildValue("(LiiO)", static_cast<long long>(change.row), change.group,
                                       change.first_block, blocks.get());
      if (PyList_SetItem(out.get(), static_cast<Py_ssize_t>(i), checked(update)) < 0) {
        throw PythonError{};
      }
    }
    return out.release();
  });
}

PyObject* take_relocations(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyRef out(checked(PyList_New(0)));
    for (const tagma::BlockCopy& move : pool_of(self).take_relocations()) {
      PyRef pair(checked(Py_BuildValue("(ii)", move.from, move.to)));
      if (PyList_Append(out.get(), pair.get()) < 0) throw PythonError{};
    }
    return out.release();
  });
}

PyObject* parts(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    PyRef out(checked(PyList_New(0)));
    for (const tagma::PartCount& part : pool_of(self).parts(to_int32(arg))) {
      PyRef pair(checked(Py_BuildValue("(ii)", part.live, part.idle)));
      if (PyList_Append(out.get(), pair.get()) < 0) throw PythonError{};
    }
    return out.release();
  });
}

PyObject* request_refs(PyObject* self, PyObject* arg) {
  return guarded(
      [&] { return PyLong_FromLong(pool_of(self).allocator().request_refs(to_int32(arg))); });
}

PyObject* is_cached(PyObject* self, PyObject* arg) {
  return guarded(
      [&] { return PyBool_FromLong(pool_of(self).allocator().is_cached(to_int32(arg)) ? 1 : 0); });
}

PyObject* block_hash(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    const KvPool& pool = pool_of(self);
    const tagma::BlockId block = to_int32(arg);
    if (!pool.allocator().is_cached(block)) Py_RETURN_NONE;
    const tagma::PrefixIndex& index = pool.index();
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(index.key(block)),
                                     static_cast<Py_ssize_t>(index.key_bytes()));
  });
}

PyObject* holes(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyRef out(checked(PyList_New(0)));
    pool_of(self).allocator().holes().visit_by_address([&](tagma::BlockRange hole) {
      PyRef pair(checked(Py_BuildValue("(ii)", hole.start, hole.count)));
      if (PyList_Append(out.get(), pair.get()) < 0) throw PythonError{};
    });
    return out.release();
  });
}

PyObject* stats(PyObject* self, PyObject*) {
  return guarded([&] {
    const KvPool& pool = pool_of(self);
    const tagma::KvAllocator& allocator = pool.allocator();
    const tagma::RowRanges rows = pool.row_ranges();
    return Py_BuildValue(
        "{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:L,s:i,s:i,s:i,s:i,s:i,s:i,s:L,s:L,s:L,s:L,s:L,s:n}",
        "capacity_blocks", allocator.capacity(),                             //
        "free_blocks", allocator.num_free(),                                 //
        "live_blocks", allocator.num_live(),                                 //
        "idle_blocks", allocator.num_idle(),                                 //
        "cached_blocks", allocator.num_cached(),                             //
        "hole_blocks", allocator.holes().num_blocks(),                       //
        "holes", allocator.holes().num_holes(),                              //
        "largest_hole_blocks", allocator.holes().largest().count,            //
        "rows", pool.num_rows(),                                             //
        "row_ranges", static_cast<long long>(rows.total),                    //
        "max_row_ranges", rows.longest,                                      //
        "one_range_rows", rows.single,                                       //
        "pins", pool.pins().size(),                                          //
        "pinned_blocks", pool.pins().num_blocks(),                           //
        "headroom_blocks", pool.headroom_blocks(),                           //
        "slack_blocks", allocator.slack(),                                   //
        "evictions", static_cast<long long>(pool.num_evictions()),           //
        "moved_blocks", static_cast<long long>(pool.num_moved()),            //
        "moved_live_blocks", static_cast<long long>(pool.num_moved_live()),  //
        "cap_evictions", static_cast<long long>(pool.num_cap_evictions()),   //
        "cap_refusals", static_cast<long long>(pool.num_cap_refusals()),     //
        "memory_bytes", static_cast<Py_ssize_t>(pool.memory_bytes()));
  });
}

PyObject* check_invariants(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    pool_of(self).check_invariants();
    Py_RETURN_NONE;
  });
}

PyObject* get_num_free(PyObject* self, void*) {
  return PyLong_FromLong(pool_of(self).allocator().num_free());
}
PyObject* get_capacity(PyObject* self, void*) {
  return PyLong_FromLong(pool_of(self).allocator().capacity());
}
PyObject* get_num_blocks(PyObject* self, void*) {
  return PyLong_FromLong(pool_of(self).allocator().num_blocks());
}

PyMethodDef g_methods[] = {
    {"begin_step", begin_step, METH_NOARGS, "A scheduler step begins."},
    {"end_scheduling", end_scheduling, METH_NOARGS,
     "The scheduler has decided: rows freed from here on were not preempted in this step."},
    {"lookup", fast(pool_lookup), METH_FASTCALL,
     "lookup(block_hashes, max_blocks, group=0) -> BlockRanges\n\nWhat the cache has of a prompt, "
     "by "
     "the kind of the group; no side effect."},
    {"admit", fast(pool_admit), METH_FASTCALL,
     "admit(watermark, reserved, *(hit, blocks, gate, prompt, limit, skip, publish, block_hashes))"
     " -> (row, (added, ...)) | None\n\nThe last eight once for each group."},
    {"grow", fast(pool_grow), METH_FASTCALL,
     "grow(row, watermark, reserved, *(blocks, gate, prompt, limit, skip, publish, block_hashes))"
     " -> (added, ...) | None\n\nThe last seven once for each group."},
    {"publish", fast(pool_publish), METH_FASTCALL,
     "publish(row, blocks, block_hashes, group=0) -> None"},
    {"pass_over", fast(pool_pass_over), METH_FASTCALL,
     "pass_over(row, blocks, group=0): the leading blocks count as published, uncached as they "
     "are"},
    {"skip", fast(pool_skip), METH_FASTCALL,
     "skip(row, blocks, group=0) -> None\n\nThe leading blocks of a row become null blocks."},
    {"hold", pool_hold, METH_O, "hold(row) -> None\n\nIts blocks do not move in this step."},
    {"free", pool_free, METH_O, "free(row) -> None"},
    {"row_blocks", fast(pool_row_blocks), METH_FASTCALL, "row_blocks(row, group=0) -> BlockRanges"},
    {"num_published", fast(pool_num_published), METH_FASTCALL,
     "num_published(row, group=0) -> int"},
    {"pin", fast(pool_pin), METH_FASTCALL,
     "pin(row, first, last, group=0) -> int\n\nHolds the logical blocks [first, last) where they "
     "are"
     " until unpin(): neither moved nor evicted nor handed out."},
    {"pin_blocks", pool_pin_blocks, METH_O,
     "pin_blocks(block_ranges) -> int\n\npin() for live or cached blocks."},
    {"unpin", pool_unpin, METH_O, "unpin(pin) -> None"},
    {"evict", evict, METH_O, "evict(block_ids) -> None\n\nWithdraws blocks from the cache."},
    {"reset", reset, METH_NOARGS, "reset() -> bool\n\nEmpties the cache if nothing is live."},
    {"take_evicted", take_evicted, METH_NOARGS, "take_evicted() -> list[(block_id, group, hash)]"},
    {"take_copies", take_copies, METH_NOARGS,
     "take_copies() -> list[(from, to)]\n\nBlock copies that the worker must make before it writes"
     " anything, all sources read before any destination is written."},
    {"take_row_updates", take_row_updates, METH_NOARGS,
     "take_row_updates() -> list[(row, group, first_block, BlockRanges)]\n\nRows that were"
     " admitted, grew or moved since the last call, from first_block to their end."},
    {"take_relocations", take_relocations, METH_NOARGS,
     "take_relocations() -> list[(from, to)] of all moves in order, if record_evictions is set"},
    {"relocate", fast(pool_relocate), METH_FASTCALL,
     "relocate(row, first, last, group=0) -> bool\n\nMoves the logical blocks [first, last) of a "
     "row"
     " elsewhere, as compaction would; False if they are shared, not one range, or have no room."},
    {"parts", parts, METH_O,
     "parts(n) -> list[(live, idle)]\n\nBlocks by state in each n-th of the pool, by address."
     " O(num_blocks)."},
    {"request_refs", request_refs, METH_O, "request_refs(block_id) -> int"},
    {"is_cached", is_cached, METH_O, "is_cached(block_id) -> bool"},
    {"block_hash", block_hash, METH_O,
     "block_hash(block_id) -> bytes | None\n\nThe hash that a cached block was published under."},
    {"holes", holes, METH_NOARGS, "holes() -> list[(start, count)] in address order"},
    {"stats", stats, METH_NOARGS, "stats() -> dict[str, int]"},
    {"check_invariants", check_invariants, METH_NOARGS,
     "check_invariants() -> None\n\nRaises RuntimeError naming the broken law. O(num_blocks)."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef g_getset[] = {
    {"num_free", get_num_free, nullptr, "Blocks in holes and idle cached blocks.", nullptr},
    {"capacity", get_capacity, nullptr, "Blocks that can be allocated.", nullptr},
    {"num_blocks", get_num_blocks, nullptr, "Block ids, the null block included.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot g_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(construct)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, g_methods},
    {Py_tp_getset, g_getset},
    {Py_tp_doc,
     const_cast<char*>(
         "Pool(num_blocks, *, alignment=1, max_ranges=256, "
         "record_evictions=False, compaction='off', copy_budget=0, slack=0, most_slack=0, "
         "groups=[('prefix', 1, 1)])")},
    {0, nullptr}};

PyType_Spec g_spec = {"vllm_tagma._native.Pool", sizeof(PoolObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, g_slots};

}  // namespace

int add_pool(PyObject* module) { return add_type(module, &g_spec, "Pool") == nullptr ? -1 : 0; }
