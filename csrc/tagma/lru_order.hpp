// Idle cached blocks, oldest first, and which of them are cold: the `slack` oldest.
//
// Eviction takes the oldest block. A cold block may be evicted a little early, where its place
// completes a longer range: as if a pool of `slack` blocks had been evicted ahead, except that its
// members can still be hit.
#pragma once

#include <cstdint>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

class LruOrder {
 public:
  LruOrder(int32_t num_blocks, int32_t slack)
      : slack_(slack),
        next_(static_cast<size_t>(num_blocks), kNullBlock),
        prev_(static_cast<size_t>(num_blocks), kNullBlock),
        cold_(static_cast<size_t>(num_blocks), 0) {}

  BlockId oldest() const { return next_[kNullBlock]; }
  BlockId behind(BlockId block) const { return next_[block]; }
  bool is_cold(BlockId block) const { return cold_[block] != 0; }
  int32_t slack() const { return slack_; }
  int32_t size() const { return size_; }
  int32_t num_cold() const { return num_cold_; }

  // Appends the block as the newest. O(1).
  void push(BlockId block) {
    link(block, prev_[kNullBlock], kNullBlock);
    if (first_warm_ == kNullBlock) first_warm_ = block;
    ++size_;
  }

  // O(1).
  void remove(BlockId block) {
    if (cold_[block]) {
      cold_[block] = 0;
      --num_cold_;
    } else if (first_warm_ == block) {
      first_warm_ = next_[block];
    }
    next_[prev_[block]] = next_[block];
    prev_[next_[block]] = prev_[block];
    --size_;
  }

  // `to` takes the place and the temperature of `from`. O(1).
  void replace(BlockId from, BlockId to) {
    link(to, prev_[from], next_[from]);
    cold_[to] = cold_[from];
    cold_[from] = 0;
    if (first_warm_ == from) first_warm_ = to;
  }

  // Takes effect by cool() and warm_up(), which the caller repeats until there is nothing to do.
  void set_slack(int32_t slack) { slack_ = slack; }

  // The newest cold block becomes warm and is returned; the null block if no more are cold than the
  // slack allows. O(1).
  BlockId warm_up() {
    if (num_cold_ <= slack_) return kNullBlock;
    const BlockId block = prev_[first_warm_];  // of the null block, the anchor: the newest of all
    cold_[block] = 0;
    --num_cold_;
    first_warm_ = block;
    return block;
  }

  // The oldest warm block becomes cold and is returned; the null block if enough are. O(1).
  BlockId cool() {
    if (num_cold_ >= slack_ || first_warm_ == kNullBlock) return kNullBlock;
    const BlockId block = first_warm_;
    cold_[block] = 1;
    ++num_cold_;
    first_warm_ = next_[block];
    return block;
  }

  size_t memory_bytes() const {
    return (next_.capacity() + prev_.capacity()) * sizeof(BlockId) + cold_.capacity();
  }

  // Law A3: the list holds exactly the blocks for which is_idle(block), linked both ways, cold ones
  // first and as many as the slack allows. Throws InvariantError. O(num_blocks).
  template <typename IsIdle>
  void check_invariants(IsIdle&& is_idle) const {
    int32_t idle = 0;
    int32_t cold = 0;
    for (BlockId b = 1; b < static_cast<BlockId>(next_.size()); ++b) {
      idle += is_idle(b) ? 1 : 0;
      cold += cold_[b] ? 1 : 0;
    }
    int32_t listed = 0;
    BlockId previous = kNullBlock;
    for (BlockId b = oldest(); b != kNullBlock; b = next_[b]) {
      require(is_idle(b), kLaw, "the LRU order holds a block that is not idle:", b);
      require(prev_[b] == previous, kLaw, "the LRU order is broken at", b);
      require((cold_[b] != 0) == (listed < num_cold_), kLaw,
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
  std::vector<uint8_t> cold_;  // [block]
  BlockId first_warm_ = kNullBlock;
  int32_t size_ = 0;
  int32_t num_cold_ = 0;
};

}  // namespace tagma
