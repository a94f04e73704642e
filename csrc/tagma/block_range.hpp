// Half-open ranges of block ids, the rule by which they merge, and the list of them that a row
// holds.
//
// The null block stands for positions without content (behind a sliding window, say). A run of it
// is a range that starts at 0 and repeats that id: ids 0 0 0 1 2 are the ranges (0, 3) and (1, 2).
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

// vLLM's PAD_SLOT_ID: the cache write kernels skip it.
constexpr int64_t kPadSlot = -1;

// Ranges that a row of the worker's range table holds, and so that a request may have.
constexpr int32_t kMaxRanges = 256;

// [start, start + count), or `count` times the null block if it starts there.
struct BlockRange {
  BlockId start = 0;
  int32_t count = 0;

  BlockId end() const { return start + count; }  // not of a null run, nor of one up to 2^31
  bool is_null() const { return start == kNullBlock; }
  // The block at an index into the range.
  BlockId at(int32_t i) const { return is_null() ? kNullBlock : start + i; }
  // The blocks from an index on.
  BlockRange behind(int32_t i) const { return {at(i), count - i}; }
  bool contains(BlockId block) const {
    return !is_null() && block >= start && block - start < count;
  }
  bool operator==(const BlockRange& other) const {
    return start == other.start && count == other.count;
  }
};

// The merge rule, of which there is only this one: whether a range that starts at `next` continues
// `last`. Null runs continue null runs, and nothing else touches the null block.
inline bool joins(BlockRange last, BlockId next) {
  if (last.is_null()) return next == kNullBlock;
  return next != kNullBlock && next == int64_t{last.start} + last.count;  // the end may be 2^31
}

// Logical blocks 0, 1, 2, ... of a row as maximal ranges, in logical order.
class RangeList {
 public:
  RangeList() = default;
  explicit RangeList(BlockRange range) { append(range); }

  // The ranges that `count` ids form, in this order. O(count). Throws UsageError for a negative id
  // and for more than 2^31 - 1 of them.
  static RangeList of(const BlockId* ids, int64_t count) {
    if (count < 0 || count > std::numeric_limits<int32_t>::max()) {
      throw UsageError(message("a list of ", count, " block ids"));
    }
    RangeList out;
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0) {
        throw UsageError(message("block id ", ids[i], " at index ", i, " is negative"));
      }
      out.append({ids[i], 1});
    }
    return out;
  }

  // Appends a range behind the last logical block; adjacent ranges become one. O(1). Throws
  // UsageError if the list would hold more than 2^31 - 1 blocks.
  void append(BlockRange range) {
    if (range.count == 0) return;
    if (range.count > std::numeric_limits<int32_t>::max() - num_blocks_) {
      throw UsageError(message("append of ", range.count, " blocks to a list of ", num_blocks_));
    }
    if (!ranges_.empty() && joins(ranges_.back(), range.start)) {
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
      if (lo < hi) out.append({range.at(lo), hi - lo});
      cum += range.count;
      if (cum >= last) break;
    }
    return out;
  }

  // The logical blocks [first, first + blocks.num_blocks()) are at `blocks` from now on. Throws
  // UsageError if the list has not so many. O(ranges).
  void replace(int32_t first, const RangeList& blocks) {
    if (first < 0 || blocks.num_blocks() > num_blocks_ - first) {
      throw UsageError(message("replace ", blocks.num_blocks(), " blocks from ", first,
                               " on in a list of ", num_blocks_));
    }
    RangeList out = slice(0, first);
    out.append(blocks);
    out.append(slice(first + blocks.num_blocks(), num_blocks_));
    ranges_.swap(out.ranges_);
  }

  // The logical index of a block, or -1; never of the null block. O(ranges).
  int32_t index_of(BlockId block) const {
    int32_t cum = 0;
    for (const BlockRange& range : ranges_) {
      if (range.contains(block)) return cum + block - range.start;
      cum += range.count;
    }
    return -1;
  }

  // The block at a logical index. O(ranges).
  BlockId at(int32_t index) const {
    int32_t left = index;
    if (index >= 0) {
      for (const BlockRange& range : ranges_) {
        if (left < range.count) return range.at(left);
        left -= range.count;
      }
    }
    throw UsageError(message("logical block ", index, " of a list of ", num_blocks_));
  }

  // The last block; the null block of an empty list or behind a null run.
  BlockId tail() const {
    return ranges_.empty() ? kNullBlock : ranges_.back().at(ranges_.back().count - 1);
  }

  // Null blocks in front of all others.
  int32_t num_leading_nulls() const {
    return ranges_.empty() || !ranges_.front().is_null() ? 0 : ranges_.front().count;
  }

  // Whether a range that starts at `next` would continue the list's last one.
  bool joins_with(BlockId next) const { return !ranges_.empty() && joins(ranges_.back(), next); }

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
