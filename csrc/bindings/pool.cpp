// Pool for Python: one call for each call that vLLM's scheduler makes to its KV-cache manager.
//
// Block hashes are read in place from the request's own list of bytes objects; nothing per block is
// created except the id lists that vLLM wants.
#include <algorithm>
#include <memory>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/block_ranges.hpp"
#include "bindings/py_util.hpp"
#include "tagma/kv_pool.hpp"

int add_pool(PyObject* module);

namespace {

using tagma::Demand;
using tagma::KvPool;
using tagma::RangeList;
using tagma::RowHandle;
using tagma::UsageError;
using namespace tagma::py;

struct PoolObject {
  PyObject ob_base;
  KvPool* pool;
  std::vector<const uint8_t*>* keys;  // scratch of Publication, kept for its memory
  size_t key_bytes;                   // of this pool's block hashes; 0 until the first is seen
};

KvPool& pool_of(PyObject* self) { return *reinterpret_cast<PoolObject*>(self)->pool; }

// Reads block hashes from a list of bytes. The list must not change during the call (the GIL is
// held throughout).
class Hashes {
 public:
  Hashes(PyObject* self, PyObject* list)
      : owner_(reinterpret_cast<PoolObject*>(self)), list_(list) {
    if (!PyList_Check(list)) {
      PyErr_Format(PyExc_TypeError, "block hashes must be a list of bytes, got %R", Py_TYPE(list));
      throw PythonError{};
    }
    size_ = PyList_Size(list);
  }

  int32_t size() const {
    return static_cast<int32_t>(std::min<Py_ssize_t>(size_, std::numeric_limits<int32_t>::max()));
  }

  const uint8_t* operator()(int32_t i) const {
    char* bytes = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(checked(PyList_GetItem(list_, i)), &bytes, &length) < 0) {
      throw PythonError{};
    }
    if (length == 0 || static_cast<size_t>(length) != owner_->key_bytes) {
      owner_->pool->set_key_bytes(static_cast<size_t>(length));  // throws unless it is the first
      owner_->key_bytes = static_cast<size_t>(length);
    }
    return reinterpret_cast<const uint8_t*>(bytes);
  }

 private:
  PoolObject* owner_;
  PyObject* list_;
  Py_ssize_t size_;
};

Demand demand_of(PyObject* const* args) {
  Demand demand;
  demand.blocks = to_int32(args[0]);
  demand.gate = to_int32(args[1]);
  demand.watermark = to_int32(args[2]);
  demand.reserved = to_int32(args[3]);
  demand.prompt = to_int32(args[4]);
  demand.limit = to_int32(args[5]);
  return demand;
}

// The block hashes that a call will publish, read and checked while nothing has changed yet: the
// hashes [published, blocks) of a row that will hold `row_blocks` blocks.
class Publication {
 public:
  Publication(PyObject* self, int32_t published, int32_t row_blocks, PyObject* blocks,
              PyObject* hashes)
      : pool_(pool_of(self)), first_(published), last_(to_int32(blocks)) {
    if (last_ <= 0) return;
    const Hashes keys(self, hashes);
    last_ = std::min(last_, keys.size());
    if (last_ <= first_) return;
    if (last_ > row_blocks) {
      throw UsageError(tagma::message("publish ", last_, " blocks of a row of ", row_blocks));
    }
    std::vector<const uint8_t*>& scratch = *reinterpret_cast<PoolObject*>(self)->keys;
    scratch.clear();
    scratch.reserve(static_cast<size_t>(last_ - first_));
    for (int32_t i = first_; i < last_; ++i) scratch.push_back(keys(i));
    keys_ = scratch.data();
  }

  void apply(RowHandle row) const {
    if (keys_ == nullptr) return;
    pool_.publish(row, last_, [this](int32_t i) { return keys_[i - first_]; });
  }

 private:
  KvPool& pool_;
  int32_t first_;
  int32_t last_;
  const uint8_t* const* keys_ = nullptr;
};

tagma::Compaction compaction_of(const char* name) {
  const std::string_view mode(name);
  if (mode == "off") return tagma::Compaction::kOff;
  if (mode == "idle") return tagma::Compaction::kIdle;
  if (mode == "live") return tagma::Compaction::kLive;
  throw UsageError(tagma::message("compaction='", name, "' is none of off, idle, live"));
}

// Blocks may have moved between a look-up and the admission that uses it; then the ids of the hit
// may be somebody else's by now, and only the hashes can tell.
void require_current(PyObject* self, PyObject* hit, PyObject* hashes) {
  const KvPool& pool = pool_of(self);
  const RangeList& blocks = ranges_of(hit);
  if (blocks.empty() || !pool.can_move() || layout_of(hit) == pool.num_moved()) return;
  const Hashes keys(self, hashes);
  if (keys.size() < blocks.num_blocks()) {
    throw UsageError(tagma::message("a hit of ", blocks.num_blocks(), " blocks for ", keys.size(),
                                    " block hashes"));
  }
  int32_t i = 0;
  for (const tagma::BlockRange& range : blocks.ranges()) {
    for (tagma::BlockId b = range.start; b < range.end(); ++b, ++i) {
      if (!pool.is_published_as(b, keys(i))) {
        throw UsageError(
            tagma::message("block ", b, " has moved: a stale prefix hit; look it up again"));
      }
    }
  }
}

