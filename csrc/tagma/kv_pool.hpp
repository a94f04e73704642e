// One pool of KV blocks as the scheduler sees it: rows of requests, prefix cache, capacity.
//
// Everything that vLLM's manager does per call happens here in one call: capacity check, adoption
// of a prefix hit, eviction, placement, publication. A call that returns nothing or throws has
// changed nothing that a request could notice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "tagma/block_range.hpp"
#include "tagma/headroom.hpp"
#include "tagma/kv_allocator.hpp"
#include "tagma/prefix_index.hpp"

namespace tagma {

// A request's row: slot number in the low half, generation in the high half, so that a handle kept
// after free() is recognised. 0 is never a handle.
using RowHandle = int64_t;

struct PoolOptions {
  int32_t num_blocks = 0;
  int32_t alignment = 1;
  int32_t max_ranges = 256;       // ranges that a range table row of the worker holds
  bool record_evictions = false;  // keep evicted blocks for take_evicted(); for KV events, metrics
  uint64_t seed = 1;
};

// What a request needs, in blocks counted from its first position.
struct Demand {
  int32_t blocks = 0;     // to hold after this call
  int32_t gate = 0;       // to be able to hold for the whole prompt; 0 = no gate
  int32_t watermark = 0;  // free blocks that admission must leave
  int32_t reserved = 0;   // free blocks promised to others
  int32_t prompt = 0;     // of the whole prompt: placed as one range even when it comes in chunks
  int32_t limit = 0;      // that the request can ever need; bounds its headroom
};

struct EvictedBlock {
  BlockId block;
  std::vector<uint8_t> key;
};

class KvPool {
 public:
  explicit KvPool(const PoolOptions& options, std::unique_ptr<PlacementPolicy> policy = nullptr)
      : max_ranges_(checked_cap(options.max_ranges)),
        record_evictions_(options.record_evictions),
        allocator_(options.num_blocks, options.alignment, std::move(policy)),
        index_(options.num_blocks, options.seed) {}

  // --- steps ------------------------------------------------------------------------------------

  // A scheduler step begins: until end_scheduling(), a row that is freed was preempted.
  void begin_step() {
    ++step_;
    scheduling_ = true;
  }
  void end_scheduling() { scheduling_ = false; }

  // Fixes the length of this pool's block hashes; see PrefixIndex.
  void set_key_bytes(size_t bytes) { index_.set_key_bytes(bytes); }

  // --- prefix cache -----------------------------------------------------------------------------

  // The longest published prefix of at most `max_blocks` blocks; key_at(i) gives the i-th block's
  // key. No side effect: recency is refreshed when a hit is adopted. A prefix in so many ranges
  // that the rest of the row might not fit under the cap is cut short. O(blocks hit).
  template <typename KeyAt>
  RangeList lookup(KeyAt&& key_at, int32_t max_blocks) const {
    RangeList hit;
    if (index_.size() == 0) return hit;
    BlockId previous = kNullBlock;
    for (int32_t i = 0; i < max_blocks; ++i) {
      const BlockId block = index_.find_behind(previous, key_at(i));
      if (block == kNullBlock) break;
      const bool joins = !hit.empty() && block == previous + 1;
      if (!joins && hit.num_ranges() == max_hit_ranges()) break;
      hit.append({block, 1});
      previous = block;
    }
    return hit;
  }

  // Publishes the row's blocks up to `blocks` under their keys (key_at() is called twice for each).
  // Publishing less than is published
  // already is a no-op. Returns the number of blocks published before. Throws UsageError if the row
  // is shorter or the alignment is not 1. O(blocks published).
  template <typename KeyAt>
  int32_t publish(RowHandle handle, int32_t blocks, KeyAt&& key_at) {
    Row& row = row_of(handle);
    const int32_t before = row.num_published;
    if (blocks <= before) return before;
    if (blocks > row.blocks.num_blocks()) {
      throw UsageError(
          message("publish ", blocks, " blocks of a row of ", row.blocks.num_blocks()));
    }
    if (allocator_.alignment() != 1) {
      throw UsageError(message("publish in a pool with alignment ", allocator_.alignment()));
    }
    if (row.published_step != step_) {
      row.published_step = step_;
      row.published_before_step = before;
    }
    const RangeList fresh = row.blocks.slice(before, blocks);
    int32_t i = before;
    for (const BlockRange& range : fresh.ranges()) {
      for (BlockId b = range.start; b < range.end(); ++b, ++i) {
        if (i + kPrefetchAhead < blocks) index_.prefetch(key_at(i + kPrefetchAhead));
        index_.insert(b, key_at(i));
        allocator_.cache(b);
        row.num_published = i + 1;
      }
    }
    return before;
  }

