// KvPool beside the obvious pool: every call goes to both, and every answer is predicted; see
// pool_prediction.hpp. A worker model that knows only what a worker is told has to end up with the
// same rows and the right contents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/check.hpp"
#include "tests/key_book.hpp"
#include "tests/pool_prediction.hpp"
#include "tests/worker_model.hpp"

class PoolPair : public PoolPrediction {
 public:
  PoolPair(const tagma::PoolOptions& options, const KeyBook& book)
      : PoolPrediction(options, book), worker(options.num_blocks, options.max_ranges) {}

  // --- steps ------------------------------------------------------------------------------------

  void begin_step() {
    pool.begin_step();
    ++step_;
    scheduling = true;
    moved_before_step_ = pool.num_moved();
  }
  void end_scheduling() {
    pool.end_scheduling();
    scheduling = false;
  }

  // The end of a step that a worker executes: it is told what vLLM would tell it, and must know
  // afterwards what the pool knows. O(num_blocks).
  void execute(std::mt19937_64& random) {
    end_scheduling();
    const std::vector<tagma::BlockCopy> copies = pool.take_copies();
    const int64_t moved = pool.num_moved() - moved_before_step_;
    CHECK(moved <= budget());
    CHECK(static_cast<int64_t>(copies.size()) <= moved);
    worker.copy(copies);
    for (const tagma::RowChange& change : pool.take_row_changes()) worker.update(change);
    CHECK(pool.take_row_changes().empty() && pool.take_copies().empty());
    for_each_part([&](const Row& row, int32_t g, const Part& part) {
      worker.check_row(row.handle, g, part.blocks);
      worker.write(row.handle, g, part.blocks, part.published, random,
                   [&](int32_t i) { return content(row, g, i); });
    });
    for_each_part([&](const Row& row, int32_t g, const Part& part) {
      worker.check_contents(row.handle, g, part.blocks,
                            [&](int32_t i) { return content(row, g, i); });
    });
    for (tagma::BlockId b = 1; b < options_.num_blocks; ++b) {
      const CacheModel::Entry& entry = cache.of(b);
      if (entry.key >= 0) CHECK(worker.content(b) == content(entry.group, entry.key));
    }
    worker.check_pins();
  }

  // Whether a preemption of this row could leave others with blocks that are never written: vLLM
  // preempts before it admits, so nobody can have hit what the row published in this step.
  bool may_be_preempted(size_t index) const {
    for (const Part& part : rows[index].parts) {
      if (part.published_step != step_) continue;
      for (int32_t i = part.published_before_step; i < part.published; ++i) {
        const tagma::BlockId b = part.blocks.at(i);
        if (b != tagma::kNullBlock && blocks.refs(b) - num_pins(b) > 1) return false;
      }
    }
    return true;
  }

  // --- prefix cache -----------------------------------------------------------------------------

  tagma::RangeList lookup(int32_t group, const Keys& keys, int32_t max_blocks) {
    const tagma::RangeList hit = pool.lookup(
        group, [&](int32_t i) { return book_[keys[static_cast<size_t>(i)]]; }, max_blocks);
    const int32_t cut = (cap_ - 1) / 2 / static_cast<int32_t>(num_groups_);
    CHECK(hit.ranges() == cache.lookup(group, keys, max_blocks, cut).ranges());
    return hit;
  }
  tagma::RangeList lookup(const Keys& keys, int32_t max_blocks) {
    return lookup(0, keys, max_blocks);
  }

  // The longest hit that all groups have, as vLLM's coordinator finds it: each look-up shortens it
  // or leaves it, until none does.
  std::vector<tagma::RangeList> common_hit(const Keys& keys, int32_t max_blocks) {
    std::vector<tagma::RangeList> hits(num_groups_);
    for (int32_t length = max_blocks;;) {
      int32_t shortest = length;
      for (size_t g = 0; g < num_groups_; ++g) {
        hits[g] = lookup(static_cast<int32_t>(g), keys, shortest);
        shortest = hits[g].num_blocks();
      }
      if (shortest == length) return hits;
      length = shortest;
    }
  }

  void publish(size_t index, int32_t upto, int32_t group = 0) {
    Row& row = rows[index];
    Part& part = row.parts[static_cast<size_t>(group)];
    const int32_t before = pool.publish(row.handle, group, upto, [&](int32_t i) {
      return book_[(*row.keys)[static_cast<size_t>(i)]];
    });
    CHECK(before == part.published);
    if (upto <= before) return;
    if (part.published_step != step_) {
      part.published_step = step_;
      part.published_before_step = before;
    }
    for (; part.published < upto; ++part.published) {
      const tagma::BlockId b = part.blocks.at(part.published);
      if (b == tagma::kNullBlock) continue;
      blocks.cache(b);
      cache.publish(b, group, (*row.keys)[static_cast<size_t>(part.published)]);
    }
  }

  void pass_over(size_t index, int32_t upto, int32_t group) {
    pool.pass_over(rows[index].handle, group, upto);
    Part& part = rows[index].parts[static_cast<size_t>(group)];
    part.published = std::max(part.published, upto);
  }