PyObject* construct(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  return guarded([&]() -> PyObject* {
    static const char* names[] = {"num_blocks", "alignment",   "max_ranges", "record_evictions",
                                  "compaction", "copy_budget", "slack",      nullptr};
    tagma::PoolOptions options;
    int record = 0;
    const char* compaction = "off";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|$iipsii:Pool", const_cast<char**>(names),
                                     &options.num_blocks, &options.alignment, &options.max_ranges,
                                     &record, &compaction, &options.copy_budget, &options.slack)) {
      throw PythonError{};
    }
    options.record_evictions = record != 0;
    options.compaction = compaction_of(compaction);
    options.seed = (uint64_t{std::random_device{}()} << 32) | std::random_device{}();
    auto pool = std::make_unique<KvPool>(options);
    auto keys = std::make_unique<std::vector<const uint8_t*>>();
    PyObject* self = checked(PyType_GenericAlloc(type, 0));
    reinterpret_cast<PoolObject*>(self)->pool = pool.release();
    reinterpret_cast<PoolObject*>(self)->keys = keys.release();
    return self;
  });
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PoolObject*>(self)->pool;
  delete reinterpret_cast<PoolObject*>(self)->keys;
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

PyObject* lookup(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("lookup", nargs, 2);
    const Hashes keys(self, args[0]);
    const int32_t max_blocks = std::min(to_int32(args[1]), keys.size());
    return new_block_ranges(pool_of(self).lookup(keys, max_blocks), pool_of(self).num_moved());
  });
}

PyObject* admit(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("admit", nargs, 9);
    const RangeList& hit = ranges_of(args[0]);
    const Demand demand = demand_of(args + 1);
    const Publication publication(self, hit.num_blocks(), std::max(hit.num_blocks(), demand.blocks),
                                  args[7], args[8]);
    require_current(self, args[0], args[8]);
    RangeList added;
    const RowHandle row = pool_of(self).admit(hit, demand, added);
    if (row == 0) Py_RETURN_NONE;
    try {
      publication.apply(row);
      PyRef blocks(new_block_ranges(std::move(added)));
      return checked(Py_BuildValue("(LO)", static_cast<long long>(row), blocks.get()));
    } catch (...) {
      pool_of(self).free(row);  // the caller never learns the handle
      throw;
    }
  });
}

PyObject* grow(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("grow", nargs, 9);
    const RowHandle row = to_int64(args[0]);
    const Demand demand = demand_of(args + 1);
    const int32_t held = pool_of(self).row_blocks(row).num_blocks();
    const Publication publication(self, pool_of(self).num_published(row),
                                  std::max(held, demand.blocks), args[7], args[8]);
    RangeList added;
    if (!pool_of(self).grow(row, demand, added)) Py_RETURN_NONE;
    publication.apply(row);
    return new_block_ranges(std::move(added));
  });
}

PyObject* publish(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    check_nargs("publish", nargs, 3);
    const RowHandle row = to_int64(args[0]);
    const KvPool& pool = pool_of(self);
    const Publication publication(self, pool.num_published(row), pool.row_blocks(row).num_blocks(),
                                  args[1], args[2]);
    publication.apply(row);
    Py_RETURN_NONE;
  });
}

PyObject* hold(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    pool_of(self).hold(to_int64(arg));
    Py_RETURN_NONE;
  });
}

PyObject* free_row(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    pool_of(self).free(to_int64(arg));
    Py_RETURN_NONE;
  });
}

PyObject* row_blocks(PyObject* self, PyObject* arg) {
  return guarded([&] {
    RangeList blocks = pool_of(self).row_blocks(to_int64(arg));
    return new_block_ranges(std::move(blocks));
  });
}

PyObject* num_published(PyObject* self, PyObject* arg) {
  return guarded([&] { return PyLong_FromLong(pool_of(self).num_published(to_int64(arg))); });
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
      PyObject* pair = Py_BuildValue("(iy#)", evicted[i].block, evicted[i].key.data(),
                                     static_cast<Py_ssize_t>(evicted[i].key.size()));
      if (PyList_SetItem(out.get(), static_cast<Py_ssize_t>(i), checked(pair)) < 0) {
        throw PythonError{};
      }
    }
    return out.release();
  });
}

