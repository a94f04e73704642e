// Pins: blocks that something outside the pool reads or writes, such as a KV transfer.
//
// A pin is one more reference to each of its blocks, so that whoever else lets go of them, they are
// not evicted and not handed out, and, since only blocks with a single reference move, not moved
// either. What is kept here is which blocks each pin holds; the references are the allocator's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

// 0 is never a handle, and none is used twice.
using PinHandle = int64_t;

class PinTable {
 public:
  PinHandle add(const RangeList& blocks) {
    pins_.emplace(last_ + 1, blocks);
    return ++last_;
  }

  // The blocks of a pin. Throws UsageError if there is none by this handle. O(log pins).
  const RangeList& at(PinHandle handle) const {
    const auto found = pins_.find(handle);
    if (found == pins_.end()) throw UsageError(message("pin ", handle, " is not held"));
    return found->second;
  }

  // Throws as at(). O(log pins).
  void remove(PinHandle handle) {
    at(handle);
    pins_.erase(handle);
  }

  // Calls visit(blocks) for each pin.
  template <typename Visit>
  void visit(Visit&& visit) const {
    for (const auto& [handle, blocks] : pins_) visit(blocks);
  }

  int32_t size() const { return static_cast<int32_t>(pins_.size()); }

  // Different blocks that are pinned. O(ranges log ranges).
  int32_t num_blocks() const {
    std::vector<BlockRange> sorted;
    visit([&](const RangeList& blocks) {
      for (const BlockRange& range : blocks.ranges()) sorted.push_back(range);
    });
    std::sort(sorted.begin(), sorted.end(),
              [](const BlockRange& a, const BlockRange& b) { return a.start < b.start; });
    int32_t blocks = 0;
    BlockId end = 0;
    for (const BlockRange& range : sorted) {
      blocks += std::max(range.end() - std::max(range.start, end), 0);
      end = std::max(end, range.end());
    }
    return blocks;
  }

 private:
  std::map<PinHandle, RangeList> pins_;
  PinHandle last_ = 0;
};

}  // namespace tagma
