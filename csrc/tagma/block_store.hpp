// Blocks together with the keys under which they are cached: eviction, and moves that keep both.
//
// A move gives a block's content another block id. The content itself is copied by the worker
// before the step's forward pass (take_copies()); everything here acts as if that had happened.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tagma/block_range.hpp"
#include "tagma/kv_allocator.hpp"
#include "tagma/move_log.hpp"
#include "tagma/prefix_index.hpp"
#include "tagma/step_state.hpp"

namespace tagma {

struct EvictedBlock {
  BlockId block;
  int32_t group;
  std::vector<uint8_t> key;
};

class BlockStore {
 public:
  // Moves are counted in `step`, which must outlive the store.
  BlockStore(const AllocatorOptions& options, int32_t num_groups, uint64_t seed,
             bool record_evictions, StepState& step)
      : record_evictions_(record_evictions),
        step_(step),
        allocator_(options),
        index_(options.num_blocks, seed, num_groups),
        moves_(options.idle_can_move ? options.num_blocks : 0) {}

  BlockStore(const BlockStore&) = delete;  // others refer to it
  BlockStore& operator=(const BlockStore&) = delete;

  const KvAllocator& allocator() const { return allocator_; }
  KvAllocator& allocator() { return allocator_; }
  const PrefixIndex& index() const { return index_; }
  PrefixIndex& index() { return index_; }
  const StepState& step() const { return step_; }

  // Takes a block out of the cache, whoever references it. O(1).
  void withdraw(BlockId block) {
    if (record_evictions_) {
      const uint8_t* key = index_.key(block);
      evicted_.push_back(
          {block, index_.group(block), std::vector<uint8_t>(key, key + index_.key_bytes())});
    }
    index_.erase(block);
    allocator_.uncache(block);
  }

  // withdraw(), counted as an eviction.
  void evict(BlockId block) {
    ++num_evictions_;
    withdraw(block);
  }

  // Evicts the oldest idle blocks until holes have `blocks`. The caller knows that enough are free.
  void evict_until(int32_t blocks) {
    while (allocator_.holes().num_blocks() < blocks) evict(allocator_.lru_victim());
  }

  // Makes the first `count` blocks of a window in a room live, and the rest a hole. As many cold
  // blocks in it are evicted as must be evicted anyway, and the other idle ones move away; beyond
  // the moves left, of which the caller needs `more_moves` itself, they are evicted as well. The
  // caller knows that enough blocks are free. O(window + evictions + moves).
  void occupy(BlockRange window, int32_t count, int32_t more_moves = 0) {
    const FreeSpaces& free = allocator_.free_spaces();
    const bool can_move = allocator_.idle_can_move();
    const int32_t budget = std::max(step_.moves_left() - more_moves, 0);
    int32_t to_evict = can_move ? window.count - allocator_.holes().num_blocks() : window.count;
    int32_t excess = free.num_warm(window) - budget;
    // Backwards: of a chain, the far end is worth least.
    for (BlockId b = free.used().previous_member(window.end() - 1);
         b >= window.start && (to_evict > 0 || excess > 0);
         b = free.used().previous_member(b - 1)) {
      if (allocator_.is_cold(b) ? to_evict > 0 : excess > 0) {
        if (!allocator_.is_cold(b)) --excess;
        --to_evict;
        evict(b);
      }
    }
    evict_until(window.count);  // then the holes outside hold what must leave the window
    // Cold blocks that need not go cost a move as well.
    int32_t over = free.used().count(window) - budget;
    for (BlockId b = window.end() - 1; over > 0; --b) {
      b = free.used().previous_member(b);
      evict(b);
      --over;
    }
    const std::vector<BlockRange> idle = free.used().runs(window);
    KvAllocator::Reservation reservation(allocator_, window);
    for (const BlockRange& run : idle) move_idle(reservation, run);
    reservation.settle(count);
  }

  // The live blocks `from`, referenced by one request, go to `to`, live as well and new. `from`
  // becomes (part of) a hole. `were_idle`: a hit adopted them a moment ago. O(blocks).
  void move_live(BlockRange from, BlockId to, bool were_idle = false) {
    const int32_t wish = allocator_.headroom_behind(from.end() - 1);
    for (int32_t i = 0; i < from.count; ++i) {
      const BlockId b = from.start + i;
      if (allocator_.is_cached(b)) {
        index_.move(b, to + i);
        allocator_.transfer_cache(b, to + i);
      }
      record_move(b, to + i);
    }
    if (!were_idle) num_moved_live_ += from.count;
    allocator_.release(RangeList(from));
    allocator_.set_headroom(to + from.count - 1, wish);
  }

  // The copies that the worker must make before it writes anything else; see MoveLog.
  std::vector<BlockCopy> take_copies() { return moves_.take(); }

  // Blocks that left the cache since the last call, in order, if they are recorded.
  std::vector<EvictedBlock> take_evicted() { return std::exchange(evicted_, {}); }

  // Empties the cache. The caller knows that nothing is live. O(num_blocks).
  void clear() {
    index_.clear();
    for (BlockId b = allocator_.lru_victim(); b != kNullBlock; b = allocator_.lru_victim()) {
      allocator_.uncache(b);
    }
    moves_.take();
    evicted_.clear();
    relocations_.clear();
  }

  // All moves since the last call, in order, if evictions are recorded.
  std::vector<BlockCopy> take_relocations() { return std::exchange(relocations_, {}); }

  int64_t num_evictions() const { return num_evictions_; }
  int64_t num_moved() const { return num_moved_; }
  int64_t num_moved_live() const { return num_moved_live_; }

  size_t memory_bytes() const {
    return allocator_.memory_bytes() + index_.memory_bytes() + moves_.memory_bytes();
  }

 private:
  // Moves a run of idle blocks out of a reserved window; where cold blocks lie, they are evicted.
  void move_idle(KvAllocator::Reservation& reservation, BlockRange run) {
    while (run.count > 0) {
      const BlockRange to = allocator_.free_spaces().choose_for_idle(run.count);
      for (BlockId b = to.start; b < to.end(); ++b) {
        if (allocator_.is_cached(b)) evict(b);
      }
      for (int32_t i = 0; i < to.count; ++i) {
        reservation.relocate(run.start + i, to.start + i);
        index_.move(run.start + i, to.start + i);
        record_move(run.start + i, to.start + i);
      }
      run = run.behind(to.count);
    }
  }

  void record_move(BlockId from, BlockId to) {
    step_.count_move();
    ++num_moved_;
    moves_.record(from, to);
    if (record_evictions_) relocations_.push_back({from, to});
  }

  bool record_evictions_;
  StepState& step_;
  KvAllocator allocator_;
  PrefixIndex index_;
  MoveLog moves_;
  std::vector<EvictedBlock> evicted_;
  std::vector<BlockCopy> relocations_;
  int64_t num_evictions_ = 0;
  int64_t num_moved_ = 0;
  int64_t num_moved_live_ = 0;
};

}  // namespace tagma
