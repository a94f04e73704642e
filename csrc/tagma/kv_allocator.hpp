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
// "Free" means hole or idle: both can be given to the next request, as vLLM counts them. Where free
// blocks lie, and where new ones may go, is in free_spaces.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "tagma/block_bitmap.hpp"
#include "tagma/block_bounds.hpp"
#include "tagma/block_range.hpp"
#include "tagma/free_spaces.hpp"
#include "tagma/policy.hpp"

namespace tagma {

struct AllocatorOptions {
  int32_t num_blocks = 0;
  int32_t alignment = 1;
  Policy policy;
  bool idle_can_move = false;  // rooms hold all idle blocks
};

class KvAllocator {
 public:
  explicit KvAllocator(int32_t num_blocks, int32_t alignment = 1)
      : KvAllocator(AllocatorOptions{num_blocks, alignment, {}, false}) {}

  // Manages block ids [alignment, num_blocks rounded down to the alignment); ids below are the null
  // block's. With alignment > 1 every range starts at a multiple of it and every count is one, so
  // blocks cannot be cached, since the cache evicts them one by one. O(num_blocks).
  explicit KvAllocator(const AllocatorOptions& options)
      : bounds_(checked_bounds(options)),
        free_(bounds_, options.num_blocks, options.policy, options.idle_can_move),
        refs_(static_cast<size_t>(options.num_blocks), 0),
        cached_(static_cast<size_t>(options.num_blocks), 0) {}

  // Others refer to it.
  KvAllocator(const KvAllocator&) = delete;
  KvAllocator& operator=(const KvAllocator&) = delete;

  // Places `count` blocks behind `tail` (the null block for a new request) as one range where a
  // hole allows and in as few as can be found, each with one request reference, and appends
  // them to `out`. Uses holes only. Throws UsageError if fewer than `count` blocks are in holes
  // (the caller evicts first), `count` breaks the alignment, `headroom` is negative or `tail` is
  // not live; nothing has changed then. O(blocks + ranges placed times Policy::candidates).
  void allocate(int32_t count, int32_t headroom, BlockId tail, RangeList& out) {
    bounds_.check_count(count);
    if (count > holes().num_blocks()) {
      throw UsageError(message("allocate ", count, " blocks of ", holes().num_blocks(),
                               " in holes (", num_idle(), " idle ones could be evicted first)"));
    }
    check_wish(headroom, tail);
    free_.set_wish(tail, 0);
    int32_t left = count;
    while (left > 0) {
      const Placement placed = free_.choose_hole({left, 0, headroom, tail});
      free_.take_hole(placed.space_start, placed.range);
      become_live(placed.range);
      out.append(placed.range);
      left -= placed.range.count;
      tail = placed.range.end() - 1;
    }
    if (tail != kNullBlock) free_.set_wish(tail, headroom);
  }

  // A window in a room that is closed to every other use while its idle blocks move away one by
  // one. settle() ends it; without that, whatever the reason, the destructor opens the window again
  // with the blocks that are still in it.
  class Reservation {
   public:
    Reservation(KvAllocator& allocator, BlockRange window)
        : allocator_(allocator), window_(window) {
      allocator.bounds_.check_range(window);
      allocator.free_.close(window);
    }
    ~Reservation() {
      if (settled_) return;
      allocator_.free_.reopen(window_, [this](BlockId b) { return allocator_.cached_[b] != 0; });
    }
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;

    // The idle block `from`, in the window, goes to `to`, a block in a hole. O(1).
    void relocate(BlockId from, BlockId to) {
      allocator_.free_.relocate_idle(from, to);
      allocator_.cached_[from] = 0;
      allocator_.cached_[to] = 1;
    }

    // Nothing idle is left in the window: its first `count` blocks become live, with one request
    // reference each, and the rest a hole.
    void settle(int32_t count) {
      allocator_.free_.open_rest(window_.behind(count));
      allocator_.become_live({window_.start, count});
      settled_ = true;
    }

   private:
    KvAllocator& allocator_;
    BlockRange window_;
    bool settled_ = false;
  };

