// The free blocks of a pool by what can be done with them, and the choice of a place among them.
//
//   holes   nobody needs what is in them
//   open    holes and cold idle blocks, which may be evicted before their turn
//   rooms   all free blocks, if idle ones can move away
//
// A room, for placement, is a maximal range of the widest of these kinds that the pool has: what a
// new range may cover after the idle blocks in it are evicted or moved. See LruOrder for cold.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tagma/block_bitmap.hpp"
#include "tagma/block_bounds.hpp"
#include "tagma/block_space.hpp"
#include "tagma/lru_order.hpp"
#include "tagma/placement.hpp"
#include "tagma/policy.hpp"

namespace tagma {

class FreeSpaces {
 public:
  // All blocks inside the bounds are one hole. O(num_blocks).
  FreeSpaces(const BlockBounds& bounds, int32_t num_blocks, const Policy& policy,
             bool idle_can_move)
      : bounds_(bounds),
        idle_can_move_(idle_can_move),
        has_rooms_(idle_can_move || policy.has_slack()),
        spare_holes_(std::min(num_blocks / policy.spare_holes_share, policy.slack)),
        placement_(policy.candidates),
        holes_(num_blocks, has_rooms_ ? Kind::kByAnyBlock : Kind::kByRange),
        open_(num_blocks, has_rooms_ ? Kind::kByAnyBlock : Kind::kAbsent),
        rooms_(num_blocks, idle_can_move_ ? Kind::kByAnyBlock : Kind::kAbsent),
        warm_(has_rooms_ ? num_blocks : 1),
        lru_(num_blocks, policy.slack),
        wish_(static_cast<size_t>(num_blocks), 0) {
    add_hole(bounds_.all());
    rooms_.add(bounds_.all());
  }

  // --- where blocks may go; nothing changes -----------------------------------------------------

  // (A part of) the blocks, in a hole. At least one hole exists.
  Placement choose_hole(const PlacementRequest& request) const {
    return placement_.place(in_holes(), request);
  }

  // Where (a part of) these blocks may go, in one of the rooms; of count 0 if there is no room.
  // Behind the tail; else where nothing must move, if there is such a place.
  Placement choose_room(int32_t count, int32_t certain, int32_t headroom, BlockId tail) const {
    if (rooms().num_blocks() == 0) return {kNullBlock, {kNullBlock, 0}};
    const PlacementRequest request{count, certain, headroom, tail};
    if (!has_rooms_) return choose_hole(request);
    const int32_t evictable = std::max(count + certain - holes_.num_blocks(), 0);
    if (tail == kNullBlock || rooms().hole_at(tail + 1).count == 0) {
      const Placement open = place_openly({count, 0, std::max(certain, headroom), tail}, evictable);
      if (open.range.count > 0) return open;
    }
    return placement_.place({rooms(), wish_, bounds_.alignment, &warm_, &used(), evictable},
                            request);
  }

  // Where (some of) `count` idle blocks may go that make room for others: a hole that fits, or
  // holes and cold blocks, to be evicted, that lie together. Count 0 if there is neither.
  BlockRange choose_for_idle(int32_t count) const {
    const Placement hole = placement_.place_idle(in_holes(), count);
    if (hole.range.count == count || open_.num_blocks() == 0 ||
        holes_.num_blocks() > spare_holes_) {
      return hole.range;
    }
    return placement_
        .place_idle({open_.ranges(), wish_, bounds_.alignment, nullptr, nullptr, 0}, count)
        .range;
  }

  // --- blocks that change between hole, idle and live -------------------------------------------

  // A part of the hole at `hole_start` becomes live.
  void take_hole(BlockId hole_start, BlockRange range) {
    holes_.carve(hole_start, range);
    open_.take(range);
    rooms_.take(range);
  }

  // Blocks become a hole; to be followed by add_room() if they were live.
  void add_hole(BlockRange range) {
    holes_.add(range);
    open_.add(range);
  }
  void add_room(BlockRange range) { rooms_.add(range); }
  void take_room(BlockRange range) { rooms_.take(range); }