PyObject* take_moves(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const std::vector<tagma::BlockCopy> copies = pool_of(self).take_copies();
    PyRef list(checked(PyList_New(static_cast<Py_ssize_t>(copies.size()))));
    for (size_t i = 0; i < copies.size(); ++i) {
      PyObject* pair = Py_BuildValue("(ii)", copies[i].from, copies[i].to);
      if (PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), checked(pair)) < 0) {
        throw PythonError{};
      }
    }
    std::vector<tagma::RowMove> moved = pool_of(self).take_row_moves();
    PyRef rows(checked(PyList_New(0)));
    for (tagma::RowMove& move : moved) {
      PyRef blocks(new_block_ranges(std::move(move.blocks)));
      PyRef pair(checked(Py_BuildValue("(LO)", static_cast<long long>(move.row), blocks.get())));
      if (PyList_Append(rows.get(), pair.get()) < 0) throw PythonError{};
    }
    return checked(Py_BuildValue("(OO)", list.get(), rows.get()));
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
      PyObject* update = Py_BuildValue("(LiiO)", static_cast<long long>(change.row), 0,
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

PyObject* relocate(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    check_nargs("relocate", nargs, 3);
    return PyBool_FromLong(
        pool_of(self).relocate(to_int64(args[0]), to_int32(args[1]), to_int32(args[2])));
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
  const KvPool& pool = pool_of(self);
  const tagma::KvAllocator& allocator = pool.allocator();
  const tagma::RowRanges rows = pool.row_ranges();
  return Py_BuildValue(
      "{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:L,s:i,s:i,s:i,s:L,s:L,s:L,s:L,s:L,s:n}",
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
      "headroom_blocks", pool.headroom_blocks(),                           //
      "evictions", static_cast<long long>(pool.num_evictions()),           //
      "moved_blocks", static_cast<long long>(pool.num_moved()),            //
      "moved_live_blocks", static_cast<long long>(pool.num_moved_live()),  //
      "cap_evictions", static_cast<long long>(pool.num_cap_evictions()),   //
      "cap_refusals", static_cast<long long>(pool.num_cap_refusals()),     //
      "memory_bytes", static_cast<Py_ssize_t>(pool.memory_bytes()));
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
    {"lookup", fast(lookup), METH_FASTCALL,
     "lookup(block_hashes, max_blocks) -> BlockRanges\n\nLongest published prefix; no side "
     "effect."},
    {"admit", fast(admit), METH_FASTCALL,
     "admit(hit, blocks, gate, watermark, reserved, prompt, limit, publish, block_hashes)"
     " -> (row, added) | None"},
    {"grow", fast(grow), METH_FASTCALL,
     "grow(row, blocks, gate, watermark, reserved, prompt, limit, publish, block_hashes)"
     " -> BlockRanges | None"},
    {"publish", fast(publish), METH_FASTCALL, "publish(row, blocks, block_hashes) -> None"},
    {"hold", hold, METH_O, "hold(row) -> None\n\nIts blocks do not move in this step."},
    {"free", free_row, METH_O, "free(row) -> None"},
    {"row_blocks", row_blocks, METH_O, "row_blocks(row) -> BlockRanges"},
    {"num_published", num_published, METH_O, "num_published(row) -> int"},
    {"evict", evict, METH_O, "evict(block_ids) -> None\n\nWithdraws blocks from the cache."},
    {"reset", reset, METH_NOARGS, "reset() -> bool\n\nEmpties the cache if nothing is live."},
    {"take_evicted", take_evicted, METH_NOARGS, "take_evicted() -> list[(block_id, hash)]"},
    {"take_moves", take_moves, METH_NOARGS,
     "take_moves() -> (copies, rows)\n\nWhat the worker must do before it writes anything: copies"
     " [(from, to)] of blocks, all sources read before any destination is written, and rows [(row,"
     " leading blocks)] that are elsewhere since the last call."},
    {"take_copies", take_copies, METH_NOARGS,
     "take_copies() -> list[(from, to)]\n\nBlock copies that the worker must make before it writes"
     " anything, all sources read before any destination is written."},
    {"take_row_updates", take_row_updates, METH_NOARGS,
     "take_row_updates() -> list[(row, group, first_block, BlockRanges)]\n\nRows that were"
     " admitted, grew or moved since the last call, from first_block to their end."},
    {"take_relocations", take_relocations, METH_NOARGS,
     "take_relocations() -> list[(from, to)] of all moves in order, if record_evictions is set"},
    {"relocate", fast(relocate), METH_FASTCALL,
     "relocate(row, first, last) -> bool\n\nMoves the logical blocks [first, last) of a row"
     " elsewhere, as compaction would; False if they are shared, not one range, or have no room."},
    {"parts", parts, METH_O,
     "parts(n) -> list[(live, idle)]\n\nBlocks by state in each n-th of the pool, by address."
     " O(num_blocks)."},
    {"request_refs", request_refs, METH_O, "request_refs(block_id) -> int"},
    {"is_cached", is_cached, METH_O, "is_cached(block_id) -> bool"},
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
     const_cast<char*>("Pool(num_blocks, *, alignment=1, max_ranges=256, "
                       "record_evictions=False, compaction='off', copy_budget=0, slack=0)")},
    {0, nullptr}};

PyType_Spec g_spec = {"vllm_tagma._native.Pool", sizeof(PoolObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, g_slots};

}  // namespace

int add_pool(PyObject* module) { return add_type(module, &g_spec, "Pool") == nullptr ? -1 : 0; }
