// Contiguous-range allocator over block ids, with request and cache references counted apart.
//
// A block is in one of three states:
//
//        allocate               release, not cached
//   hole ---------> live ----------------------------> hole
//                    | ^
//   release, cached  | | acquire (prefix hit)
//                    v |
//                 idle (cache reference only, in LRU order) -- uncache (evict) --> hole
//
// "Free" means hole or idle: both can be given to the next request, as vLLM counts them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tagma/block_range.hpp"
#include "tagma/hole_index.hpp"
#include "tagma/placement.hpp"

namespace tagma {

class KvAllocator {
 public:
  // Manages block ids [alignment, num_blocks rounded down to the alignment); ids below are the null
  // block's. With alignment > 1 every range starts at a multiple of it and every count is one, so
  // blocks cannot be cached, since the cache evicts them one by one. O(num_blocks).
  explicit KvAllocator(int32_t num_blocks, int32_t alignment = 1,
                       std::unique_ptr<PlacementPolicy> policy = nullptr)
      : first_(checked_alignment(num_blocks, alignment)),
        end_(num_blocks - num_blocks % alignment),
        alignment_(alignment),
        policy_(policy ? std::move(policy) : std::make_unique<BestFitPlacement>()),
        holes_(num_blocks),
        refs_(static_cast<size_t>(num_blocks), 0),
        cached_(static_cast<size_t>(num_blocks), 0),
        headroom_(static_cast<size_t>(num_blocks), 0),
        lru_next_(static_cast<size_t>(num_blocks), kNullBlock),
        lru_prev_(static_cast<size_t>(num_blocks), kNullBlock) {
    holes_.add({first_, end_ - first_});
  }

  // Places `count` blocks behind `tail` (the null block for a new request) as one range where a
  // hole allows and in as few as the policy finds, each with one request reference, and appends
  // them to `out`. Throws UsageError if fewer than `count` blocks are in holes (the caller evicts
  // first), `count` breaks the alignment, `headroom` is negative or `tail` is not live; nothing has
  // changed then. O(blocks + ranges placed times the policy's bound).
  void allocate(int32_t count, int32_t headroom, BlockId tail, RangeList& out) {
    check_count(count);
    if (count > holes_.num_blocks()) {
      throw UsageError(message("allocate ", count, " blocks of ", holes_.num_blocks(),
                               " in holes (", num_idle_, " idle ones could be evicted first)"));
    }
    if (headroom < 0) throw UsageError(message("headroom=", headroom, " is negative"));
    if (tail != kNullBlock) {
      check_id(tail);
      if (refs_[tail] == 0) throw UsageError(message("the tail, block ", tail, ", is not live"));
      headroom_[tail] = 0;
    }
    int32_t left = count;
    while (left > 0) {
      const Placement placed =
          policy_->place(holes_, headroom_, alignment_, {left, headroom, tail});
      holes_.carve(placed.hole_start, placed.range);
      for (BlockId b = placed.range.start; b < placed.range.end(); ++b) refs_[b] = 1;
      out.append(placed.range);
      left -= placed.range.count;
      tail = placed.range.end() - 1;
    }
    num_live_ += count;
    if (tail != kNullBlock) headroom_[tail] = headroom;
  }

  // Drops every wish for room to grow. O(num_blocks).
  void forget_headroom() { std::fill(headroom_.begin(), headroom_.end(), 0); }