  // Withdraws these blocks from the cache; references stay. Blocks that are not cached are ignored,
  // foreign ids throw UsageError before anything changes. O(blocks).
  void evict(const std::vector<BlockId>& blocks) {
    for (const BlockId block : blocks) allocator_.is_cached(block);
    for (const BlockId block : blocks) {
      if (allocator_.is_cached(block)) withdraw(block);
    }
  }

  // Empties the cache, if no request holds a block; else returns false and changes nothing.
  // O(num_blocks).
  bool reset() {
    if (allocator_.num_live() > 0) return false;
    index_.clear();
    for (BlockId b = allocator_.lru_victim(); b != kNullBlock; b = allocator_.lru_victim()) {
      allocator_.uncache(b);
    }
    evicted_.clear();
    return true;
  }

  // Blocks that left the cache since the last call, in order, if record_evictions is on.
  std::vector<EvictedBlock> take_evicted() { return std::exchange(evicted_, {}); }

  // --- rows -------------------------------------------------------------------------------------

  // Opens a row that begins with a prefix hit (counted as published) and appends new blocks to
  // `added`. Returns 0, and leaves the pool as it was, if too few blocks are free, or (last
  // resort) if the row would exceed the range cap whatever is evicted. Throws UsageError on a
  // stale hit or a malformed demand.
  RowHandle admit(const RangeList& hit, const Demand& demand, RangeList& added) {
    check_demand(demand);
    check_hit(hit);
    const int32_t idle_hits = allocator_.count_idle(hit);
    if (!fits(hit.num_blocks(), idle_hits, demand)) return 0;
    Row row;
    allocator_.acquire(hit);
    row.blocks = hit;
    row.num_published = hit.num_blocks();
    row.num_expected = expected_blocks(std::max(demand.prompt, demand.blocks), demand);
    if (!extend(row, demand.blocks, added)) {
      allocator_.release(hit);
      return 0;
    }
    row.num_admitted = std::max(demand.prompt, row.blocks.num_blocks());
    return store(std::move(row));
  }

  // Gives a row the blocks it lacks and appends them to `added`; never takes any away. Returns
  // false, and leaves the row as it was, for the reasons admit() returns 0. O(1) when the last
  // range grows in place.
  bool grow(RowHandle handle, const Demand& demand, RangeList& added) {
    check_demand(demand);
    Row& row = row_of(handle);
    const int32_t held = row.blocks.num_blocks();
    if (!fits(held, 0, demand)) return false;
    if (demand.blocks <= held) return true;
    if (row.num_expected < demand.blocks) {  // outgrew its estimate: hope for as much again
      row.num_expected = expected_blocks(demand.blocks, demand);
    }
    return extend(row, demand.blocks, added);
  }

  // Closes a row. During scheduling the request was preempted: what it published in this very step
  // will never be written, so it is withdrawn first (stock vLLM leaves it hittable: #57580).
  void free(RowHandle handle) {
    Row& row = row_of(handle);
    if (scheduling_) {
      if (row.published_step == step_) {
        const RangeList unwritten = row.blocks.slice(row.published_before_step, row.num_published);
        for (const BlockRange& range : unwritten.ranges()) {
          for (BlockId b = range.start; b < range.end(); ++b) {
            if (allocator_.is_cached(b)) withdraw(b);
          }
        }
      }
    } else {
      // A row aborted inside its prompt has not grown at all.
      headroom_.observe(std::max(row.blocks.num_blocks() - row.num_admitted, 0));
    }
    allocator_.release(row.blocks);
    const int32_t slot = slot_of(handle);
    // Wraps after 2^31 - 1 uses of one slot: weeks of a busy server.
    const int32_t generation =
        row.generation == std::numeric_limits<int32_t>::max() ? 1 : row.generation + 1;
    row = Row{};
    row.generation = generation;
    free_rows_.push_back(slot);
    --num_rows_;
  }

