// Idle cached blocks, oldest first, and which of them are cold: the `slack` oldest.
//
// Eviction takes the oldest block. A cold block may be evicted a little early, where its place
// completes a longer range: as if a pool of `slack` blocks had been evicted ahead, except that its
// members can still be hit.
//
// Rows end tail first, so neighbours in the pool are mostly neighbours here, in falling order: what
// comes and what cools is handled by runs, which differ from block by block in their cost alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tagma/block_bitmap.hpp"
#include "tagma/block_range.hpp"

namespace tagma {

class LruOrder {
 public:
  LruOrder(int32_t num_blocks, int32_t slack)
      : slack_(slack),
        next_(static_cast<size_t>(num_blocks), kNullBlock),
        prev_(static_cast<size_t>(num_blocks), kNullBlock),
        cold_(num_blocks) {}

  BlockId oldest() const { return next_[kNullBlock]; }
  BlockId behind(BlockId block) const { return next_[block]; }
  bool is_cold(BlockId block) const { return cold_.contains(block); }
  const BlockBitmap& cold() const { return cold_; }
  int32_t slack() const { return slack_; }
  int32_t size() const { return size_; }
  int32_t num_cold() const { return num_cold_; }

  // Appends the block as the newest. O(1).
  void push(BlockId block) {
    link(block, prev_[kNullBlock], kNullBlock);
    if (first_warm_ == kNullBlock) first_warm_ = block;
    ++size_;
  }

  // push() for each block of a range, from its last to its first. O(blocks).
  void push_backwards(BlockRange range) {
    if (range.count <= 0) return;
    const BlockId last = range.end() - 1;
    const BlockId newest = prev_[kNullBlock];
    for (BlockId b = range.start; b <= last; ++b) next_[b] = b - 1;
    for (BlockId b = range.start; b <= last; ++b) prev_[b] = b + 1;
    prev_[last] = newest;
    next_[newest] = last;
    next_[range.start] = kNullBlock;
    prev_[kNullBlock] = range.start;
    if (first_warm_ == kNullBlock) first_warm_ = last;
    size_ += range.count;
  }

  // O(1).
  void remove(BlockId block) {
    if (cold_.contains(block)) {
      cold_.erase(block);
      --num_cold_;
    } else if (first_warm_ == block) {
      first_warm_ = next_[block];
    }
    next_[prev_[block]] = next_[block];
    prev_[next_[block]] = prev_[block];
    --size_;
  }

  // remove() for each block of a range. O(blocks).
  void remove(BlockRange range) {
    for (BlockId first = range.start; first < range.end();) {
      BlockId last = first;  // a stretch of the list, oldest at the end
      while (last + 1 < range.end() && next_[last + 1] == last) ++last;
      const BlockId behind_it = next_[first];
      if (first_warm_ >= first && first_warm_ <= last) first_warm_ = behind_it;
      next_[prev_[last]] = behind_it;
      prev_[behind_it] = prev_[last];
      first = last + 1;
    }
    num_cold_ -= cold_.count(range);
    cold_.erase(range);
    size_ -= range.count;
  }

  // `to` takes the place and the temperature of `from`. O(1).
  void replace(BlockId from, BlockId to) {
    link(to, prev_[from], next_[from]);
    if (cold_.contains(from)) {
      cold_.erase(from);
      cold_.insert(to);
    }
    if (first_warm_ == from) first_warm_ = to;
  }

  // Takes effect by cool() and warm_up(), which the caller repeats until there is nothing to do.
  void set_slack(int32_t slack) { slack_ = slack; }

  // The newest cold block becomes warm and is returned; the null block if no more are cold than the
  // slack allows. O(1).
  BlockId warm_up() {
    if (num_cold_ <= slack_) return kNullBlock;
    const BlockId block = prev_[first_warm_];  // of the null block, the anchor: the newest of all
    cold_.erase(block);
    --num_cold_;
    first_warm_ = block;
    return block;
  }

  // The oldest warm blocks become cold, as far as each lies in front of the one before it in the
  // pool, and are returned as a range, whose last block is the oldest; count 0 if enough are cold.
  // O(blocks).
  BlockRange cool() {
    const int32_t most = std::min(slack_, size_) - num_cold_;
    if (most <= 0) return {};
    const BlockId oldest_warm = first_warm_;
    BlockId newest = oldest_warm;
    // Does not run into the anchor: in front of it, no more are wanted.
    while (oldest_warm - newest + 1 < most && next_[newest] == newest - 1) --newest;
    first_warm_ = next_[newest];
    const BlockRange run{newest, oldest_warm - newest + 1};
    cold_.insert(run);
    num_cold_ += run.count;
    return run;
  }

  size_t memory_bytes() const {
    return (next_.capacity() + prev_.capacity()) * sizeof(BlockId) + cold_.memory_bytes();
  }

  // Law A3: the list holds exactly the blocks for which is_idle(block), linked both ways, cold ones
  // first and as many as the slack allows. Throws InvariantError. O(num_blocks).
  template <typename IsIdle>
  void check_invariants(IsIdle&& is_idle) const {
    int32_t idle = 0;
    int32_t cold = 0;
    for (BlockId b = 1; b < static_cast<BlockId>(next_.size()); ++b) {
      idle += is_idle(b) ? 1 : 0;
      cold += is_cold(b) ? 1 : 0;
    }
    int32_t listed = 0;
    BlockId previous = kNullBlock;
    for (BlockId b = oldest(); b != kNullBlock; b = next_[b]) {
      require(is_idle(b), kLaw, "the LRU order holds a block that is not idle:", b);
      require(prev_[b] == previous, kLaw, "the LRU order is broken at", b);
      require(is_cold(b) == (listed < num_cold_), kLaw,
              "the LRU order has a cold block behind a warm one:", b);
      require(listed != num_cold_ || first_warm_ == b, kLaw,
              "the LRU order does not know its first warm block:", b);
      require(++listed <= idle, kLaw, "the LRU order is a cycle at", b);
      previous = b;
    }
    require(prev_[kNullBlock] == previous, kLaw, "the LRU order does not know its newest block",
            previous);
    require(listed == idle && size_ == idle, kLaw,
            "the LRU order holds a wrong number of blocks:", listed);
    require(cold == num_cold_ && cold == (slack_ < idle ? slack_ : idle), kLaw,
            "the LRU order has a wrong number of cold blocks:", cold);
    require(num_cold_ < size_ || first_warm_ == kNullBlock, kLaw,
            "the LRU order has a stale warm block", first_warm_);
  }

 private:
  static constexpr const char* kLaw = "A3 (allocator)";

  void link(BlockId block, BlockId before, BlockId after) {
    prev_[block] = before;
    next_[block] = after;
    next_[before] = block;
    prev_[after] = block;
  }

  int32_t slack_;
  std::vector<BlockId> next_;  // [block] the null block is the anchor
  std::vector<BlockId> prev_;
  BlockBitmap cold_;
  BlockId first_warm_ = kNullBlock;
  int32_t size_ = 0;
  int32_t num_cold_ = 0;
};

}  // namespace tagma