  // Ranges that lie in rooms, closed to placement for as long as this lives.
  class HiddenRooms {
   public:
    explicit HiddenRooms(KvAllocator& allocator) : allocator_(allocator) {}
    ~HiddenRooms() {
      for (const BlockRange range : ranges_) allocator_.free_.add_room(range);
    }
    HiddenRooms(const HiddenRooms&) = delete;
    HiddenRooms& operator=(const HiddenRooms&) = delete;

    void hide(BlockRange range) {
      if (range.count <= 0) return;
      ranges_.push_back(range);
      allocator_.free_.take_room(range);
    }

   private:
    KvAllocator& allocator_;
    std::vector<BlockRange> ranges_;
  };

  // How many blocks the owner of the live block `tail` hopes to grow into behind it.
  void set_headroom(BlockId tail, int32_t headroom) {
    check_wish(headroom, tail);
    free_.set_wish(tail, tail == kNullBlock ? 0 : headroom);
  }
  int32_t headroom_behind(BlockId block) const { return free_.wish_behind(block); }
  // How many idle blocks, from the oldest, are cold. O(difference to the slack so far).
  void set_slack(int32_t blocks) { free_.set_slack(blocks); }
  // Drops every wish for room to grow. O(num_blocks).
  void forget_headroom() { free_.forget_wishes(); }

  // The cache's reference passes from one live block to another. Throws UsageError if it has none
  // to `from`, has one to `to`, or one of them is not live. O(1).
  void transfer_cache(BlockId from, BlockId to) {
    bounds_.check_id(from);
    bounds_.check_id(to);
    if (refs_[from] == 0 || refs_[to] == 0 || !cached_[from] || cached_[to]) {
      throw UsageError(message("transfer the cache reference of block ", from, " to ", to));
    }
    cached_[from] = 0;
    cached_[to] = 1;
  }

  // True if one request and no other references these live blocks. O(blocks).
  bool is_private(BlockRange range) const {
    int32_t others = 0;  // no early exit: a loop that the compiler turns into vector instructions
    for (BlockId b = range.start; b < range.end(); ++b) others += refs_[b] != 1 ? 1 : 0;
    return others == 0;
  }

  // One more request, or pin, references these blocks; idle ones leave the LRU order. Null runs are
  // skipped. Throws UsageError, and changes nothing, if a block is in a hole or named twice.
  // O(blocks).
  void acquire(const RangeList& blocks) {
    bounds_.check_disjoint(blocks);
    for (const BlockRange& range : blocks.ranges()) {
      if (range.is_null()) continue;
      bounds_.check_range(range);
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (refs_[b] == 0 && !cached_[b]) {
          throw UsageError(message("block ", b, " is free: a stale prefix hit"));
        }
      }
    }
    for (const BlockRange& range : blocks.ranges()) {
      if (range.is_null()) continue;
      for (BlockId b = range.start; b < range.end();) {
        BlockRange idle{b, 0};
        while (idle.end() < range.end() && refs_[idle.end()] == 0) ++idle.count;
        if (idle.count > 0) {
          free_.take_room(idle);
          free_.take_idle(idle);
          num_live_ += idle.count;
        }
        for (; b < idle.end(); ++b) refs_[b] = 1;
        for (; b < range.end() && refs_[b] > 0; ++b) ++refs_[b];
      }
    }
    free_.cool_down();
  }

  // A row ends: its wish for room, and its references as by unreference(). O(blocks).
  void release(const RangeList& blocks) {
    const bool only_ours = check_referenced(blocks);
    free_.set_wish(blocks.tail(), 0);
    drop_references(blocks, only_ours);
  }

  // One request, or pin, drops its references, tail first: of its cached blocks the last becomes
  // the first to be evicted, so that no cached block outlives its prefix. Null runs are skipped.
  // Throws UsageError, and changes nothing, on a double free or a foreign id. O(blocks).
  void unreference(const RangeList& blocks) { drop_references(blocks, check_referenced(blocks)); }