  void evict(const std::vector<tagma::BlockId>& ids) {
    pool.evict(ids);
    std::vector<tagma::BlockId> withdrawn;
    for (const tagma::BlockId b : ids) {
      const bool again = std::find(withdrawn.begin(), withdrawn.end(), b) != withdrawn.end();
      if (blocks.cached(b) && !again) withdrawn.push_back(b);
    }
    expect_withdrawn(withdrawn);
  }

  bool reset() {
    const bool done = pool.reset();
    CHECK(done == (blocks.num_live() == 0));
    if (!done) return false;
    while (!blocks.lru().empty()) forget(blocks.lru().front());
    CHECK(pool.take_evicted().empty() && pool.take_copies().empty());
    return true;
  }

  // --- rows -------------------------------------------------------------------------------------

  // Index of the new row, or -1.
  int admit(const Keys& keys, const std::vector<tagma::RangeList>& hits,
            const std::vector<tagma::Need>& needs, const tagma::Spare& spare) {
    int32_t idle = 0;
    std::vector<int64_t> held;
    Row row{0, &keys, std::vector<Part>(num_groups_)};
    for (size_t g = 0; g < num_groups_; ++g) {
      for (const tagma::BlockId b : BlockModel::held(hits[g])) idle += blocks.refs(b) == 0 ? 1 : 0;
      held.push_back(std::max(hits[g].num_blocks(), needs[g].skip));
    }
    const bool room = passes_gate(held, idle, needs, spare) && fits(held, idle, needs, spare);
    remember_counters();
    std::vector<tagma::RangeList> added(num_groups_, tagma::RangeList({7, 1}));  // stale content
    row.handle = pool.admit(hits.data(), needs.data(), spare, added.data());
    if (!room) {
      CHECK(row.handle == 0 && all_empty(added));
      expect_untouched();
      return -1;
    }
    for (size_t g = 0; g < num_groups_; ++g) {
      blocks.acquire(hits[g]);
      Part& part = row.parts[g];
      part.blocks = hits[g];
      part.published = hits[g].num_blocks();
      const int32_t nulls = std::min(needs[g].skip, needs[g].blocks) - hits[g].num_blocks();
      if (nulls > 0) part.blocks.append({tagma::kNullBlock, nulls});
    }
    if (!settle(row, needs, added, row.handle != 0)) {
      for (const Part& part : row.parts) blocks.release(part.blocks);
      return -1;
    }
    for (size_t g = 0; g < num_groups_; ++g) {
      row.parts[g].grown_step = step_;
      worker.admit(row.handle, static_cast<int32_t>(g), row.parts[g].published);
    }
    rows.push_back(std::move(row));
    return static_cast<int>(rows.size()) - 1;
  }
  int admit(const Keys& keys, const tagma::RangeList& hit, const tagma::Demand& demand) {
    return admit(keys, std::vector<tagma::RangeList>{hit}, {demand}, demand);
  }

  bool grow(size_t index, const std::vector<tagma::Need>& needs, const tagma::Spare& spare) {
    Row& row = rows[index];
    std::vector<int64_t> held;
    for (const Part& part : row.parts) held.push_back(part.blocks.num_blocks());
    const bool gate = passes_gate(held, 0, needs, spare);
    for (size_t g = 0; gate && g < num_groups_; ++g) skip_part(row.parts[g].blocks, needs[g].skip);
    const bool room = gate && fits(held, 0, needs, spare);
    remember_counters();
    std::vector<tagma::RangeList> added(num_groups_, tagma::RangeList({7, 1}));  // stale content
    const bool given = pool.grow(row.handle, needs.data(), spare, added.data());
    if (!room) {
      CHECK(!given && all_empty(added));
      expect_untouched();
      return false;
    }
    if (!settle(row, needs, added, given)) return false;
    for (size_t g = 0; g < num_groups_; ++g) {
      if (!added[g].empty()) row.parts[g].grown_step = step_;
    }
    return true;
  }
  bool grow(size_t index, const tagma::Demand& demand) {
    return grow(index, std::vector<tagma::Need>{demand}, demand);
  }

  void skip(size_t index, int32_t group, int32_t count) {
    Row& row = rows[index];
    pool.skip(row.handle, group, count);
    skip_part(row.parts[static_cast<size_t>(group)].blocks, count);
  }

  bool relocate(size_t index, int32_t first, int32_t last, int32_t group = 0) {
    const auto g = static_cast<size_t>(group);
    const Row before = rows[index];
    const int64_t moved = pool.num_moved();
    remember_counters();
    const bool done = pool.relocate(before.handle, first, last, group);
    follow(rows[index], false);
    const tagma::RangeList part = rows[index].blocks(g).slice(first, last);
    if (!done) {
      CHECK(pool.num_moved() == moved && pool.num_evictions() == evictions_);
      return false;
    }
    CHECK(part.num_ranges() == 1);
    CHECK(part.ranges() != before.blocks(g).slice(first, last).ranges());
    return true;
  }

