// Calls of a pool that name a request, group or pin: one for each call that vLLM's scheduler makes
// to its KV-cache manager.
#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/pool_object.hpp"

namespace tagma::py {

namespace {

// (blocks, gate, prompt, limit, skip)
Need need_of(PyObject* const* args) {
  Need need;
  need.blocks = to_int32(args[0]);
  need.gate = to_int32(args[1]);
  need.prompt = to_int32(args[2]);
  need.limit = to_int32(args[3]);
  need.skip = to_int32(args[4]);
  return need;
}

// (watermark, reserved)
Spare spare_of(PyObject* const* args) {
  Spare spare;
  spare.watermark = to_int32(args[0]);
  spare.reserved = to_int32(args[1]);
  return spare;
}

// The optional last argument: group 0 if it is not there.
int32_t group_of(const char* name, PyObject* const* args, Py_ssize_t nargs, Py_ssize_t others) {
  if (nargs == others) return 0;
  check_nargs(name, nargs, others + 1);
  return to_int32(args[others]);
}

// Reading a number may run Python code (__index__), which may call the pool and use the memory that
// its calls share, or change a list of hashes. So a call reads its numbers first and borrows from
// its other arguments afterwards.
class NumbersFirst {
 public:
  explicit NumbersFirst(PoolState& state) : state_(state), call_(++state.num_calls) {}

  // Throws UsageError if another call came in between: its numbers stand where ours were.
  void done() const {
    if (state_.num_calls != call_) throw UsageError("the pool was called by one of its arguments");
    state_.hashes.keys.clear();
    state_.publications.clear();
  }

 private:
  PoolState& state_;
  uint64_t call_;
};

// The new blocks of each group, as a tuple of BlockRanges.
PyObject* new_tuple(std::vector<RangeList>& blocks) {
  PyRef out(checked(PyTuple_New(static_cast<Py_ssize_t>(blocks.size()))));
  for (size_t g = 0; g < blocks.size(); ++g) {
    PyObject* ranges = new_block_ranges(std::exchange(blocks[g], {}));
    if (PyTuple_SetItem(out.get(), static_cast<Py_ssize_t>(g), ranges) < 0) throw PythonError{};
  }
  return out.release();
}

// Blocks may have moved between a look-up and the admission that uses it; then the ids of the hit
// may be somebody else's by now, and only the hashes can tell.
void require_current(PyObject* self, int32_t group, PyObject* hit, PyObject* hashes) {
  const KvPool& pool = pool_of(self);
  const RangeList& blocks = ranges_of(hit);
  if (blocks.empty() || !pool.can_move() || layout_of(hit) == pool.num_moved()) return;
  const BlockHashes keys(pool_of(self), state_of(self).hashes, hashes);
  if (keys.size() < blocks.num_blocks()) {
    throw UsageError(tagma::message("a hit of ", blocks.num_blocks(), " blocks for ", keys.size(),
                                    " block hashes"));
  }
  int32_t i = 0;
  for (const BlockRange& range : blocks.ranges()) {
    for (int32_t at = 0; at < range.count; ++at, ++i) {
      if (!range.is_null() && !pool.is_published_as(range.at(at), group, keys(i))) {
        throw UsageError(tagma::message("block ", range.at(at),
                                        " has moved: a stale prefix hit; look it up again"));
      }
    }
  }
}

}  // namespace

PyObject* pool_lookup(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    const int32_t group = group_of("lookup", args, nargs, 2);
    const BlockHashes keys(pool_of(self), state_of(self).hashes, args[0]);
    const int32_t max_blocks = std::min(to_int32(args[1]), keys.size());
    return new_block_ranges(pool_of(self).lookup(group, keys, max_blocks),
                            pool_of(self).num_moved());
  });
}

// admit(watermark, reserved, then for each group: hit, blocks, gate, prompt, limit, skip, publish,
// block_hashes)
PyObject* pool_admit(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    constexpr Py_ssize_t kShared = 2;
    constexpr Py_ssize_t kEach = 8;
    PoolState& state = state_of(self);
    check_nargs("admit", nargs, kShared + kEach * state.pool.num_groups());
    const NumbersFirst numbers(state);
    const Spare spare = spare_of(args);
    for (size_t g = 0; g < state.needs.size(); ++g) {
      PyObject* const* group = args + kShared + kEach * static_cast<Py_ssize_t>(g);
      state.needs[g] = need_of(group + 1);
      state.to_publish[g] = to_int32(group[6]);
    }
    numbers.done();
    for (size_t g = 0; g < state.needs.size(); ++g) {
      PyObject* const* group = args + kShared + kEach * static_cast<Py_ssize_t>(g);
      state.hits[g] = ranges_of(group[0]);
      const int32_t hit = state.hits[g].num_blocks();
      state.publications.emplace_back(state.pool, state.hashes, hit,
                                      std::max(hit, state.needs[g].blocks), state.to_publish[g],
                                      group[7]);
      require_current(self, static_cast<int32_t>(g), group[0], group[7]);
    }
    const RowHandle row =
        state.pool.admit(state.hits.data(), state.needs.data(), spare, state.added.data());
    if (row == 0) Py_RETURN_NONE;
    try {
      for (size_t g = 0; g < state.needs.size(); ++g) {
        state.publications[g].apply(state.pool, state.hashes, row, static_cast<int32_t>(g));
      }
      PyRef added(new_tuple(state.added));
      return checked(Py_BuildValue("(LO)", static_cast<long long>(row), added.get()));
    } catch (...) {
      state.pool.free(row);  // the caller never learns the handle
      throw;
    }
  });
}