  // The cache takes its reference to a live block. Throws UsageError if it holds one already, the
  // block is not live, or the alignment is not 1. O(1).
  void cache(BlockId block) {
    bounds_.check_id(block);
    if (bounds_.alignment != 1) {
      throw UsageError(message("blocks of a pool with alignment ", bounds_.alignment,
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
    bounds_.check_id(block);
    if (!cached_[block]) throw UsageError(message("block ", block, " is not cached"));
    cached_[block] = 0;
    --num_cached_;
    if (refs_[block] > 0) return;
    free_.drop_idle(block);
    free_.cool_down();
  }

  // The idle block unused for longest, or the null block. O(1).
  BlockId lru_victim() const { return free_.lru().oldest(); }

  // Maximal ranges of blocks that no request references, in address order. O(num_blocks).
  std::vector<BlockRange> unreferenced() const {
    std::vector<BlockRange> out;
    for (BlockId b = bounds_.first; b < bounds_.end; ++b) {
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
      if (range.is_null()) continue;
      bounds_.check_range(range);
      for (BlockId b = range.start; b < range.end(); ++b) idle += refs_[b] == 0 ? 1 : 0;
    }
    return idle;
  }

  // Requests and pins that reference a block.
  int32_t request_refs(BlockId block) const {
    bounds_.check_id(block);
    return refs_[block];
  }
  bool is_cached(BlockId block) const {
    bounds_.check_id(block);
    return cached_[block] != 0;
  }
  bool is_cold(BlockId block) const { return free_.lru().is_cold(block); }

  // Where free blocks lie and new ones may go.
  const FreeSpaces& free_spaces() const { return free_; }
  const HoleIndex& holes() const { return free_.holes(); }
  const HoleIndex& rooms() const { return free_.rooms(); }

  const BlockBounds& bounds() const { return bounds_; }
  int32_t num_blocks() const { return static_cast<int32_t>(refs_.size()); }
  int32_t alignment() const { return bounds_.alignment; }
  int32_t capacity() const { return bounds_.all().count; }
  int32_t num_free() const { return free_.num_free(); }
  int32_t num_idle() const { return free_.lru().size(); }
  int32_t num_live() const { return num_live_; }
  int32_t num_cached() const { return num_cached_; }
  int32_t slack() const { return free_.lru().slack(); }
  int64_t num_cold_hits() const { return free_.num_cold_taken(); }
  bool has_rooms() const { return free_.has_rooms(); }
  bool idle_can_move() const { return free_.idle_can_move(); }

  size_t memory_bytes() const {
    return free_.memory_bytes() + cached_.capacity() + refs_.capacity() * sizeof(int32_t);
  }

  // Laws A1 to A6. Throws InvariantError. O(num_blocks).
  void check_invariants() const {
    free_.check_invariants(
        num_blocks(), [this](BlockId b) { return bounds_.contains(b) && refs_[b] == 0; },
        [this](BlockId b) { return cached_[b] != 0; });
    int32_t live = 0;
    int32_t cached = 0;
    int32_t idle = 0;
    for (BlockId b = 0; b < num_blocks(); ++b) {
      const bool inside = bounds_.contains(b);
      require(refs_[b] >= 0, "A2 (allocator)", "negative references on block", b);
      require(inside || (refs_[b] == 0 && !cached_[b]), "A1 (allocator)",
              "a block outside the pool is used:", b);
      require(refs_[b] > 0 || headroom_behind(b) == 0, "A4 (allocator)",
              "headroom behind the free block", b);
      live += refs_[b] > 0 ? 1 : 0;
      cached += cached_[b] ? 1 : 0;
      idle += refs_[b] == 0 && cached_[b] ? 1 : 0;
    }
    require(live == num_live_, "A2 (allocator)", "live blocks counted", live);
    require(cached == num_cached_, "A2 (allocator)", "cached blocks counted", cached);
    require(idle == num_idle(), "A3 (allocator)", "idle blocks counted", idle);
    require(live + num_free() == capacity(), "A1 (allocator)",
            "live + free is not the capacity:", live + num_free());
  }

 private:
  static BlockBounds checked_bounds(const AllocatorOptions& options) {
    options.policy.check();
    if (options.alignment > 1 && (options.idle_can_move || options.policy.has_slack())) {
      throw UsageError(message("alignment=", options.alignment,
                               " with compaction or slack: both move or "
                               "evict blocks one by one; use alignment 1 or turn them off"));
    }
    return BlockBounds::of(options.num_blocks, options.alignment);
  }

  void check_wish(int32_t headroom, BlockId tail) const {
    if (headroom < 0) throw UsageError(message("headroom=", headroom, " is negative"));
    if (tail == kNullBlock) return;
    bounds_.check_id(tail);
    if (refs_[tail] == 0) throw UsageError(message("the tail, block ", tail, ", is not live"));
  }

  // True if nobody else references any of these blocks.
  bool check_referenced(const RangeList& blocks) const {
    bool only_ours = true;
    bounds_.check_disjoint(blocks);
    for (const BlockRange& range : blocks.ranges()) {
      if (range.is_null()) continue;
      bounds_.check_range(range);
      if (is_private(range)) continue;
      only_ours = false;
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (refs_[b] == 0) throw UsageError(message("double free of block ", b));
      }
    }
    return only_ours;
  }

  void drop_references(const RangeList& blocks, bool only_ours) {
    const bool to_holes = only_ours && num_cached_ == 0;  // all of it, without a look at each block
    const std::vector<BlockRange>& ranges = blocks.ranges();
    for (size_t i = ranges.size(); i-- > 0;) {
      if (ranges[i].is_null()) continue;
      if (to_holes) {
        become_hole(ranges[i]);
      } else {
        drop_references(ranges[i]);
      }
    }
    free_.cool_down();
  }

  // Downwards, so that the tail becomes the oldest, in runs of blocks that become the same.
  void drop_references(BlockRange range) {
    const bool all_last = is_private(range);
    BlockRange opened{range.end(), 0};  // into a room
    for (BlockId end = range.end(); end > range.start;) {
      const BlockRange run = run_before(end, range.start, all_last);
      end = run.start;
      if (refs_[run.start] > 1) {
        for (BlockId b = run.start; b < run.end(); ++b) --refs_[b];
        free_.add_room(opened);
        opened = {run.start, 0};
        continue;
      }
      std::fill_n(refs_.begin() + run.start, run.count, 0);
      num_live_ -= run.count;
      if (cached_[run.start]) {
        free_.push_idle(run);
      } else {
        free_.add_hole(run);
      }
      opened = {run.start, opened.count + run.count};
    }
    free_.add_room(opened);
  }

  // The longest run that ends before `end`, not below `first`, whose blocks all have one reference
  // and are cached, or are not, or all have more. `all_last`: one each, known beforehand.
  BlockRange run_before(BlockId end, BlockId first, bool all_last) const {
    BlockId start = end - 1;
    const uint8_t cached = cached_[start];
    if (all_last) {
      uint64_t eight = 0;
      const uint64_t alike = cached != 0 ? ~uint64_t{0} / 0xff : 0;
      for (; start - first >= 8; start -= 8) {
        std::memcpy(&eight, &cached_[start - 8], sizeof(eight));
        if (eight != alike) break;
      }
      while (start > first && cached_[start - 1] == cached) --start;
    } else if (refs_[start] > 1) {
      while (start > first && refs_[start - 1] > 1) --start;
    } else {
      while (start > first && refs_[start - 1] == 1 && cached_[start - 1] == cached) --start;
    }
    return {start, end - start};
  }

  void become_live(BlockRange range) {
    std::fill_n(refs_.begin() + range.start, range.count, 1);
    num_live_ += range.count;
  }

  void become_hole(BlockRange range) {
    std::fill_n(refs_.begin() + range.start, range.count, 0);
    num_live_ -= range.count;
    free_.add_hole(range);
    free_.add_room(range);
  }

  BlockBounds bounds_;
  FreeSpaces free_;
  std::vector<int32_t> refs_;    // [block] requests and pins that reference it
  std::vector<uint8_t> cached_;  // [block] 1 if the prefix cache references it
  int32_t num_live_ = 0;
  int32_t num_cached_ = 0;
};

}  // namespace tagma
