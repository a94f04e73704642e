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
#include "tagma/block_store.hpp"
#include "tagma/compactor.hpp"
#include "tagma/headroom.hpp"
#include "tagma/row_table.hpp"

namespace tagma {

struct PoolOptions {
  int32_t num_blocks = 0;
  int32_t alignment = 1;
  int32_t max_ranges = 256;       // ranges that a range table row of the worker holds
  bool record_evictions = false;  // keep evicted blocks for take_evicted(); for KV events, metrics
  Compaction compaction = Compaction::kOff;
  int32_t copy_budget = 0;  // blocks that may move in one step
  int32_t slack = 0;        // idle blocks, from the oldest, that may be evicted out of turn
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

struct RowRanges {
  int64_t total = 0;    // over all open rows
  int32_t longest = 0;  // of one row
  int32_t single = 0;   // rows in one range
};

struct PartCount {
  int32_t live = 0;
  int32_t idle = 0;
};

class KvPool {
 public:
  explicit KvPool(const PoolOptions& options, std::unique_ptr<PlacementPolicy> policy = nullptr)
      : max_ranges_(checked_cap(options.max_ranges)),
        store_(allocator_options(options), std::move(policy), options.seed,
               options.record_evictions,
               options.compaction == Compaction::kOff ? 0 : options.copy_budget),
        compactor_(store_, rows_, options.compaction, options.max_ranges) {}

  // --- steps ------------------------------------------------------------------------------------

  // A scheduler step begins: until end_scheduling(), a row that is freed was preempted.
  void begin_step() {
    ++step_;
    scheduling_ = true;
    store_.begin_step();
  }
  void end_scheduling() { scheduling_ = false; }

  // Fixes the length of this pool's block hashes; see PrefixIndex.
  void set_key_bytes(size_t bytes) { store_.index().set_key_bytes(bytes); }

  // --- prefix cache -----------------------------------------------------------------------------

