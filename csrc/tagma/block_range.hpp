// Half-open ranges of block ids, and the list of them that a request holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "tagma/errors.hpp"

namespace tagma {

// Index of a block in the pool. 0 is vLLM's null block and is never allocated.
using BlockId = int32_t;
constexpr BlockId kNullBlock = 0;

// [start, start + count).
struct BlockRange {
  BlockId start = 0;
  int32_t count = 0;

  BlockId end() const { return start + count; }
  bool operator==(const BlockRange& other) const {
    return start == other.start && count == other.count;
  }
};

// Logical blocks 0, 1, 2, ... of a request as maximal ascending ranges, in logical order.
class RangeList {
 public:
  // Appends a range behind the last logical block; adjacent ranges become one. O(1). Throws
  // UsageError if the list would hold more than 2^31 - 1 blocks.
  void append(BlockRange range) {
    if (range.count == 0) return;
    if (range.count > std::numeric_limits<int32_t>::max() - num_blocks_) {
      throw UsageError(message("append of ", range.count, " blocks to a list of ", num_blocks_));
    }
    if (!ranges_.empty() && ranges_.back().end() == range.start) {
      ranges_.back().count += range.count;
    } else {
      ranges_.push_back(range);
    }
    num_blocks_ += range.count;
  }

  void append(const RangeList& other) {
    for (const BlockRange& range : other.ranges_) append(range);
  }

  // Keeps the first `num_blocks` logical blocks. O(ranges dropped).
  void truncate(int32_t num_blocks) {
    if (num_blocks < 0) throw UsageError(message("truncate to ", num_blocks, " blocks"));
    while (num_blocks_ > num_blocks) {
      BlockRange& last = ranges_.back();
      const int32_t excess = num_blocks_ - num_blocks;
      if (last.count <= excess) {
        num_blocks_ -= last.count;
        ranges_.pop_back();
      } else {
        last.count -= excess;
        num_blocks_ = num_blocks;
      }
    }
  }

  // The logical blocks [first, last). O(ranges).
  RangeList slice(int32_t first, int32_t last) const {
    RangeList out;
    int32_t cum = 0;
    for (const BlockRange& range : ranges_) {
      const int32_t lo = first > cum ? first - cum : 0;
      const int32_t hi = last - cum < range.count ? last - cum : range.count;
      if (lo < hi) out.append({range.start + lo, hi - lo});
      cum += range.count;
      if (cum >= last) break;
    }
    return out;
  }

  // The logical blocks [first, first + range.count) are at `range` from now on. O(ranges).
  void replace(int32_t first, BlockRange range) {
    RangeList out = slice(0, first);
    out.append(range);
    out.append(slice(first + range.count, num_blocks_));
    ranges_.swap(out.ranges_);
  }

  // The logical index of a block, or -1. O(ranges).
  int32_t index_of(BlockId block) const {
    int32_t cum = 0;
    for (const BlockRange& range : ranges_) {
      if (block >= range.start && block < range.end()) return cum + block - range.start;
      cum += range.count;
    }
    return -1;
  }

  // The block at a logical index. O(ranges).
  BlockId at(int32_t index) const {
    int32_t left = index;
    if (index >= 0) {
      for (const BlockRange& range : ranges_) {
        if (left < range.count) return range.start + left;
        left -= range.count;
      }
    }
    throw UsageError(message("logical block ", index, " of a list of ", num_blocks_));
  }

  // The last block, or the null block of an empty list.
  BlockId tail() const { return ranges_.empty() ? kNullBlock : ranges_.back().end() - 1; }

  void clear() {
    ranges_.clear();
    num_blocks_ = 0;
  }

  bool empty() const { return ranges_.empty(); }
  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_ranges() const { return static_cast<int32_t>(ranges_.size()); }
  const std::vector<BlockRange>& ranges() const { return ranges_; }
  size_t memory_bytes() const { return ranges_.capacity() * sizeof(BlockRange); }

 private:
  std::vector<BlockRange> ranges_;
  int32_t num_blocks_ = 0;
};

}  // namespace tagma
