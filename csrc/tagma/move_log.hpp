// The block copies that a step still owes to the worker, composed so that one round suffices.
//
// The worker reads all sources before it writes any destination (vLLM's copy is one gather and one
// scatter), so a block that moved twice is copied once, from where it was to where it is.
#pragma once

#include <cstdint>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

struct BlockCopy {
  BlockId from;
  BlockId to;
};

class MoveLog {
 public:
  explicit MoveLog(int32_t num_blocks) : copy_to_(static_cast<size_t>(num_blocks), kNone) {}

  // The content of `from` is from now on at `to`; what was owed to `to` is void. O(1).
  void record(BlockId from, BlockId to) {
    drop(to);
    BlockId origin = from;
    if (copy_to_[from] != kNone) {
      origin = copies_[static_cast<size_t>(copy_to_[from])].from;
      drop(from);
    }
    if (origin == to) return;  // it moved back
    copy_to_[to] = static_cast<int32_t>(copies_.size());
    copies_.push_back({origin, to});
  }

  // The content of a block is not needed any more. O(1).
  void drop(BlockId block) {
    const int32_t at = copy_to_[block];
    if (at == kNone) return;
    copy_to_[block] = kNone;
    const BlockCopy last = copies_.back();
    copies_.pop_back();
    if (static_cast<size_t>(at) < copies_.size()) {
      copies_[static_cast<size_t>(at)] = last;
      copy_to_[last.to] = at;
    }
  }

  int32_t size() const { return static_cast<int32_t>(copies_.size()); }

  // All copies owed, with distinct destinations; none is owed afterwards. O(copies).
  std::vector<BlockCopy> take() {
    for (const BlockCopy& copy : copies_) copy_to_[copy.to] = kNone;
    std::vector<BlockCopy> out;
    out.swap(copies_);
    return out;
  }

  size_t memory_bytes() const {
    return copy_to_.capacity() * sizeof(int32_t) + copies_.capacity() * sizeof(BlockCopy);
  }

 private:
  static constexpr int32_t kNone = -1;

  std::vector<int32_t> copy_to_;  // [block] index of the copy that ends there
  std::vector<BlockCopy> copies_;
};

}  // namespace tagma
