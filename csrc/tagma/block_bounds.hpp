// The block ids of a pool, and the refusal of any others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

// Ids [first, end); below are the null block's. Ranges start at multiples of the alignment and have
// multiples of it as counts.
struct BlockBounds {
  BlockId first;
  BlockId end;
  int32_t alignment;

  // Throws UsageError if the pool would hold nothing or the alignment is below 1.
  static BlockBounds of(int32_t num_blocks, int32_t alignment) {
    if (alignment < 1) throw UsageError(message("alignment=", alignment, " is below 1"));
    const BlockId end = num_blocks - num_blocks % alignment;
    if (end <= alignment) {
      throw UsageError(message("num_blocks=", num_blocks, " leaves nothing to allocate: the first ",
                               alignment, " belong to the null block (alignment=", alignment, ")"));
    }
    return {alignment, end, alignment};
  }

  BlockRange all() const { return {first, end - first}; }
  bool contains(BlockId block) const { return block >= first && block < end; }

  void check_count(int32_t count) const {
    if (count < 0 || (alignment != 1 && count % alignment != 0)) {
      throw UsageError(message("count=", count, " is not a multiple of the alignment ", alignment));
    }
  }

  void check_id(BlockId block) const {
    if (!contains(block)) {
      throw UsageError(message("block ", block, " is outside the pool [", first, ", ", end, ")"));
    }
  }

  void check_range(BlockRange range) const {
    check_count(range.count);
    if (range.start < first || range.count > end - range.start) {
      throw UsageError(message("range [", range.start, ", ", int64_t{range.start} + range.count,
                               ") is outside the pool [", first, ", ", end, ")"));
    }
    if (alignment != 1 && range.start % alignment != 0) {
      throw UsageError(message("range start ", range.start, " breaks the alignment ", alignment));
    }
  }

  // A list that names a block twice would pass a look at its references and then free it twice. The
  // null block may stand in it as often as it likes. O(ranges log ranges).
  static void check_disjoint(const RangeList& blocks) {
    if (blocks.num_ranges() < 2) return;
    std::vector<BlockRange> sorted;
    sorted.reserve(blocks.ranges().size());
    for (const BlockRange& range : blocks.ranges()) {
      if (!range.is_null()) sorted.push_back(range);
    }
    std::sort(sorted.begin(), sorted.end(),
              [](const BlockRange& a, const BlockRange& b) { return a.start < b.start; });
    for (size_t i = 1; i < sorted.size(); ++i) {
      if (sorted[i].start - sorted[i - 1].start < sorted[i - 1].count) {
        throw UsageError(message("block ", sorted[i].start, " is named twice in one list"));
      }
    }
  }
};

}  // namespace tagma