  const RangeList& row_blocks(RowHandle handle) const { return row_of(handle).blocks; }
  int32_t num_published(RowHandle handle) const { return row_of(handle).num_published; }

  // --- counters ---------------------------------------------------------------------------------

  const KvAllocator& allocator() const { return allocator_; }
  const PrefixIndex& index() const { return index_; }
  int32_t num_rows() const { return num_rows_; }
  int32_t max_ranges() const { return max_ranges_; }
  int32_t headroom_blocks() const { return headroom_.blocks(); }
  int64_t num_evictions() const { return num_evictions_; }
  // Times that blocks beyond the least recently used were evicted to stay under the range cap.
  int64_t num_cap_evictions() const { return num_cap_evictions_; }
  // Times that admit() or grow() gave up because of the cap although enough blocks were free.
  int64_t num_cap_refusals() const { return num_cap_refusals_; }

  // Bytes of the pool and the index; rows add 8 bytes a range.
  size_t memory_bytes() const {
    size_t bytes = allocator_.memory_bytes() + index_.memory_bytes();
    for (const Row& row : rows_) bytes += sizeof(Row) + row.blocks.memory_bytes();
    return bytes;
  }

  // Laws R1 to R4, and those of the parts. Throws InvariantError. O(num_blocks + blocks in rows).
  void check_invariants() const {
    allocator_.check_invariants();
    index_.check_invariants();
    std::vector<int32_t> refs(static_cast<size_t>(allocator_.num_blocks()), 0);
    std::vector<int32_t> seen(refs.size(), -1);
    int32_t open = 0;
    for (size_t slot = 0; slot < rows_.size(); ++slot) {
      const Row& row = rows_[slot];
      open += row.open ? 1 : 0;
      require(row.open || row.blocks.empty(), "R1", "a closed row holds blocks: slot", slot);
      require(row.num_published <= row.blocks.num_blocks(), "R4", "more published than held: slot",
              slot);
      require(row.blocks.num_ranges() <= max_ranges_, "R3", "over the range cap: slot", slot);
      BlockId previous_end = kNullBlock;
      for (const BlockRange& range : row.blocks.ranges()) {
        require(range.start != previous_end, "R3", "a range that could be merged: slot", slot);
        previous_end = range.end();
        for (BlockId b = range.start; b < range.end(); ++b) {
          require(seen[b] != static_cast<int32_t>(slot), "R1", "a row holds a block twice:", b);
          seen[b] = static_cast<int32_t>(slot);
          ++refs[b];
        }
      }
    }
    require(open == num_rows_, "R1", "open rows counted", open);
    for (BlockId b = 0; b < allocator_.num_blocks(); ++b) {
      const bool inside =
          b >= allocator_.alignment() && b < allocator_.alignment() + allocator_.capacity();
      if (!inside) {
        require(refs[b] == 0, "R2", "a row holds a block outside the pool:", b);
        continue;
      }
      require(refs[b] == allocator_.request_refs(b), "R2", "rows and references disagree on block",
              b);
      require(allocator_.is_cached(b) == index_.contains(b), "R2",
              "cache and prefix index disagree on block", b);
    }
  }

 private:
  struct Row {
    RangeList blocks;
    int32_t num_published = 0;          // leading blocks that are hits or were published
    int32_t published_before_step = 0;  // of these, before the step `published_step`
    int64_t published_step = -1;
    int32_t num_admitted = 0;  // blocks of the prompt; growth beyond teaches the headroom
    int32_t num_expected = 0;  // blocks it is expected to hold in the end
    int32_t generation = 1;
    bool open = false;
  };

  // An insertion takes about a tenth of a trip to memory.
  static constexpr int32_t kPrefetchAhead = 12;

  static int32_t checked_cap(int32_t max_ranges) {
    if (max_ranges < 1) throw UsageError(message("max_ranges=", max_ranges, " is below 1"));
    return max_ranges;
  }

