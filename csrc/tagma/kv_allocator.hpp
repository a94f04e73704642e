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
//
// A room is a maximal range of blocks that a new range may cover after the idle blocks in it are
// evicted or moved away: all free blocks if idle blocks may be moved, else holes and cold idle
// blocks (see LruOrder).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tagma/block_bitmap.hpp"
#include "tagma/block_bounds.hpp"
#include "tagma/block_range.hpp"
#include "tagma/block_space.hpp"
#include "tagma/lru_order.hpp"
#include "tagma/placement.hpp"

namespace tagma {

struct AllocatorOptions {
  int32_t num_blocks = 0;
  int32_t alignment = 1;
  int32_t slack = 0;           // idle blocks that are cold: may be evicted before older ones
  bool idle_can_move = false;  // rooms hold all idle blocks
};

class KvAllocator {
 public:
  explicit KvAllocator(int32_t num_blocks, int32_t alignment = 1,
                       std::unique_ptr<PlacementPolicy> policy = nullptr)
      : KvAllocator(AllocatorOptions{num_blocks, alignment}, std::move(policy)) {}

  // Manages block ids [alignment, num_blocks rounded down to the alignment); ids below are the null
  // block's. With alignment > 1 every range starts at a multiple of it and every count is one, so
  // blocks cannot be cached, since the cache evicts them one by one. O(num_blocks).
  explicit KvAllocator(const AllocatorOptions& options,
                       std::unique_ptr<PlacementPolicy> policy = nullptr)
      : bounds_(BlockBounds::of(options.num_blocks, options.alignment)),
        idle_can_move_(options.idle_can_move),
        has_rooms_(options.idle_can_move || options.slack > 0),
        policy_(policy ? std::move(policy) : std::make_unique<BestFitPlacement>()),
        holes_(options.num_blocks, has_rooms_ ? Kind::kByAnyBlock : Kind::kByRange),
        open_(options.num_blocks, has_rooms_ ? Kind::kByAnyBlock : Kind::kAbsent),
        rooms_(options.num_blocks, idle_can_move_ ? Kind::kByAnyBlock : Kind::kAbsent),
        warm_(has_rooms_ ? options.num_blocks : 1),
        lru_(options.num_blocks, options.slack),
        refs_(static_cast<size_t>(options.num_blocks), 0),
        cached_(static_cast<size_t>(options.num_blocks), 0),
        headroom_(static_cast<size_t>(options.num_blocks), 0) {
    if (has_rooms_ && bounds_.alignment != 1) {
      throw UsageError(message("alignment=", bounds_.alignment,
                               " with compaction or slack: both move or "
                               "evict blocks one by one; use alignment 1 or turn them off"));
    }
    add_hole(bounds_.all());
    rooms_.add(bounds_.all());
  }

  // Places `count` blocks behind `tail` (the null block for a new request) as one range where a
  // hole allows and in as few as the policy finds, each with one request reference, and appends
  // them to `out`. Uses holes only. Throws UsageError if fewer than `count` blocks are in holes
  // (the caller evicts first), `count` breaks the alignment, `headroom` is negative or `tail` is
  // not live; nothing has changed then. O(blocks + ranges placed times the policy's bound).
  void allocate(int32_t count, int32_t headroom, BlockId tail, RangeList& out) {
    bounds_.check_count(count);
    if (count > holes_.num_blocks()) {
      throw UsageError(message("allocate ", count, " blocks of ", holes_.num_blocks(),
                               " in holes (", num_idle(), " idle ones could be evicted first)"));
    }
    check_wish(headroom, tail);
    headroom_[tail] = 0;
    int32_t left = count;
    while (left > 0) {
      const Placement placed = policy_->place(free_holes(), {left, 0, headroom, tail});
      holes_.carve(placed.space_start, placed.range);
      open_.take(placed.range);
      rooms_.take(placed.range);
      become_live(placed.range);
      out.append(placed.range);
      left -= placed.range.count;
      tail = placed.range.end() - 1;
    }
    if (tail != kNullBlock) headroom_[tail] = headroom;
  }

  // Where the policy wants (a part of) these blocks, in one of the rooms; of count 0 if there is no
  // room at all. Changes nothing.
  Placement choose_room(int32_t count, int32_t certain, int32_t headroom, BlockId tail) const {
    if (rooms().num_blocks() == 0) return {kNullBlock, {kNullBlock, 0}};
    const PlacementRequest request{count, certain, headroom, tail};
    if (!has_rooms_) return policy_->place(free_holes(), request);
    const int32_t evictable = std::max(count + certain - holes_.num_blocks(), 0);
    return policy_->place({rooms(), headroom_, bounds_.alignment, &warm_, &used(), evictable},
                          request);
  }