  // Live blocks become idle, the last of them first and the first the newest; to be followed by
  // add_room(). O(blocks).
  void push_idle(BlockRange range) {
    lru_.push_backwards(range);
    if (idle_can_move_) warm_.insert(range);
  }

  // Idle blocks become live; to be followed by take_room(). O(blocks).
  void take_idle(BlockRange range) {
    if (lru_.num_cold() > 0) {
      for (const BlockRange& cold : lru_.cold().runs(range)) {
        open_.take(cold);
        num_cold_taken_ += cold.count;
      }
    }
    lru_.remove(range);
    if (idle_can_move_) warm_.erase(range);
  }

  // An idle block becomes (part of) a hole.
  void drop_idle(BlockId block) {
    const bool was_open = lru_.is_cold(block);
    lru_.remove(block);
    if (idle_can_move_) warm_.erase(block);
    holes_.add({block, 1});
    if (!was_open) open_.add({block, 1});
  }

  // Makes as many of the oldest idle blocks cold as the slack allows. To be called when idle blocks
  // have left or come. O(blocks that become cold).
  void cool_down() {
    for (BlockRange run = lru_.cool(); run.count > 0; run = lru_.cool()) {
      if (idle_can_move_) warm_.erase(run);
      if (reserved_.count == 0) {
        open_.add(run);
        continue;
      }
      for (BlockId b = run.end() - 1; b >= run.start; --b) {
        if (!reserved_.contains(b)) open_.add({b, 1});
      }
    }
  }

  // Not while a window is closed. O(difference to the slack so far).
  void set_slack(int32_t blocks) {
    lru_.set_slack(blocks);
    for (BlockId b = lru_.warm_up(); b != kNullBlock; b = lru_.warm_up()) {
      if (idle_can_move_) warm_.insert(b);
      open_.take({b, 1});
    }
    cool_down();
  }

  // --- reservations (see kv_allocator.hpp) ------------------------------------------------------