  void free(size_t index) {
    const Row row = rows[index];
    pool.free(row.handle);
    std::vector<tagma::BlockId> withdrawn;
    for (const Part& part : row.parts) {
      if (!scheduling || part.published_step != step_) continue;
      for (int32_t i = part.published_before_step; i < part.published; ++i) {
        const tagma::BlockId b = part.blocks.at(i);
        if (b != tagma::kNullBlock && blocks.cached(b)) withdrawn.push_back(b);
      }
    }
    expect_withdrawn(withdrawn);
    for (size_t g = 0; g < num_groups_; ++g) {
      blocks.release(row.blocks(g));
      worker.free(row.handle, static_cast<int32_t>(g));
    }
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(index));
    CHECK_THROWS(pool.free(row.handle), tagma::UsageError);
  }

  // --- pins -------------------------------------------------------------------------------------

  // Part of a row; index of the pin.
  size_t pin(size_t index, int32_t group, int32_t first, int32_t last) {
    const Row& row = rows[index];
    return remember(pool.pin(row.handle, group, first, last),
                    row.blocks(static_cast<size_t>(group)).slice(first, last));
  }

  size_t pin(const tagma::RangeList& list) { return remember(pool.pin(list), list); }

  void unpin(size_t index) {
    const Pin pin = pins[index];
    pool.unpin(pin.handle);
    blocks.release(pin.blocks);
    worker.unpin(pin.handle);
    pins.erase(pins.begin() + static_cast<std::ptrdiff_t>(index));
    CHECK_THROWS(pool.unpin(pin.handle), tagma::UsageError);
  }

  // --- checks -----------------------------------------------------------------------------------

  // O(num_blocks).
  void compare() {
    pool.check_invariants();
    blocks.compare(pool.allocator(), pool.allocator().slack());
    cache.compare(pool.index());
    CHECK(pool.index().size() == blocks.num_cached());
    CHECK(pool.num_rows() == static_cast<int32_t>(rows.size()));
    for_each_part([&](const Row& row, int32_t g, const Part& part) {
      CHECK(pool.row_blocks(row.handle, g).ranges() == part.blocks.ranges());
      CHECK(pool.num_published(row.handle, g) == part.published);
    });
    CHECK(pool.pins().size() == static_cast<int32_t>(pins.size()));
    int32_t pinned = 0;
    for (tagma::BlockId b = 1; b < options_.num_blocks; ++b) pinned += is_pinned(b) ? 1 : 0;
    CHECK(pool.pins().num_blocks() == pinned);
  }

  // Frees everything and takes the whole pool: one range, and evictions in exact LRU order.
  void drain() {
    end_scheduling();
    while (!rows.empty()) free(rows.size() - 1);
    while (!pins.empty()) unpin(0);
    compare();
    begin_step();
    std::vector<tagma::Need> all(num_groups_);
    all[0].blocks = blocks.capacity();
    static const Keys kNone;
    CHECK(admit(kNone, std::vector<tagma::RangeList>(num_groups_), all, {}) == 0);
    CHECK(rows[0].blocks().num_ranges() == 1);
    CHECK(blocks.num_free() == 0 && blocks.num_cached() == 0);
    compare();
    free(0);
  }

  WorkerModel worker;
  bool scheduling = false;

 private:
  static constexpr int64_t kKeysOfGroup = 1000000;

  static bool all_empty(const std::vector<tagma::RangeList>& lists) {
    return std::all_of(lists.begin(), lists.end(), [](const auto& list) { return list.empty(); });
  }

  void skip_part(tagma::RangeList& part, int32_t count) {
    count = std::min(count, part.num_blocks());
    if (count <= part.num_leading_nulls()) return;
    const auto with_nulls = [&part](int32_t nulls) {
      tagma::RangeList list = part;
      list.replace(0, tagma::RangeList({tagma::kNullBlock, nulls}));
      return list;
    };
    // Over the cap the range that would be split stays.
    while (with_nulls(count).num_ranges() > cap_) --count;
    blocks.release(part.slice(0, count));
    part = with_nulls(count);
  }

  template <typename Visit>
  void for_each_part(Visit&& visit) {
    for (const Row& row : rows) {
      for (size_t g = 0; g < num_groups_; ++g) {
        visit(row, static_cast<int32_t>(g), row.parts[g]);
      }
    }
  }

  static int64_t content(int32_t group, int key) { return group * kKeysOfGroup + key; }
  int64_t content(const Row& row, int32_t group, int32_t i) const {
    if (static_cast<size_t>(i) < row.keys->size()) {
      return content(group, (*row.keys)[static_cast<size_t>(i)]);
    }
    return -((static_cast<int64_t>(row.handle) * 256 + group) * 4096 + i) - 2;
  }

  int32_t num_pins(tagma::BlockId block) const {
    return static_cast<int32_t>(std::count_if(pins.begin(), pins.end(), [block](const Pin& pin) {
      return pin.blocks.index_of(block) >= 0;
    }));
  }

  size_t remember(tagma::PinHandle handle, const tagma::RangeList& list) {
    CHECK(handle > 0);
    blocks.acquire(list);
    worker.pin(handle, BlockModel::held(list));
    pins.push_back({handle, list});
    return pins.size() - 1;
  }

  int64_t moved_before_step_ = 0;
};
