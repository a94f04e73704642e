// KvPool beside the obvious pool: every call goes to both, and everything that the pool answers is
// predicted, not only checked for sanity: whether there is room, which blocks are evicted and in
// which order, when the range cap forces a refusal, what a prefix hit finds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/block_model.hpp"
#include "tests/check.hpp"

// Block hashes by number: all different, of one length.
class KeyBook {
 public:
  // With `collide` the eight bytes that choose the slot are the same in all keys of 16 or more.
  KeyBook(int count, size_t bytes, bool collide) : bytes_(bytes) {
    for (int i = 0; i < count; ++i) {
      std::string key(bytes, '#');
      const size_t at = collide && bytes >= 16 ? 8 : 0;
      key[at] = static_cast<char>(i);
      if (bytes > 1) key[at + 1] = static_cast<char>(i >> 8);
      keys_.push_back(key);
    }
  }

  const uint8_t* operator[](int key) const {
    return reinterpret_cast<const uint8_t*>(keys_[static_cast<size_t>(key)].data());
  }
  bool equals(int key, const std::vector<uint8_t>& other) const {
    return other.size() == bytes_ && std::equal(other.begin(), other.end(), (*this)[key]);
  }
  size_t bytes() const { return bytes_; }
  int size() const { return static_cast<int>(keys_.size()); }

 private:
  size_t bytes_;
  std::vector<std::string> keys_;
};

using Keys = std::vector<int>;  // [logical block] its number in the book

class PoolPair {
 public:
  struct Row {
    tagma::RowHandle handle;
    tagma::RangeList blocks;
    const Keys* keys;
    int32_t published;
    int32_t published_before_step = 0;
    int64_t published_step = -1;
  };

  PoolPair(tagma::PoolOptions options, const KeyBook& book)
      : pool(recording(options)),
        blocks(options.num_blocks, options.alignment),
        book_(book),
        cap_(options.max_ranges),
        blocks_of_(static_cast<size_t>(book.size())),
        key_of_(static_cast<size_t>(options.num_blocks), -1) {
    pool.set_key_bytes(book.bytes());
  }

  void begin_step() {
    pool.begin_step();
    ++step_;
    scheduling = true;
  }
  void end_scheduling() {
    pool.end_scheduling();
    scheduling = false;
  }

  tagma::RangeList lookup(const Keys& keys, int32_t max_blocks) {
    const tagma::RangeList hit =
        pool.lookup([&](int32_t i) { return book_[keys[static_cast<size_t>(i)]]; }, max_blocks);
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
    if (!settle(row.blocks, demand.blocks, added, handle != 0)) {
      blocks.release(hit);
      return -1;
    }
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
    return settle(row.blocks, demand.blocks, added, given);
  }

  void publish(size_t index, int32_t upto) {
    Row& row = rows[index];
    const int32_t before = pool.publish(
        row.handle, upto, [&](int32_t i) { return book_[(*row.keys)[static_cast<size_t>(i)]]; });
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
    CHECK(pool.take_evicted().empty());
    return true;
  }

  // O(num_blocks).
  void compare() {
    pool.check_invariants();
    blocks.compare(pool.allocator());
    CHECK(pool.num_rows() == static_cast<int32_t>(rows.size()));
    for (const Row& row : rows) {
      CHECK(pool.row_blocks(row.handle).ranges() == row.blocks.ranges());
      CHECK(pool.num_published(row.handle) == row.published);
    }
    int32_t keys = 0;
    for (int key = 0; key < book_.size(); ++key) {
      const std::vector<tagma::BlockId>& list = of_key(key);
      keys += list.empty() ? 0 : 1;
      CHECK(pool.index().find(book_[key]) == (list.empty() ? tagma::kNullBlock : list.front()));
    }
    CHECK(pool.index().num_keys() == keys);
    CHECK(pool.index().size() == blocks.num_cached());
  }

  // Frees everything and takes the whole pool: one range, and evictions in exact LRU order.
  void drain() {
    end_scheduling();
    while (!rows.empty()) free(rows.size() - 1);
    compare();
    tagma::Demand all;
    all.blocks = blocks.capacity();
    static const Keys kNone;
    CHECK(admit(kNone, {}, all) == 0);
    CHECK(rows[0].blocks.num_ranges() == 1);
    CHECK(blocks.num_free() == 0 && blocks.num_cached() == 0);
    compare();
    free(0);
  }

  tagma::KvPool pool;
  BlockModel blocks;
  std::vector<Row> rows;
  bool scheduling = false;

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

  // Follows what the pool did to give `row` its blocks; false if it rightly refused.
  bool settle(tagma::RangeList& row, int32_t wanted, const tagma::RangeList& added, bool given) {
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
  }

  void expect_untouched(const tagma::RangeList& added) {
    CHECK(added.empty());
    CHECK(pool.take_evicted().empty());
    CHECK(pool.num_evictions() == evictions_);
    CHECK(pool.num_cap_evictions() == cap_evictions_);
    CHECK(pool.num_cap_refusals() == cap_refusals_);
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
  int32_t cap_;
  std::vector<std::vector<tagma::BlockId>> blocks_of_;  // [key] in order of publication
  std::vector<int> key_of_;                             // [block] or -1
  int64_t step_ = 0;
  int64_t evictions_ = 0;
  int64_t cap_evictions_ = 0;
  int64_t cap_refusals_ = 0;
};