  // Closes a window in a room to every other use; its idle blocks stay in the LRU order.
  void close(BlockRange window) {
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

  // Opens a closed window again; is_idle(block) says which of its blocks are idle, the others are
  // holes.
  template <typename IsIdle>
  void reopen(BlockRange window, IsIdle&& is_idle) {
    reserved_ = {};
    for (BlockId b = window.start; b < window.end();) {
      if (is_idle(b)) {
        if (lru_.is_cold(b)) open_.add({b, 1});
        ++b;
        continue;
      }
      BlockRange hole{b, 0};
      for (; b < window.end() && !is_idle(b); ++b) ++hole.count;
      add_hole(hole);
    }
    rooms_.add(window);
  }

  // A closed window has no idle blocks any more; from `rest` on it becomes a hole.
  void open_rest(BlockRange rest) {
    reserved_ = {};
    if (rest.count == 0) return;
    add_hole(rest);
    rooms_.add(rest);
  }

  // The idle block `from`, in a closed window, is at `to` from now on, a block in a hole. O(1).
  void relocate_idle(BlockId from, BlockId to) {
    holes_.take({to, 1});
    if (!lru_.is_cold(from)) open_.take({to, 1});
    lru_.replace(from, to);
    if (warm_.contains(from)) {
      warm_.erase(from);
      warm_.insert(to);
    }
  }

  // --- wishes for room to grow ------------------------------------------------------------------

  void set_wish(BlockId tail, int32_t blocks) { wish_[tail] = blocks; }
  int32_t wish_behind(BlockId block) const { return wish_[block]; }
  void forget_wishes() { std::fill(wish_.begin(), wish_.end(), 0); }

  // --- views ------------------------------------------------------------------------------------

  const HoleIndex& holes() const { return holes_.ranges(); }
  const HoleIndex& rooms() const {
    return (idle_can_move_ ? rooms_ : has_rooms_ ? open_ : holes_).ranges();
  }
  // The room around a block, of count 0 if it lies in none.
  BlockRange room_around(BlockId block) const {
    return idle_can_move_ ? rooms_.around(block) : open_.around(block);
  }
  // Blocks that are in no hole: in a room, the idle ones. Only kept if there are rooms.
  const BlockBitmap& used() const { return holes_.outside(); }
  // Warm idle blocks in a range: what must be moved before it can be occupied.
  int32_t num_warm(BlockRange range) const { return warm_.count(range); }

  const LruOrder& lru() const { return lru_; }
  int64_t num_cold_taken() const { return num_cold_taken_; }  // cold blocks that became live
  bool has_rooms() const { return has_rooms_; }
  bool idle_can_move() const { return idle_can_move_; }
  int32_t num_free() const { return holes_.num_blocks() + lru_.size(); }

  size_t memory_bytes() const {
    return holes_.memory_bytes() + open_.memory_bytes() + rooms_.memory_bytes() +
           warm_.memory_bytes() + lru_.memory_bytes() + wish_.capacity() * sizeof(int32_t);
  }

  // Laws A3, A5 and A6, with is_free(block) for "no request references it" and is_cached(block).
  // Throws InvariantError. O(num_blocks).
  template <typename IsFree, typename IsCached>
  void check_invariants(int32_t num_blocks, IsFree&& is_free, IsCached&& is_cached) const {
    const auto is_idle = [&](BlockId b) { return is_free(b) && is_cached(b); };
    holes_.check_invariants(num_blocks, [&](BlockId b) { return is_free(b) && !is_cached(b); });
    open_.check_invariants(
        num_blocks, [&](BlockId b) { return is_free(b) && (!is_cached(b) || lru_.is_cold(b)); });
    rooms_.check_invariants(num_blocks, [&](BlockId b) { return is_free(b); });
    holes_.ranges().visit_by_address([&](BlockRange hole) {
      require(hole.start % bounds_.alignment == 0 && hole.count % bounds_.alignment == 0,
              "A5 (allocator)", "an unaligned hole at", hole.start);
    });
    for (BlockId b = 0; b < num_blocks; ++b) {
      const bool warm = idle_can_move_ && is_idle(b) && !lru_.is_cold(b);
      require(warm_.num_ids() <= b || warm_.contains(b) == warm, "A6 (allocator)",
              "warm or not: block", b);
    }
    lru_.check_invariants(is_idle);
    require(reserved_.count == 0, "A6 (allocator)", "a window is still reserved at",
            reserved_.start);
  }

 private:
  using Kind = BlockSpace::Kind;

  Choices in_holes() const {
    return {holes_.ranges(), wish_, bounds_.alignment, nullptr, nullptr, 0};
  }

  // A place for all blocks and the headroom in a hole, or among cold blocks of which at most
  // `evictable` are in the way; count 0 if there is none, or if it lies in a hidden room.
  Placement place_openly(const PlacementRequest& request, int32_t evictable) const {
    Placement found = placement_.place_politely(in_holes(), request);
    if (found.range.count == 0 && evictable > 0) {
      found = placement_.place_politely(
          {open_.ranges(), wish_, bounds_.alignment, &warm_, &used(), evictable}, request);
      if (used().count(found.range) > evictable) found.range.count = 0;
    }
    if (!idle_can_move_ || found.range.count == 0) return found;
    const BlockRange room = rooms_.around(found.range.start);
    return {room.start, {found.range.start, room.count > 0 ? found.range.count : 0}};
  }

  BlockBounds bounds_;
  bool idle_can_move_;
  bool has_rooms_;       // rooms are kept apart from holes
  int32_t spare_holes_;  // at most the slack: what is evicted for moved blocks is beyond the need
  BestFitPlacement placement_;
  BlockSpace holes_;
  BlockSpace open_;
  BlockSpace rooms_;
  BlockBitmap warm_;  // idle and not cold, if idle blocks can move
  LruOrder lru_;
  std::vector<int32_t> wish_;  // [block] growth hoped for behind a live tail, else 0
  int64_t num_cold_taken_ = 0;
  BlockRange reserved_;  // between close() and reopen() or open_rest()
};

}  // namespace tagma