  // The longest published prefix of at most `max_blocks` blocks; key_at(i) gives the i-th block's
  // key. No side effect: recency is refreshed when a hit is adopted. A prefix in so many ranges
  // that the rest of the row might not fit under the cap is cut short. O(blocks hit).
  template <typename KeyAt>
  RangeList lookup(KeyAt&& key_at, int32_t max_blocks) const {
    RangeList hit;
    if (store_.index().size() == 0) return hit;
    BlockId previous = kNullBlock;
    for (int32_t i = 0; i < max_blocks; ++i) {
      const BlockId block = store_.index().find_behind(previous, key_at(i));
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
    Row& row = rows_.at(handle);
    const int32_t before = row.num_published;
    if (blocks <= before) return before;
    if (blocks > row.blocks.num_blocks()) {
      throw UsageError(
          message("publish ", blocks, " blocks of a row of ", row.blocks.num_blocks()));
    }
    if (store_.allocator().alignment() != 1) {
      throw UsageError(
          message("publish in a pool with alignment ", store_.allocator().alignment()));
    }
    if (row.published_step != step_) {
      row.published_step = step_;
      row.published_before_step = before;
    }
    const RangeList fresh = row.blocks.slice(before, blocks);
    int32_t i = before;
    for (const BlockRange& range : fresh.ranges()) {
      for (BlockId b = range.start; b < range.end(); ++b, ++i) {
        if (i + kPrefetchAhead < blocks) store_.index().prefetch(key_at(i + kPrefetchAhead));
        store_.index().insert(b, key_at(i));
        store_.allocator().cache(b);
        row.num_published = i + 1;
      }
    }
    return before;
  }

  // Withdraws these blocks from the cache; references stay. Blocks that are not cached are ignored,
  // foreign ids throw UsageError before anything changes. O(blocks).
  void evict(const std::vector<BlockId>& blocks) {
    for (const BlockId block : blocks) store_.allocator().is_cached(block);
    for (const BlockId block : blocks) {
      if (store_.allocator().is_cached(block)) store_.withdraw(block);
    }
  }

  // Empties the cache, if no request holds a block; else returns false and changes nothing.
  // O(num_blocks).
  bool reset() {
    if (store_.allocator().num_live() > 0) return false;
    store_.clear();
    return true;
  }

  // Blocks that left the cache since the last call, in order, if record_evictions is on.
  std::vector<EvictedBlock> take_evicted() { return store_.take_evicted(); }

  // --- rows -------------------------------------------------------------------------------------

  // Opens a row that begins with a prefix hit (counted as published) and appends new blocks to
  // `added`. Returns 0, and leaves the pool as it was, if too few blocks are free, or (last
  // resort) if the row would exceed the range cap whatever is evicted. Throws UsageError on a
  // stale hit or a malformed demand.
  RowHandle admit(const RangeList& hit, const Demand& demand, RangeList& added) {
    check_demand(demand);
    check_hit(hit);
    const int32_t idle_hits = store_.allocator().count_idle(hit);
    if (!fits(hit.num_blocks(), idle_hits, demand)) return 0;
    Row row;
    store_.allocator().acquire(hit);
    row.blocks = hit;
    row.num_published = hit.num_blocks();
    row.num_prompt = std::max(demand.prompt, demand.blocks);
    row.num_expected = expected_blocks(row.num_prompt, demand);
    if (!extend(row, demand.blocks, added)) {
      store_.allocator().release(row.blocks);  // the hit, wherever it is by now
      return 0;
    }
    row.grown_step = step_;
    const RowHandle handle = rows_.open(std::move(row));
    rows_.note_change(rows_.at(handle), 0);
    return handle;
  }

  // Gives a row the blocks it lacks and appends them to `added`; never takes any away. Returns
  // false, and leaves the row as it was, for the reasons admit() returns 0. O(1) when the last
  // range grows in place.
  bool grow(RowHandle handle, const Demand& demand, RangeList& added) {
    check_demand(demand);
    Row& row = rows_.at(handle);
    const int32_t held = row.blocks.num_blocks();
    if (!fits(held, 0, demand)) return false;
    if (demand.blocks <= held) return true;
    if (row.num_expected < demand.blocks) {  // outgrew its estimate: hope for as much again
      row.num_expected = expected_blocks(demand.blocks, demand);
    }
    if (!extend(row, demand.blocks, added)) return false;
    rows_.note_change(row, held);
    row.grown_step = step_;
    return true;
  }

  // Closes a row. During scheduling the request was preempted: what it published in this very step
  // will never be written, so it is withdrawn first (stock vLLM leaves it hittable: #57580).
  void free(RowHandle handle) {
    Row& row = rows_.at(handle);
    if (scheduling_) {
      if (row.published_step == step_) {
        const RangeList unwritten = row.blocks.slice(row.published_before_step, row.num_published);
        for (const BlockRange& range : unwritten.ranges()) {
          for (BlockId b = range.start; b < range.end(); ++b) {
            if (store_.allocator().is_cached(b)) store_.withdraw(b);
          }
        }
      }
    } else {
      // A row aborted inside its prompt has not grown at all.
      headroom_.observe(std::max(row.blocks.num_blocks() - row.num_prompt, 0));
    }
    store_.allocator().release(row.blocks);
    rows_.close(handle);
  }

  // The row's blocks stay where they are for the rest of the step: it is on its way to the worker.
  // Rows that are admitted or grow are held without this.
  void hold(RowHandle handle) { rows_.at(handle).grown_step = step_; }

  const RangeList& row_blocks(RowHandle handle) const { return rows_.at(handle).blocks; }
  int32_t num_published(RowHandle handle) const { return rows_.at(handle).num_published; }

  // --- moves ------------------------------------------------------------------------------------

  // Block copies that the worker must make before it writes anything in this step; see MoveLog.
  std::vector<BlockCopy> take_copies() { return store_.take_copies(); }

  // Rows of which the worker knows blocks that moved since the last call.
  std::vector<RowMove> take_row_moves() { return compactor_.take_row_moves(); }

  // What the workers must know of rows that were admitted, grew or moved since the last call.
  std::vector<RowChange> take_row_changes() { return rows_.take_changes(); }

  // All moves since the last call, in order, if record_evictions is on.
  std::vector<BlockCopy> take_relocations() { return store_.take_relocations(); }

  // Moves the logical blocks [first, last) of a row elsewhere, as live compaction would; false, and
  // nothing has changed, if they are shared or not one range, the row grew in this step, no moves
  // are left, or no room has as many blocks. O(blocks).
  bool relocate(RowHandle handle, int32_t first, int32_t last) {
    return compactor_.relocate(rows_.at(handle), first, last, step_);
  }

  // --- counters ---------------------------------------------------------------------------------

  const KvAllocator& allocator() const { return store_.allocator(); }
  const PrefixIndex& index() const { return store_.index(); }
  int32_t num_rows() const { return rows_.size(); }
  int32_t max_ranges() const { return max_ranges_; }
  int32_t headroom_blocks() const { return headroom_.blocks(); }
  int64_t num_evictions() const { return store_.num_evictions(); }
  // Blocks moved, in all and of these live ones.
  int64_t num_moved() const { return store_.num_moved(); }
  int64_t num_moved_live() const { return store_.num_moved_live(); }
  // Times that blocks beyond the least recently used were evicted to stay under the range cap.
  int64_t num_cap_evictions() const { return num_cap_evictions_; }
  // Times that admit() or grow() gave up because of the cap although enough blocks were free.
  int64_t num_cap_refusals() const { return num_cap_refusals_; }

  bool can_move() const { return store_.allocator().idle_can_move(); }
  bool is_published_as(BlockId block, const uint8_t* key) const {
    return store_.index().has_key(block, key);
  }

  // Ranges of the open rows. O(rows).
  RowRanges row_ranges() const {
    RowRanges out;
    for (size_t slot = 0; slot < rows_.num_slots(); ++slot) {
      const Row& row = rows_.slot(slot);
      if (!row.open) continue;
      out.total += row.blocks.num_ranges();
      out.longest = std::max(out.longest, row.blocks.num_ranges());
      out.single += row.blocks.num_ranges() == 1 ? 1 : 0;
    }
    return out;
  }

  // Live and idle blocks in each `n`-th of the pool, by address. Throws UsageError if n < 1.
  // O(num_blocks).
  std::vector<PartCount> parts(int32_t n) const {
    if (n < 1) throw UsageError(message("parts=", n, " is below 1"));
    std::vector<PartCount> out(static_cast<size_t>(n));
    const KvAllocator& allocator = store_.allocator();
    const int64_t blocks = allocator.num_blocks();
    const BlockId end = allocator.alignment() + allocator.capacity();
    BlockId b = allocator.alignment();
    for (int32_t i = 0; i < n; ++i) {  // part i holds the b with b * n / blocks == i
      const auto stop = static_cast<BlockId>((int64_t{i} * blocks + blocks + n - 1) / n);
      PartCount& part = out[static_cast<size_t>(i)];
      for (; b < std::min(stop, end); ++b) {
        const bool live = allocator.request_refs(b) > 0;
        part.live += live ? 1 : 0;
        part.idle += !live && allocator.is_cached(b) ? 1 : 0;
      }
    }
    return out;
  }

  // Bytes of the pool and the index; rows add 8 bytes a range.
  size_t memory_bytes() const { return store_.memory_bytes() + rows_.memory_bytes(); }

  // Laws R1 to R5, and those of the parts. Throws InvariantError. O(num_blocks + blocks in rows).
  void check_invariants() const {
    store_.allocator().check_invariants();
    store_.index().check_invariants();
    std::vector<int32_t> refs(static_cast<size_t>(store_.allocator().num_blocks()), 0);
    std::vector<int32_t> seen(refs.size(), -1);
    std::vector<uint8_t> ends_row(refs.size(), 0);
    int32_t open = 0;
    for (size_t slot = 0; slot < rows_.num_slots(); ++slot) {
      const Row& row = rows_.slot(slot);
      open += row.open ? 1 : 0;
      require(row.open || row.blocks.empty(), "R1", "a closed row holds blocks: slot", slot);
      require(row.num_published <= row.blocks.num_blocks(), "R4", "more published than held: slot",
              slot);
      require(row.blocks.num_ranges() <= max_ranges_, "R3", "over the range cap: slot", slot);
      if (row.open && !row.blocks.empty()) ends_row[static_cast<size_t>(row.blocks.tail())] = 1;
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
    require(open == rows_.size(), "R1", "open rows counted", open);
    for (BlockId b = 0; b < store_.allocator().num_blocks(); ++b) {
      const bool inside = b >= store_.allocator().alignment() &&
                          b < store_.allocator().alignment() + store_.allocator().capacity();
      if (!inside) {
        require(refs[b] == 0, "R2", "a row holds a block outside the pool:", b);
        continue;
      }
      require(store_.allocator().headroom_behind(b) == 0 || ends_row[static_cast<size_t>(b)] != 0,
              "R5", "a wish for room behind a block that ends no row:", b);
      require(refs[b] == store_.allocator().request_refs(b), "R2",
              "rows and references disagree on block", b);
      require(store_.allocator().is_cached(b) == store_.index().contains(b), "R2",
              "cache and prefix index disagree on block", b);
    }
  }

 private:
  // An insertion takes about a tenth of a trip to memory.
  static constexpr int32_t kPrefetchAhead = 12;

  static AllocatorOptions allocator_options(const PoolOptions& options) {
    if (options.copy_budget < 0 || options.slack < 0) {
      throw UsageError(message("copy_budget=", options.copy_budget, ", slack=", options.slack,
                               ": neither can be negative"));
    }
    AllocatorOptions out;
    out.num_blocks = options.num_blocks;
    out.alignment = options.alignment;
    out.slack = options.slack;
    out.idle_can_move = options.compaction != Compaction::kOff && options.copy_budget > 0;
    return out;
  }

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
    if (demand.blocks % store_.allocator().alignment() != 0) {
      throw UsageError(message("a demand of ", demand.blocks,
                               " blocks is not a multiple of the alignment ",
                               store_.allocator().alignment()));
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
        if (!store_.allocator().is_cached(b)) {
          throw UsageError(message("block ", b, " is not cached: a stale prefix hit"));
        }
      }
    }
  }