  // With a hit of this many ranges, and nothing else live, the rest always fits: h live ranges
  // leave at most h + 1 gaps, and h + (h + 1) <= max_ranges. So a request alone makes progress.
  int32_t max_hit_ranges() const { return (max_ranges_ - 1) / 2; }

  // Everything a demand says is a count of blocks. Sums of them are taken in 64 bits.
  void check_demand(const Demand& demand) const {
    for (const int32_t value : {demand.blocks, demand.gate, demand.watermark, demand.reserved,
                                demand.prompt, demand.limit}) {
      if (value < 0) throw UsageError(message("a demand of ", value, " blocks is negative"));
    }
    if (demand.blocks % allocator_.alignment() != 0) {
      throw UsageError(message("a demand of ", demand.blocks,
                               " blocks is not a multiple of the alignment ",
                               allocator_.alignment()));
    }
  }

  // A hit that was evicted meanwhile must not be adopted: its blocks may be somebody else's by now.
  void check_hit(const RangeList& hit) const {
    if (hit.num_ranges() > max_ranges_) {
      throw UsageError(
          message("a hit of ", hit.num_ranges(), " ranges, above the cap of ", max_ranges_));
    }
    for (const BlockRange& range : hit.ranges()) {
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (!allocator_.is_cached(b)) {
          throw UsageError(message("block ", b, " is not cached: a stale prefix hit"));
        }
      }
    }
  }

  int32_t expected_blocks(int32_t known, const Demand& demand) const {
    const int64_t hoped = int64_t{known} + headroom_.blocks();
    const int64_t limit = std::max(demand.limit, demand.blocks);
    return static_cast<int32_t>(std::min({hoped, limit, int64_t{allocator_.capacity()}}));
  }

  bool fits(int32_t held, int32_t idle_hits, const Demand& demand) const {
    const int64_t taken = int64_t{idle_hits} + demand.watermark;
    const int64_t free = allocator_.num_free();
    if (demand.gate > 0 && std::max(demand.gate - held, 0) + taken > free) return false;
    return std::max(demand.blocks - held, 0) + taken <= free - demand.reserved;
  }

  // Evicts, places and appends what the row lacks to hold `blocks`; false if the cap forbids it.
  //
  // A row of r ranges, alone in the pool, leaves at most r stretches beside the one behind its
  // tail. So with r <= max_ranges / 2 everything can still be placed under the cap. From there on a
  // new range takes whole stretches, which never adds to the sum of the two: a request alone
  // reaches the size of the pool, in whatever chunks it comes.
  bool extend(Row& row, int32_t blocks, RangeList& added) {
    const int32_t lacking = blocks - row.blocks.num_blocks();
    if (lacking <= 0) return true;
    while (allocator_.holes().num_blocks() < lacking) evict_victim(allocator_.lru_victim());
    const int32_t headroom = std::max(row.num_expected - blocks, 0);
    const BlockId tail = row.blocks.tail();
    RangeList placed;
    allocator_.allocate(lacking, headroom, tail, placed);
    if (ranges_after(row, placed) > std::max(max_ranges_ / 2, row.blocks.num_ranges())) {
      allocator_.release(placed);
      placed.clear();
      const int32_t spare = evict_for_cap(row, lacking);
      if (spare < 0) {
        ++num_cap_refusals_;
        return false;
      }
      // With the spare blocks as headroom the last stretch is taken from its start, unless a wish
      // for room stands in front of it: wishes yield to the cap as well.
      allocator_.forget_headroom();
      allocator_.allocate(lacking, spare, tail, placed);
      if (ranges_after(row, placed) > max_ranges_) {  // a policy that places worse than it could
        allocator_.release(placed);
        ++num_cap_refusals_;
        return false;
      }
    }
    row.blocks.append(placed);
    added.append(placed);
    return true;
  }

  static int32_t ranges_after(const Row& row, const RangeList& placed) {
    const bool merges =
        !row.blocks.empty() && row.blocks.tail() + 1 == placed.ranges().front().start;
    return row.blocks.num_ranges() + placed.num_ranges() - (merges ? 1 : 0);
  }