  // One more request references these blocks; idle ones leave the LRU order. Throws UsageError,
  // and changes nothing, if one of them is in a hole or named twice. O(blocks).
  void acquire(const RangeList& blocks) {
    check_disjoint(blocks);
    for (const BlockRange& range : blocks.ranges()) {
      check_range(range);
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (refs_[b] == 0 && !cached_[b]) {
          throw UsageError(message("block ", b, " is free: a stale prefix hit"));
        }
      }
    }
    for (const BlockRange& range : blocks.ranges()) {
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (refs_[b]++ == 0) {
          lru_remove(b);
          ++num_live_;
        }
      }
    }
  }

  // One request drops its references, tail first: of its cached blocks the last becomes the first
  // to be evicted, so that no cached block outlives its prefix. Throws UsageError, and changes
  // nothing, on a double free or a foreign id. O(blocks).
  void release(const RangeList& blocks) {
    check_disjoint(blocks);
    for (const BlockRange& range : blocks.ranges()) {
      check_range(range);
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (refs_[b] == 0) throw UsageError(message("double free of block ", b));
      }
    }
    if (!blocks.empty()) headroom_[blocks.tail()] = 0;
    const std::vector<BlockRange>& ranges = blocks.ranges();
    for (size_t i = ranges.size(); i-- > 0;) {
      BlockRange freed{ranges[i].end(), 0};  // grows downwards while blocks turn into a hole
      for (BlockId b = ranges[i].end() - 1; b >= ranges[i].start; --b) {
        const bool last = --refs_[b] == 0;
        if (last) --num_live_;
        if (last && !cached_[b]) {
          freed = {b, freed.count + 1};
          continue;
        }
        if (last) lru_push(b);
        if (freed.count > 0) holes_.add(freed);
        freed = {b, 0};
      }
      if (freed.count > 0) holes_.add(freed);
    }
  }

  // The cache takes its reference to a live block. Throws UsageError if it holds one already, the
  // block is not live, or the alignment is not 1. O(1).
  void cache(BlockId block) {
    check_id(block);
    if (alignment_ != 1) {
      throw UsageError(message("blocks of a pool with alignment ", alignment_,
                               " cannot be cached: they are evicted one by one"));
    }
    if (refs_[block] == 0 || cached_[block]) {
      throw UsageError(message("cache block ", block, ": ", refs_[block], " request references, ",
                               cached_[block] ? "cached already" : "not cached"));
    }
    cached_[block] = 1;
    ++num_cached_;
  }

  // The cache drops its reference; an idle block becomes (part of) a hole. O(1).
  void uncache(BlockId block) {
    check_id(block);
    if (!cached_[block]) throw UsageError(message("block ", block, " is not cached"));
    cached_[block] = 0;
    --num_cached_;
    if (refs_[block] == 0) {
      lru_remove(block);
      holes_.add({block, 1});
    }
  }

  // The idle block unused for longest, or the null block. O(1).
  BlockId lru_victim() const { return lru_next_[kNullBlock]; }

  // Maximal ranges of blocks that no request references, in address order. O(num_blocks).
  std::vector<BlockRange> unreferenced() const {
    std::vector<BlockRange> out;
    for (BlockId b = first_; b < end_; ++b) {
      if (refs_[b] != 0) continue;
      if (!out.empty() && out.back().end() == b) {
        ++out.back().count;
      } else {
        out.push_back({b, 1});
      }
    }
    return out;
  }

  // Idle blocks among these: what a prefix hit takes away from the free count. O(blocks).
  int32_t count_idle(const RangeList& blocks) const {
    int32_t idle = 0;
    for (const BlockRange& range : blocks.ranges()) {
      check_range(range);
      for (BlockId b = range.start; b < range.end(); ++b) idle += refs_[b] == 0 ? 1 : 0;
    }
    return idle;
  }

  int32_t request_refs(BlockId block) const {
    check_id(block);
    return refs_[block];
  }
  bool is_cached(BlockId block) const {
    check_id(block);
    return cached_[block] != 0;
  }

  int32_t num_blocks() const { return static_cast<int32_t>(refs_.size()); }
  int32_t alignment() const { return alignment_; }
  int32_t capacity() const { return end_ - first_; }
  int32_t num_free() const { return holes_.num_blocks() + num_idle_; }
  int32_t num_idle() const { return num_idle_; }
  int32_t num_live() const { return num_live_; }
  int32_t num_cached() const { return num_cached_; }
  const HoleIndex& holes() const { return holes_; }

  size_t memory_bytes() const {
    return holes_.memory_bytes() + cached_.capacity() +
           (refs_.capacity() + headroom_.capacity() + lru_next_.capacity() + lru_prev_.capacity()) *
               sizeof(int32_t);
  }

  // Laws A1 to A5. Throws InvariantError. O(num_blocks).
  void check_invariants() const {
    holes_.check_invariants();
    std::vector<uint8_t> in_hole(refs_.size(), 0);
    holes_.visit_by_address([&](BlockRange hole) {
      require(hole.start >= first_ && hole.end() <= end_, "A1", "a hole outside the pool at",
              hole.start);
      require(hole.start % alignment_ == 0 && hole.count % alignment_ == 0, "A5",
              "an unaligned hole at", hole.start);
      for (BlockId b = hole.start; b < hole.end(); ++b) in_hole[b] = 1;
    });
    int32_t live = 0;
    int32_t cached = 0;
    int32_t idle = 0;
    for (BlockId b = 0; b < num_blocks(); ++b) {
      const bool inside = b >= first_ && b < end_;
      require(refs_[b] >= 0, "A2", "negative references on block", b);
      require(inside || (refs_[b] == 0 && !cached_[b]), "A1",
              "a block outside the pool is used:", b);
      require(!inside || (in_hole[b] != 0) == (refs_[b] == 0 && !cached_[b]), "A1",
              "not exactly one of hole, idle, live: block", b);
      require(refs_[b] > 0 || headroom_[b] == 0, "A4", "headroom behind the free block", b);
      live += refs_[b] > 0 ? 1 : 0;
      cached += cached_[b] ? 1 : 0;
      idle += refs_[b] == 0 && cached_[b] ? 1 : 0;
    }
    require(live == num_live_, "A2", "live blocks counted", live);
    require(cached == num_cached_, "A2", "cached blocks counted", cached);
    require(idle == num_idle_, "A3", "idle blocks counted", idle);
    require(live + num_free() == capacity(), "A1",
            "live + free is not the capacity:", live + num_free());
    int32_t listed = 0;
    BlockId previous = kNullBlock;
    for (BlockId b = lru_next_[kNullBlock]; b != kNullBlock; b = lru_next_[b]) {
      require(refs_[b] == 0 && cached_[b], "A3",
              "the LRU order holds a block that is not idle:", b);
      require(lru_prev_[b] == previous, "A3", "the LRU order is broken at", b);
      require(++listed <= idle, "A3", "the LRU order is a cycle at", b);
      previous = b;
    }
    require(listed == idle && lru_prev_[kNullBlock] == previous, "A3", "blocks in LRU order",
            listed);
  }

 private:
  static int32_t checked_alignment(int32_t num_blocks, int32_t alignment) {
    if (alignment < 1) throw UsageError(message("alignment=", alignment, " is below 1"));
    if (num_blocks - num_blocks % alignment <= alignment) {
      throw UsageError(message("num_blocks=", num_blocks, " leaves nothing to allocate: the first ",
                               alignment, " belong to the null block (alignment=", alignment, ")"));
    }
    return alignment;
  }

  void check_count(int32_t count) const {
    if (count < 0 || count % alignment_ != 0) {
      throw UsageError(
          message("count=", count, " is not a multiple of the alignment ", alignment_));
    }
  }

  void check_id(BlockId block) const {
    if (block < first_ || block >= end_) {
      throw UsageError(message("block ", block, " is outside the pool [", first_, ", ", end_, ")"));
    }
  }

  void check_range(BlockRange range) const {
    check_count(range.count);
    if (range.start < first_ || range.count > end_ - range.start) {
      throw UsageError(message("range [", range.start, ", ", range.end(), ") is outside the pool [",
                               first_, ", ", end_, ")"));
    }
    if (range.start % alignment_ != 0) {
      throw UsageError(message("range start ", range.start, " breaks the alignment ", alignment_));
    }
  }

  // A list that names a block twice would pass the look at its references and then free it twice.
  static void check_disjoint(const RangeList& blocks) {
    if (blocks.num_ranges() < 2) return;
    std::vector<BlockRange> sorted = blocks.ranges();
    std::sort(sorted.begin(), sorted.end(),
              [](const BlockRange& a, const BlockRange& b) { return a.start < b.start; });
    for (size_t i = 1; i < sorted.size(); ++i) {
      if (sorted[i].start < sorted[i - 1].end()) {
        throw UsageError(message("block ", sorted[i].start, " is named twice in one list"));
      }
    }
  }

  void lru_push(BlockId block) {
    const BlockId last = lru_prev_[kNullBlock];
    lru_next_[last] = block;
    lru_prev_[block] = last;
    lru_next_[block] = kNullBlock;
    lru_prev_[kNullBlock] = block;
    ++num_idle_;
  }

  void lru_remove(BlockId block) {
    lru_next_[lru_prev_[block]] = lru_next_[block];
    lru_prev_[lru_next_[block]] = lru_prev_[block];
    --num_idle_;
  }

  static void require(bool holds, const char* law, const char* what, int64_t value) {
    if (!holds) throw InvariantError(message("law ", law, " (allocator): ", what, " ", value));
  }

  BlockId first_;
  BlockId end_;
  int32_t alignment_;
  std::unique_ptr<PlacementPolicy> policy_;
  HoleIndex holes_;
  std::vector<int32_t> refs_;      // [block] requests that reference it
  std::vector<uint8_t> cached_;    // [block] 1 if the prefix cache references it
  std::vector<int32_t> headroom_;  // [block] growth hoped for behind a live tail, else 0
  std::vector<BlockId> lru_next_;  // [block] idle, oldest first; the null block is the anchor
  std::vector<BlockId> lru_prev_;
  int32_t num_live_ = 0;
  int32_t num_cached_ = 0;
  int32_t num_idle_ = 0;
};

}  // namespace tagma