  // A place for all of these blocks and the headroom that takes no move and no eviction but of cold
  // blocks that must go anyway; count 0 if there is none. Changes nothing.
  BlockRange choose_open(int32_t count, int32_t headroom) const {
    const PlacementRequest request{count, 0, headroom, kNullBlock};
    const BlockRange hole = policy_->place_politely(free_holes(), request).range;
    const int32_t evictable = count - holes_.num_blocks();
    if (hole.count > 0 || evictable <= 0) return hole;
    const Choices open{open_.ranges(), headroom_, bounds_.alignment, &warm_, &used(), evictable};
    const BlockRange found = policy_->place_politely(open, request).range;
    return found.count > 0 && used().count(found) <= evictable ? found : BlockRange{kNullBlock, 0};
  }

  // Where (some of) `count` idle blocks may go that make room for others: a hole that fits, or
  // holes and cold blocks, to be evicted, that lie together. Count 0 if there is neither.
  BlockRange choose_for_idle(int32_t count) const {
    const Placement hole = policy_->place_idle(free_holes(), count);
    if (hole.range.count == count || open_.num_blocks() == 0 ||
        holes_.num_blocks() > num_blocks() / kHolesToSpare) {
      return hole.range;
    }
    return policy_
        ->place_idle({open_.ranges(), headroom_, bounds_.alignment, nullptr, nullptr, 0}, count)
        .range;
  }

  // Closes a window in a room to every other use; its idle blocks stay where they are. To be
  // followed by relocate_idle() for each of these, and settle().
  void reserve(BlockRange window) {
    bounds_.check_range(window);
    BlockId at = window.start;
    while (at < window.end()) {  // holes and runs of idle blocks, in turn
      const BlockId idle = used().next_member(at, window.end());
      const BlockRange hole{at, idle - at};
      holes_.take(hole);
      open_.take(hole);
      for (at = idle; at < window.end() && !holes_.contains(at); ++at) {
        if (lru_.is_cold(at)) open_.take({at, 1});
      }
    }
    rooms_.take(window);
    reserved_ = window;
  }

  // The idle block `from`, in a reserved window, goes to `to`, a block in a hole. O(1).
  void relocate_idle(BlockId from, BlockId to) {
    holes_.take({to, 1});
    if (!lru_.is_cold(from)) open_.take({to, 1});
    cached_[from] = 0;
    cached_[to] = 1;
    lru_.replace(from, to);
    if (warm_.contains(from)) {
      warm_.erase(from);
      warm_.insert(to);
    }
  }

  // Of a reserved window without idle blocks, the first `count` become live, with one request
  // reference each, and the rest a hole.
  void settle(BlockRange window, int32_t count) {
    reserved_ = {0, 0};
    const BlockRange rest{window.start + count, window.count - count};
    add_hole(rest);
    rooms_.add(rest);
    become_live({window.start, count});
  }

  // How many blocks the owner of the live block `tail` hopes to grow into behind it.
  void set_headroom(BlockId tail, int32_t headroom) {
    check_wish(headroom, tail);
    headroom_[tail] = tail == kNullBlock ? 0 : headroom;
  }
  int32_t headroom_behind(BlockId block) const { return headroom_[block]; }

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

  // Closes a range that lies in a room to placement, and opens it again.
  void hide_room(BlockRange range) { rooms_.take(range); }
  void show_room(BlockRange range) { rooms_.add(range); }

  // Drops every wish for room to grow. O(num_blocks).
  void forget_headroom() { std::fill(headroom_.begin(), headroom_.end(), 0); }