  // Turns the longest stretches without live blocks into holes until `lacking` blocks fit in as few
  // ranges as the row has left, and returns how many blocks more these stretches hold; -1 if they
  // do not suffice. Recency yields to the cap here, and only here. O(num_blocks).
  int32_t evict_for_cap(const Row& row, int32_t lacking) {
    std::vector<BlockRange> stretches = allocator_.unreferenced();
    std::sort(stretches.begin(), stretches.end(), [](const BlockRange& a, const BlockRange& b) {
      return a.count != b.count ? a.count > b.count : a.start < b.start;
    });
    // A stretch right behind the tail costs no range; it is tried first.
    const BlockId behind = row.blocks.tail() + 1;
    int32_t left = max_ranges_ - row.blocks.num_ranges();
    for (size_t i = 0; !row.blocks.empty() && i < stretches.size(); ++i) {
      if (stretches[i].start != behind) continue;
      std::rotate(stretches.begin(), stretches.begin() + static_cast<std::ptrdiff_t>(i),
                  stretches.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      ++left;
      break;
    }
    int32_t covered = 0;
    size_t taken = 0;
    while (taken < stretches.size() && static_cast<int32_t>(taken) < left && covered < lacking) {
      covered += stretches[taken++].count;
    }
    if (covered < lacking) return -1;
    const int64_t before = num_evictions_;
    for (size_t i = 0; i < taken; ++i) {
      for (BlockId b = stretches[i].start; b < stretches[i].end(); ++b) {
        if (allocator_.is_cached(b)) evict_victim(b);
      }
    }
    if (num_evictions_ > before) ++num_cap_evictions_;
    return covered - lacking;
  }

  void evict_victim(BlockId block) {
    ++num_evictions_;
    withdraw(block);
  }

  // Takes a block out of the cache, whoever references it.
  void withdraw(BlockId block) {
    if (record_evictions_) {
      const uint8_t* key = index_.key(block);
      evicted_.push_back({block, std::vector<uint8_t>(key, key + index_.key_bytes())});
    }
    index_.erase(block);
    allocator_.uncache(block);
  }

  static int32_t slot_of(RowHandle handle) { return static_cast<int32_t>(handle & 0xffffffff); }
  static int32_t generation_of(RowHandle handle) { return static_cast<int32_t>(handle >> 32); }

  const Row& row_of(RowHandle handle) const {
    const auto slot = static_cast<size_t>(handle & 0xffffffff);
    if (handle <= 0 || slot >= rows_.size() || !rows_[slot].open ||
        rows_[slot].generation != generation_of(handle)) {
      throw UsageError(message("row handle ", handle, " is not open"));
    }
    return rows_[slot];
  }
  Row& row_of(RowHandle handle) {
    return const_cast<Row&>(static_cast<const KvPool*>(this)->row_of(handle));
  }

  RowHandle store(Row&& row) {
    if (free_rows_.empty()) {
      free_rows_.push_back(static_cast<int32_t>(rows_.size()));
      rows_.emplace_back();
    }
    const int32_t slot = free_rows_.back();
    free_rows_.pop_back();
    const int32_t generation = rows_[static_cast<size_t>(slot)].generation;
    row.generation = generation;
    row.open = true;
    rows_[static_cast<size_t>(slot)] = std::move(row);
    ++num_rows_;
    return (static_cast<RowHandle>(generation) << 32) | slot;
  }

  static void require(bool holds, const char* law, const char* what, int64_t value) {
    if (!holds) throw InvariantError(message("law ", law, " (pool): ", what, " ", value));
  }

  int32_t max_ranges_;
  bool record_evictions_;
  KvAllocator allocator_;
  PrefixIndex index_;
  HeadroomEstimator headroom_;
  std::vector<Row> rows_;
  std::vector<int32_t> free_rows_;
  std::vector<EvictedBlock> evicted_;
  int64_t step_ = 0;
  bool scheduling_ = false;
  int32_t num_rows_ = 0;
  int64_t num_evictions_ = 0;
  int64_t num_cap_evictions_ = 0;
  int64_t num_cap_refusals_ = 0;
};

}  // namespace tagma