  int32_t expected_blocks(int32_t known, const Demand& demand) const {
    const int64_t hoped = int64_t{known} + headroom_.blocks();
    const int64_t limit = std::max(demand.limit, demand.blocks);
    return static_cast<int32_t>(std::min({hoped, limit, int64_t{store_.allocator().capacity()}}));
  }

  bool fits(int32_t held, int32_t idle_hits, const Demand& demand) const {
    const int64_t taken = int64_t{idle_hits} + demand.watermark;
    const int64_t free = store_.allocator().num_free();
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
    const int32_t certain = std::max(row.num_prompt - blocks, 0);
    const int32_t headroom = std::max(row.num_expected - blocks, certain);
    RangeList placed;
    compactor_.place(row, lacking, certain, headroom, step_, placed);
    if (ranges_after(row, placed) > std::max(max_ranges_ / 2, row.blocks.num_ranges())) {
      store_.allocator().release(placed);
      placed.clear();
      const int32_t spare = evict_for_cap(row, lacking);
      if (spare < 0) {
        ++num_cap_refusals_;
        return false;
      }
      // With the spare blocks as headroom the last stretch is taken from its start, unless a wish
      // for room stands in front of it: wishes yield to the cap as well.
      store_.allocator().forget_headroom();
      store_.allocator().allocate(lacking, spare, row.blocks.tail(), placed);
      if (ranges_after(row, placed) > max_ranges_) {  // a policy that places worse than it could
        store_.allocator().release(placed);
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
    std::vector<BlockRange> stretches = store_.allocator().unreferenced();
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
    const int64_t before = store_.num_evictions();
    for (size_t i = 0; i < taken; ++i) {
      for (BlockId b = stretches[i].start; b < stretches[i].end(); ++b) {
        if (store_.allocator().is_cached(b)) store_.evict(b);
      }
    }
    if (store_.num_evictions() > before) ++num_cap_evictions_;
    return covered - lacking;
  }

  static void require(bool holds, const char* law, const char* what, int64_t value) {
    if (!holds) throw InvariantError(message("law ", law, " (pool): ", what, " ", value));
  }

  int32_t max_ranges_;
  BlockStore store_;
  RowTable rows_;
  Compactor compactor_;
  HeadroomEstimator headroom_;
  int64_t step_ = 0;
  bool scheduling_ = false;
  int64_t num_cap_evictions_ = 0;
  int64_t num_cap_refusals_ = 0;
};

}  // namespace tagma
