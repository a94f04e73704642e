// KvPool beside the obvious pool: every call goes to both, and every answer is predicted: whether
// there is room, which blocks are evicted in which order, when the range cap refuses, what is hit.
// Where the pool may choose (slack: what to evict; compaction: what to move) the model follows it
// move by move and checks the limits of the choice. A worker model that knows only what a worker is
// told has to end up with the same rows and the right contents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/block_model.hpp"
#include "tests/check.hpp"
#include "tests/key_book.hpp"
#include "tests/worker_model.hpp"

class PoolPair {
 public:
  struct Row {
    tagma::RowHandle handle;
    tagma::RangeList blocks;
    const Keys* keys;
    int32_t published;
    int32_t published_before_step = 0;
    int64_t published_step = -1;
    int64_t grown_step = -1;
  };

  PoolPair(tagma::PoolOptions options, const KeyBook& book)
      : pool(recording(options)),
        blocks(options.num_blocks, options.alignment),
        worker(options.num_blocks),
        book_(book),
        options_(options),
        cap_(options.max_ranges),
        blocks_of_(static_cast<size_t>(book.size())),
        key_of_(static_cast<size_t>(options.num_blocks), -1) {
    pool.set_key_bytes(book.bytes());
  }

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
    for (const Row& row : rows) {
      worker.check_row(row.handle, row.blocks);
      worker.write(row.handle, row.published, random, [&](int32_t i) { return content(row, i); });
    }
    for (const Row& row : rows) {
      worker.check_contents(row.handle, [&](int32_t i) { return content(row, i); });
    }
    for (tagma::BlockId b = 1; b < options_.num_blocks; ++b) {
      const int key = key_of_[static_cast<size_t>(b)];
      if (key >= 0) CHECK(worker.content(b) == key);
    }
  }

  // Whether a preemption of this row could leave others with blocks that are never written: vLLM
  // preempts before it admits, so nobody can have hit what the row published in this step.
  bool may_be_preempted(size_t index) const {
    const Row& row = rows[index];
    if (row.published_step != step_) return true;
    for (int32_t i = row.published_before_step; i < row.published; ++i) {
      if (blocks.refs(row.blocks.at(i)) > 1) return false;
    }
    return true;
  }

  tagma::RangeList lookup(const Keys& keys, int32_t max_blocks) {
    const tagma::RangeList hit =
        pool.lookup(0, [&](int32_t i) { return book_[keys[static_cast<size_t>(i)]]; }, max_blocks);
    tagma::RangeList expected;
    for (int32_t i = 0; i < max_blocks; ++i) {
      const std::vector<tagma::BlockId>& found = of_key(keys[static_cast<size_t>(i)]);
      if (found.empty()) break;
      tagma::RangeList longer = expected;
      longer.append({found.front(), 1});
      if (longer.num_ranges() > (cap_ - 1) / 2) break;
      expected = longer;
    }
    CHECK(hit.ranges() == expected.ranges());
    return hit;
  }

  // Index of the new row, or -1.
  int admit(const Keys& keys, const tagma::RangeList& hit, const tagma::Demand& demand) {
    int32_t idle = 0;
    for (const tagma::BlockId b : BlockModel::ids(hit)) idle += blocks.refs(b) == 0 ? 1 : 0;
    const bool room = fits(hit.num_blocks(), idle, demand);
    remember_counters();
    tagma::RangeList added;
    const tagma::RowHandle handle = pool.admit(hit, demand, added);
    if (!room) {
      CHECK(handle == 0);
      expect_untouched(added);
      return -1;
    }
    blocks.acquire(hit);
    Row row{handle, hit, &keys, hit.num_blocks()};
    if (!settle(row, demand.blocks, added, handle != 0)) {
      blocks.release(row.blocks);
      return -1;
    }
    row.grown_step = step_;
    worker.admit(handle, row.published);
    rows.push_back(row);
    return static_cast<int>(rows.size()) - 1;
  }

  bool grow(size_t index, const tagma::Demand& demand) {
    Row& row = rows[index];
    const bool room = fits(row.blocks.num_blocks(), 0, demand);
    remember_counters();
    tagma::RangeList added;
    const bool given = pool.grow(row.handle, demand, added);
    if (!room) {
      CHECK(!given);
      expect_untouched(added);
      return false;
    }
    if (!settle(row, demand.blocks, added, given)) return false;
    if (!added.empty()) row.grown_step = step_;
    return true;
  }

  bool relocate(size_t index, int32_t first, int32_t last) {
    const Row before = rows[index];
    const int64_t moved = pool.num_moved();
    remember_counters();
    const bool done = pool.relocate(before.handle, first, last);
    follow(rows[index], false);
    const tagma::RangeList part = rows[index].blocks.slice(first, last);
    if (!done) {
      CHECK(pool.num_moved() == moved && pool.num_evictions() == evictions_);
      return false;
    }
    CHECK(part.num_ranges() == 1);
    CHECK(part.ranges() != before.blocks.slice(first, last).ranges());
    return true;
  }

  void publish(size_t index, int32_t upto) {
    Row& row = rows[index];
    const int32_t before = pool.publish(
        row.handle, 0, upto, [&](int32_t i) { return book_[(*row.keys)[static_cast<size_t>(i)]]; });
    CHECK(before == row.published);
    if (upto <= before) return;
    if (row.published_step != step_) {
      row.published_step = step_;
      row.published_before_step = before;
    }
    for (; row.published < upto; ++row.published) {
      const tagma::BlockId b = row.blocks.at(row.published);
      const int key = (*row.keys)[static_cast<size_t>(row.published)];
      blocks.cache(b);
      of_key(key).push_back(b);
      key_of_[static_cast<size_t>(b)] = key;
    }
  }

  void free(size_t index) {
    const Row row = rows[index];
    pool.free(row.handle);
    std::vector<tagma::BlockId> withdrawn;
    if (scheduling && row.published_step == step_) {
      for (int32_t i = row.published_before_step; i < row.published; ++i) {
        if (blocks.cached(row.blocks.at(i))) withdrawn.push_back(row.blocks.at(i));
      }
    }
    expect_withdrawn(withdrawn);
    blocks.release(row.blocks);
    worker.free(row.handle);
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(index));
    CHECK_THROWS(pool.free(row.handle), tagma::UsageError);
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

  // O(num_blocks).
  void compare() {
    pool.check_invariants();
    blocks.compare(pool.allocator(), options_.policy.slack);
    CHECK(pool.num_rows() == static_cast<int32_t>(rows.size()));
    for (const Row& row : rows) {
      CHECK(pool.row_blocks(row.handle).ranges() == row.blocks.ranges());
      CHECK(pool.num_published(row.handle) == row.published);
    }
    int32_t keys = 0;
    for (int key = 0; key < book_.size(); ++key) {
      const std::vector<tagma::BlockId>& list = of_key(key);
      keys += list.empty() ? 0 : 1;
      CHECK(pool.index().find(0, book_[key]) == (list.empty() ? tagma::kNullBlock : list.front()));
    }
    CHECK(pool.index().num_keys() == keys);
    CHECK(pool.index().size() == blocks.num_cached());
  }

  // Frees everything and takes the whole pool: one range, and evictions in exact LRU order.
  void drain() {
    end_scheduling();
    while (!rows.empty()) free(rows.size() - 1);
    compare();
    begin_step();
    tagma::Demand all;
    all.blocks = blocks.capacity();
    static const Keys kNone;
    CHECK(admit(kNone, {}, all) == 0);
    CHECK(rows[0].blocks.num_ranges() == 1);
    CHECK(blocks.num_free() == 0 && blocks.num_cached() == 0);
    compare();
    free(0);
  }

  // Everything is predicted: nothing moves, and eviction has no choice.
  bool is_strict() const {
    return options_.policy.slack == 0 &&
           (options_.compaction == tagma::Compaction::kOff || options_.copy_budget == 0);
  }

  tagma::KvPool pool;
  BlockModel blocks;
  WorkerModel worker;
  std::vector<Row> rows;
  bool scheduling = false;
  int64_t latest_turn = 0;  // by how many turns a block was evicted too early, at most

 private:
  static tagma::PoolOptions recording(tagma::PoolOptions options) {
    options.record_evictions = true;
    return options;
  }

  bool fits(int64_t held, int64_t idle_hits, const tagma::Demand& d) const {
    const int64_t free = blocks.num_free();
    const int64_t lacking = std::max<int64_t>(d.blocks - held, 0);
    const int64_t whole = std::max<int64_t>(d.gate - held, 0);
    if (d.gate > 0 && whole + idle_hits + d.watermark > free) return false;
    return lacking + idle_hits + d.watermark + d.reserved <= free;
  }

  // Follows what the pool did to give a row its blocks; false if it rightly refused.
  bool settle(Row& row, int32_t wanted, const tagma::RangeList& added, bool given) {
    if (!is_strict()) return settle_by_following(row, wanted, added, given);
    return settle_exactly(row.blocks, wanted, added, given);
  }

  bool settle_exactly(tagma::RangeList& row, int32_t wanted, const tagma::RangeList& added,
                      bool given) {
    const int32_t lacking = wanted - row.num_blocks();
    if (lacking <= 0) {
      CHECK(given);
      expect_untouched(added);
      return true;
    }
    const int32_t fewest = BlockModel::fewest_ranges(blocks.holes(true), lacking, row.tail());
    CHECK(fewest >= 0);
    const int32_t ranges = row.num_ranges();
    const bool possible = ranges + fewest <= cap_;
    CHECK(given == possible);  // refused only when no eviction at all could help
    const std::vector<tagma::EvictedBlock> evicted = pool.take_evicted();
    CHECK(pool.num_evictions() - evictions_ == static_cast<int64_t>(evicted.size()));
    const size_t least = static_cast<size_t>(std::max(lacking - blocks.num_in_holes(), 0));
    CHECK(evicted.size() >= least);
    for (size_t i = 0; i < least; ++i) {
      CHECK(evicted[i].block == blocks.lru().front());
      check_key(evicted[i]);
      forget(evicted[i].block);
    }
    const int32_t by_recency =
        row.num_ranges() + BlockModel::fewest_ranges(blocks.holes(), lacking, row.tail());
    const bool capped = by_recency > std::max(cap_ / 2, row.num_ranges());
    CHECK(pool.num_cap_evictions() - cap_evictions_ == (evicted.size() > least ? 1 : 0));
    CHECK(pool.num_cap_refusals() - cap_refusals_ == (possible ? 0 : 1));
    if (!capped || !possible) CHECK(evicted.size() == least);
    for (size_t i = least; i < evicted.size(); ++i) {
      CHECK(blocks.refs(evicted[i].block) == 0);
      check_key(evicted[i]);
      forget(evicted[i].block);
    }
    if (!given) {
      CHECK(added.empty());
      return false;
    }
    CHECK(added.num_blocks() == lacking);
    const bool alone = capped && blocks.num_live() == row.num_blocks();
    const int32_t bound = alone ? ranges_to_come(row) : 0;
    blocks.take(added);
    row.append(added);
    // What makes a request alone reach the size of the pool: see KvPool::extend().
    if (alone) CHECK(ranges_to_come(row) <= bound);
    CHECK(row.num_ranges() <= cap_);
    CHECK(row.num_ranges() == (capped ? ranges + fewest : by_recency));
    return true;
  }

  bool settle_by_following(Row& row, int32_t wanted, const tagma::RangeList& added, bool given) {
    const int32_t lacking = wanted - row.blocks.num_blocks();
    if (lacking <= 0) {
      CHECK(given);
      expect_untouched(added);
      return true;
    }
    const int32_t in_holes = blocks.num_in_holes();
    const bool for_cap = pool.num_cap_evictions() > cap_evictions_;
    const int64_t in_rows = follow(row, for_cap);
    CHECK(pool.num_cap_refusals() - cap_refusals_ == (given ? 0 : 1));
    // Evicted is what the holes lack, and no more than the slack beyond.
    const int64_t evicted = pool.num_evictions() - evictions_;
    if (!for_cap) {
      CHECK(evicted >= std::max(lacking - in_holes, 0) || !given);
      CHECK(evicted <= std::max(lacking - in_holes, 0) + in_rows + options_.policy.slack ||
            budget() < kPlenty);
    }
    if (!given) {
      CHECK(added.empty());
      const int32_t fewest =
          BlockModel::fewest_ranges(blocks.holes(true), lacking, row.blocks.tail());
      CHECK(row.blocks.num_ranges() + fewest > cap_);
      return false;
    }
    CHECK(added.num_blocks() == lacking);
    blocks.take(added);
    row.blocks.append(added);
    CHECK(row.blocks.num_ranges() <= cap_);
    return true;
  }

  // Repeats the pool's moves and evictions. The pool reports each kind in order, but not how they
  // lie between each other: an eviction is repeated when a move needs the block it empties, at the
  // latest at the end. `row` may be one that is not in `rows` yet. Returns how many blocks of rows
  // moved.
  int64_t follow(Row& row, bool for_cap) {
    const std::vector<tagma::EvictedBlock> evicted = pool.take_evicted();
    CHECK(pool.num_evictions() - evictions_ == static_cast<int64_t>(evicted.size()));
    size_t next = 0;
    int64_t live = 0;
    int64_t in_rows = 0;  // these, and the hit of a new row
    const auto repeat_eviction = [&] {
      CHECK(next < evicted.size());
      const tagma::BlockId block = evicted[next++].block;
      CHECK(blocks.refs(block) == 0);
      check_key(evicted[next - 1]);
      if (!for_cap) check_turn(block);
      forget(block);
    };
    for (const tagma::BlockCopy& move : pool.take_relocations()) {
      CHECK(options_.compaction != tagma::Compaction::kOff);
      while (!blocks.in_hole(move.to)) repeat_eviction();
      const int32_t refs = blocks.refs(move.from);
      CHECK(refs <= 1);  // shared blocks never move
      if (refs == 1) {
        Row& owner = owner_of(row, move.from);
        // The prefix hit of a row that is being admitted was idle just before.
        const bool adopted = owner.grown_step < 0;
        CHECK(adopted || options_.compaction == tagma::Compaction::kLive);
        CHECK(owner.grown_step != step_);
        owner.blocks.replace(owner.blocks.index_of(move.from), tagma::RangeList({move.to, 1}));
        live += adopted ? 0 : 1;
        ++in_rows;
      }
      blocks.relocate(move.from, move.to);
      int& key = key_of_[static_cast<size_t>(move.from)];
      if (key < 0) continue;
      std::replace(of_key(key).begin(), of_key(key).end(), move.from, move.to);
      std::swap(key, key_of_[static_cast<size_t>(move.to)]);
    }
    CHECK(pool.num_moved_live() - moved_live_ == live);
    while (next < evicted.size()) repeat_eviction();
    return in_rows;
  }

  // Blocks are evicted in turn, but for the slack, unless a step has too few moves: one of the
  // `slack` oldest each time, or the oldest.
  void check_turn(tagma::BlockId block) {
    const auto at = std::find(blocks.lru().begin(), blocks.lru().end(), block);
    const int64_t turn = at - blocks.lru().begin();
    latest_turn = std::max(latest_turn, turn - std::max(options_.policy.slack, 1) + 1);
    if (options_.compaction == tagma::Compaction::kOff || budget() >= kPlenty) {
      CHECK(turn < std::max(options_.policy.slack, 1));
    }
  }

  Row& owner_of(Row& row, tagma::BlockId block) {
    if (row.blocks.index_of(block) >= 0) return row;
    for (Row& other : rows) {
      if (other.blocks.index_of(block) >= 0) return other;
    }
    CHECK(!"a live block without a row");
    return row;
  }

  int64_t content(const Row& row, int32_t i) const {
    if (static_cast<size_t>(i) < row.keys->size()) return (*row.keys)[static_cast<size_t>(i)];
    return -(static_cast<int64_t>(row.handle) * 4096 + i) - 2;
  }

  static constexpr int64_t kPlenty = 100000;  // moves that no step of these tests can spend

  int64_t budget() const {
    return options_.compaction == tagma::Compaction::kOff ? 0 : options_.copy_budget;
  }

  // Ranges that a row alone in the pool would have if it took every other block, at worst.
  int32_t ranges_to_come(const tagma::RangeList& row) const {
    int32_t ranges = row.num_ranges();
    for (const tagma::BlockRange& s : blocks.holes(true)) {
      ranges += row.empty() || s.start != row.tail() + 1 ? 1 : 0;
    }
    return ranges;
  }

  void remember_counters() {
    evictions_ = pool.num_evictions();
    cap_evictions_ = pool.num_cap_evictions();
    cap_refusals_ = pool.num_cap_refusals();
    moved_live_ = pool.num_moved_live();
  }

  void expect_untouched(const tagma::RangeList& added) {
    CHECK(added.empty() && pool.take_evicted().empty());
    CHECK(pool.num_evictions() == evictions_ && pool.num_cap_evictions() == cap_evictions_ &&
          pool.num_cap_refusals() == cap_refusals_);
  }

  void expect_withdrawn(const std::vector<tagma::BlockId>& expected) {
    const std::vector<tagma::EvictedBlock> withdrawn = pool.take_evicted();
    CHECK(withdrawn.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(withdrawn[i].block == expected[i]);
      check_key(withdrawn[i]);
      forget(expected[i]);
    }
  }

  void check_key(const tagma::EvictedBlock& evicted) const {
    const int key = key_of_[static_cast<size_t>(evicted.block)];
    CHECK(key >= 0 && book_.equals(key, evicted.key));
  }

  void forget(tagma::BlockId block) {
    int& key = key_of_[static_cast<size_t>(block)];
    std::vector<tagma::BlockId>& list = of_key(key);
    list.erase(std::find(list.begin(), list.end(), block));
    key = -1;
    blocks.uncache(block);
  }
  std::vector<tagma::BlockId>& of_key(int key) { return blocks_of_[static_cast<size_t>(key)]; }

  const KeyBook& book_;
  tagma::PoolOptions options_;
  int32_t cap_;
  std::vector<std::vector<tagma::BlockId>> blocks_of_;  // [key] in order of publication
  std::vector<int> key_of_;                             // [block] or -1
  int64_t step_ = 0;
  int64_t evictions_ = 0, cap_evictions_ = 0, cap_refusals_ = 0;
  int64_t moved_live_ = 0;
  int64_t moved_before_step_ = 0;
};