// grow(row, watermark, reserved, then for each group: blocks, gate, prompt, limit, skip, publish,
// block_hashes)
PyObject* pool_grow(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    constexpr Py_ssize_t kShared = 3;
    constexpr Py_ssize_t kEach = 7;
    PoolState& state = state_of(self);
    check_nargs("grow", nargs, kShared + kEach * state.pool.num_groups());
    const NumbersFirst numbers(state);
    const RowHandle row = to_int64(args[0]);
    const Spare spare = spare_of(args + 1);
    for (size_t g = 0; g < state.needs.size(); ++g) {
      PyObject* const* group = args + kShared + kEach * static_cast<Py_ssize_t>(g);
      state.needs[g] = need_of(group);
      state.to_publish[g] = to_int32(group[5]);
    }
    numbers.done();
    for (size_t g = 0; g < state.needs.size(); ++g) {
      PyObject* const* group = args + kShared + kEach * static_cast<Py_ssize_t>(g);
      const auto number = static_cast<int32_t>(g);
      state.publications.emplace_back(
          state.pool, state.hashes, state.pool.num_published(row, number),
          std::max(state.pool.row_blocks(row, number).num_blocks(), state.needs[g].blocks),
          state.to_publish[g], group[6]);
    }
    if (!state.pool.grow(row, state.needs.data(), spare, state.added.data())) Py_RETURN_NONE;
    for (size_t g = 0; g < state.needs.size(); ++g) {
      state.publications[g].apply(state.pool, state.hashes, row, static_cast<int32_t>(g));
    }
    return new_tuple(state.added);
  });
}

PyObject* pool_publish(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    const int32_t group = group_of("publish", args, nargs, 3);
    const RowHandle row = to_int64(args[0]);
    const int32_t blocks = to_int32(args[1]);
    PoolState& state = state_of(self);
    ++state.num_calls;
    state.hashes.keys.clear();
    const Publication publication(state.pool, state.hashes, state.pool.num_published(row, group),
                                  state.pool.row_blocks(row, group).num_blocks(), blocks, args[2]);
    publication.apply(state.pool, state.hashes, row, group);
    Py_RETURN_NONE;
  });
}

PyObject* pool_pass_over(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    const int32_t group = group_of("pass_over", args, nargs, 2);
    pool_of(self).pass_over(to_int64(args[0]), group, to_int32(args[1]));
    Py_RETURN_NONE;
  });
}

PyObject* pool_skip(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    const int32_t group = group_of("skip", args, nargs, 2);
    pool_of(self).skip(to_int64(args[0]), group, to_int32(args[1]));
    Py_RETURN_NONE;
  });
}

PyObject* pool_hold(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    pool_of(self).hold(to_int64(arg));
    Py_RETURN_NONE;
  });
}

PyObject* pool_free(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    pool_of(self).free(to_int64(arg));
    Py_RETURN_NONE;
  });
}

PyObject* pool_row_blocks(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    const int32_t group = group_of("row_blocks", args, nargs, 1);
    RangeList blocks = pool_of(self).row_blocks(to_int64(args[0]), group);
    return new_block_ranges(std::move(blocks));
  });
}

PyObject* pool_num_published(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    const int32_t group = group_of("num_published", args, nargs, 1);
    return PyLong_FromLong(pool_of(self).num_published(to_int64(args[0]), group));
  });
}

PyObject* pool_pin(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    const int32_t group = group_of("pin", args, nargs, 3);
    return PyLong_FromLongLong(
        pool_of(self).pin(to_int64(args[0]), group, to_int32(args[1]), to_int32(args[2])));
  });
}

PyObject* pool_pin_blocks(PyObject* self, PyObject* arg) {
  return guarded([&] { return PyLong_FromLongLong(pool_of(self).pin(ranges_of(arg))); });
}

PyObject* pool_unpin(PyObject* self, PyObject* arg) {
  return guarded([&]() -> PyObject* {
    pool_of(self).unpin(to_int64(arg));
    Py_RETURN_NONE;
  });
}

PyObject* pool_relocate(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    const int32_t group = group_of("relocate", args, nargs, 3);
    return PyBool_FromLong(
        pool_of(self).relocate(to_int64(args[0]), to_int32(args[1]), to_int32(args[2]), group));
  });
}

}  // namespace tagma::py