  // One more request references these blocks; idle ones leave the LRU order. Throws UsageError,
  // and changes nothing, if one of them is in a hole or named twice. O(blocks).
  void acquire(const RangeList& blocks) {
    bounds_.check_disjoint(blocks);
    for (const BlockRange& range : blocks.ranges()) {
      bounds_.check_range(range);
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (refs_[b] == 0 && !cached_[b]) {
          throw UsageError(message("block ", b, " is free: a stale prefix hit"));
        }
      }
    }
    for (const BlockRange& range : blocks.ranges()) {
      BlockRange closed{range.start, 0};
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (refs_[b]++ > 0) continue;
        if (lru_.is_cold(b)) open_.take({b, 1});
        if (closed.end() == b) {
          ++closed.count;
        } else {
          rooms_.take(closed);
          closed = {b, 1};
        }
        leave_lru(b);
        ++num_live_;
      }
      rooms_.take(closed);
    }
    cool_down();
  }

  // One request drops its references, tail first: of its cached blocks the last becomes the first
  // to be evicted, so that no cached block outlives its prefix. Throws UsageError, and changes
  // nothing, on a double free or a foreign id. O(blocks).
  void release(const RangeList& blocks) {
    bounds_.check_disjoint(blocks);
    bool only_ours =
        num_cached_ == 0;  // then all of it becomes holes, without a look at each block
    for (const BlockRange& range : blocks.ranges()) {
      bounds_.check_range(range);
      if (is_private(range)) continue;
      only_ours = false;
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (refs_[b] == 0) throw UsageError(message("double free of block ", b));
      }
    }
    if (!blocks.empty()) headroom_[blocks.tail()] = 0;
    const std::vector<BlockRange>& ranges = blocks.ranges();
    for (size_t i = ranges.size(); i-- > 0;) {
      if (only_ours) {
        become_hole(ranges[i]);
      } else {
        release(ranges[i]);
      }
    }
    cool_down();
  }

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
    const bool was_open = lru_.is_cold(block);
    leave_lru(block);
    holes_.add({block, 1});
    if (!was_open) open_.add({block, 1});
    cool_down();
  }

  // The idle block unused for longest, or the null block. O(1).
  BlockId lru_victim() const { return lru_.oldest(); }

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

  // Blocks that are in no hole: in a room, the idle ones. Only kept if there are rooms.
  const BlockBitmap& used() const { return holes_.outside(); }
  bool is_cold(BlockId block) const { return lru_.is_cold(block); }
  // Warm idle blocks in a range: what must be moved before it can be occupied.
  int32_t num_warm(BlockRange range) const { return warm_.count(range); }
  // The room around a block, of count 0 if it lies in none.
  BlockRange room_around(BlockId block) const {
    return idle_can_move_ ? rooms_.around(block) : open_.around(block);
  }

  // Idle blocks among these: what a prefix hit takes away from the free count. O(blocks).
  int32_t count_idle(const RangeList& blocks) const {
    int32_t idle = 0;
    for (const BlockRange& range : blocks.ranges()) {
      bounds_.check_range(range);
      for (BlockId b = range.start; b < range.end(); ++b) idle += refs_[b] == 0 ? 1 : 0;
    }
    return idle;
  }

  int32_t request_refs(BlockId block) const {
    bounds_.check_id(block);
    return refs_[block];
  }
  bool is_cached(BlockId block) const {
    bounds_.check_id(block);
    return cached_[block] != 0;
  }

  int32_t num_blocks() const { return static_cast<int32_t>(refs_.size()); }
  int32_t alignment() const { return bounds_.alignment; }
  int32_t capacity() const { return bounds_.all().count; }
  int32_t num_free() const { return holes_.num_blocks() + lru_.size(); }
  int32_t num_idle() const { return lru_.size(); }
  int32_t num_live() const { return num_live_; }
  int32_t num_cached() const { return num_cached_; }
  int32_t slack() const { return lru_.slack(); }
  bool has_rooms() const { return has_rooms_; }
  bool idle_can_move() const { return idle_can_move_; }
  const HoleIndex& holes() const { return holes_.ranges(); }
  const HoleIndex& rooms() const {
    return (idle_can_move_ ? rooms_ : has_rooms_ ? open_ : holes_).ranges();
  }

  size_t memory_bytes() const {
    return holes_.memory_bytes() + open_.memory_bytes() + rooms_.memory_bytes() +
           warm_.memory_bytes() + lru_.memory_bytes() + cached_.capacity() +
           (refs_.capacity() + headroom_.capacity()) * sizeof(int32_t);
  }

  // Laws A1 to A6. Throws InvariantError. O(num_blocks).
  void check_invariants() const {
    holes_.check_invariants(num_blocks(), [this](BlockId b) { return is_free(b) && !cached_[b]; });
    open_.check_invariants(
        num_blocks(), [this](BlockId b) { return is_free(b) && (!cached_[b] || lru_.is_cold(b)); });
    rooms_.check_invariants(num_blocks(), [this](BlockId b) { return is_free(b); });
    holes_.ranges().visit_by_address([&](BlockRange hole) {
      require(hole.start % bounds_.alignment == 0 && hole.count % bounds_.alignment == 0, "A5",
              "an unaligned hole at", hole.start);
    });
    int32_t live = 0;
    int32_t cached = 0;
    int32_t idle = 0;
    for (BlockId b = 0; b < num_blocks(); ++b) {
      const bool inside = bounds_.contains(b);
      require(refs_[b] >= 0, "A2", "negative references on block", b);
      require(inside || (refs_[b] == 0 && !cached_[b]), "A1",
              "a block outside the pool is used:", b);
      require(warm_.num_ids() <= b || warm_.contains(b) == (idle_can_move_ && refs_[b] == 0 &&
                                                            cached_[b] && !lru_.is_cold(b)),
              "A6", "warm or not: block", b);
      require(refs_[b] > 0 || headroom_[b] == 0, "A4", "headroom behind the free block", b);
      live += refs_[b] > 0 ? 1 : 0;
      cached += cached_[b] ? 1 : 0;
      idle += refs_[b] == 0 && cached_[b] ? 1 : 0;
    }
    require(live == num_live_, "A2", "live blocks counted", live);
    require(cached == num_cached_, "A2", "cached blocks counted", cached);
    require(idle == num_idle(), "A3", "idle blocks counted", idle);
    require(live + num_free() == capacity(), "A1",
            "live + free is not the capacity:", live + num_free());
    lru_.check_invariants([this](BlockId b) { return refs_[b] == 0 && cached_[b] != 0; });
  }

 private:
  using Kind = BlockSpace::Kind;

  // As long as holes are fewer than one in so many blocks, moved blocks may have cold ones evicted
  // for the sake of their new place.
  static constexpr int32_t kHolesToSpare = 400;

  Choices free_holes() const {
    return {holes_.ranges(), headroom_, bounds_.alignment, nullptr, nullptr, 0};
  }

  void check_wish(int32_t headroom, BlockId tail) const {
    if (headroom < 0) throw UsageError(message("headroom=", headroom, " is negative"));
    if (tail == kNullBlock) return;
    bounds_.check_id(tail);
    if (refs_[tail] == 0) throw UsageError(message("the tail, block ", tail, ", is not live"));
  }

  void become_live(BlockRange range) {
    std::fill_n(refs_.begin() + range.start, range.count, 1);
    num_live_ += range.count;
  }

  void become_hole(BlockRange range) {
    std::fill_n(refs_.begin() + range.start, range.count, 0);
    num_live_ -= range.count;
    add_hole(range);
    rooms_.add(range);
  }

  // Downwards, so that the tail becomes the oldest.
  void release(BlockRange range) {
    BlockRange freed{range.end(), 0};   // into a hole
    BlockRange opened{range.end(), 0};  // into a room
    for (BlockId b = range.end() - 1; b >= range.start; --b) {
      const bool last = --refs_[b] == 0;
      if (last) --num_live_;
      if (last && !cached_[b]) {
        freed = {b, freed.count + 1};
      } else {
        if (last) enter_lru(b);
        add_hole(freed);
        freed = {b, 0};
      }
      if (last) {
        opened = {b, opened.count + 1};
      } else {
        rooms_.add(opened);
        opened = {b, 0};
      }
    }
    add_hole(freed);
    rooms_.add(opened);
  }

  void add_hole(BlockRange range) {
    holes_.add(range);
    open_.add(range);
  }

  bool is_free(BlockId b) const { return bounds_.contains(b) && refs_[b] == 0; }

  void enter_lru(BlockId block) {
    lru_.push(block);
    if (idle_can_move_) warm_.insert(block);
  }
  void leave_lru(BlockId block) {
    lru_.remove(block);
    if (idle_can_move_) warm_.erase(block);
  }

  void cool_down() {
    for (BlockId b = lru_.cool(); b != kNullBlock; b = lru_.cool()) {
      if (idle_can_move_) warm_.erase(b);
      const bool reserved = b >= reserved_.start && b < reserved_.end();
      if (!reserved) open_.add({b, 1});
    }
  }

  static void require(bool holds, const char* law, const char* what, int64_t value) {
    if (!holds) throw InvariantError(message("law ", law, " (allocator): ", what, " ", value));
  }

  BlockBounds bounds_;
  bool idle_can_move_;
  bool has_rooms_;  // rooms are kept apart from holes
  std::unique_ptr<PlacementPolicy> policy_;
  BlockSpace holes_;
  BlockSpace open_;   // holes and cold blocks
  BlockSpace rooms_;  // all free blocks, if idle ones can move
  BlockBitmap warm_;  // idle and not cold, if idle blocks can move
  LruOrder lru_;
  std::vector<int32_t> refs_;      // [block] requests that reference it
  std::vector<uint8_t> cached_;    // [block] 1 if the prefix cache references it
  std::vector<int32_t> headroom_;  // [block] growth hoped for behind a live tail, else 0
  BlockRange reserved_;            // between reserve() and settle()
  int32_t num_live_ = 0;
  int32_t num_cached_ = 0;
};

}  // namespace tagma
