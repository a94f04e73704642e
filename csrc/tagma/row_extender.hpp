// Gives a row the blocks that it lacks, and keeps it under the range cap.
//
// With one group: a row of r ranges, alone in the pool, leaves at most r stretches beside the one
// behind its tail. So with r <= max_ranges / 2 everything can still be placed under the cap. From
// there on a new range takes whole stretches, which never adds to the sum of the two: a request
// alone reaches the size of the pool, in whatever chunks it comes. With several groups each row has
// an equal share of that half, so that a request alone is always admitted with all it needs. Chunk
// by chunk its rows may take one stretch by turns and use up their ranges there; preempted and
// admitted again, it gets on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tagma/block_store.hpp"
#include "tagma/compactor.hpp"
#include "tagma/row_table.hpp"

namespace tagma {

class RowExtender {
 public:
  // All arguments must outlive the extender. Throws UsageError for a cap below 1.
  RowExtender(BlockStore& store, RowTable& rows, Compactor& compactor, int32_t max_ranges)
      : store_(store), rows_(rows), compactor_(compactor), max_ranges_(max_ranges) {
    if (max_ranges < 1) throw UsageError(message("max_ranges=", max_ranges, " is below 1"));
  }

  // Evicts, places and appends what the row lacks to hold `blocks`, to the row and to `added`;
  // false if the cap forbids it. `fresh`: the row is being admitted. The caller knows that enough
  // blocks are free.
  bool extend(Row& row, bool fresh, int32_t blocks, RangeList& added) {
    const int32_t lacking = blocks - row.blocks.num_blocks();
    if (lacking <= 0) return true;
    const int32_t certain = std::max(row.num_prompt - blocks, 0);
    const int32_t headroom = std::max(row.num_expected - blocks, certain);
    RangeList placed;
    compactor_.place(row, fresh, lacking, certain, headroom, placed);
    if (ranges_after(row, placed) > std::max(soft_cap(), row.blocks.num_ranges())) {
      store_.allocator().release(placed);
      placed.clear();
      const int32_t spare = evict_for_cap(row, lacking);
      if (spare < 0) {
        ++num_cap_refusals_;
        return false;
      }
      // With the spare blocks as headroom the last stretch is taken from its start, unless a wish
      // for room stands in front of it: wishes yield to the cap as well.
      store_.allocator().forget_headroom();
      store_.allocator().allocate(lacking, spare, row.blocks.tail(), placed);
      if (ranges_after(row, placed) > max_ranges_) {  // a placement worse than it could be
        store_.allocator().release(placed);
        ++num_cap_refusals_;
        return false;
      }
    }
    rows_.append(row, placed);
    added.append(placed);
    return true;
  }

  int32_t max_ranges() const { return max_ranges_; }

  // With a hit of this many ranges, and nothing else live, the rest always fits: h live ranges
  // leave at most h + 1 gaps, and h + (h + 1) <= max_ranges. So a request alone makes progress.
  int32_t max_hit_ranges() const { return (max_ranges_ - 1) / 2 / rows_.num_groups(); }

  // Times that blocks beyond the least recently used were evicted to stay under the range cap.
  int64_t num_cap_evictions() const { return num_cap_evictions_; }
  // Times that extend() gave up.
  int64_t num_cap_refusals() const { return num_cap_refusals_; }

 private:
  int32_t soft_cap() const { return max_ranges_ / 2 / rows_.num_groups(); }

  static int32_t ranges_after(const Row& row, const RangeList& placed) {
    const bool merges = row.blocks.joins_with(placed.ranges().front().start);
    return row.blocks.num_ranges() + placed.num_ranges() - (merges ? 1 : 0);
  }

  // Turns the longest stretches without live blocks into holes until `lacking` blocks fit in as few
  // ranges as the row has left, and returns how many blocks more these stretches hold; -1 if they
  // do not suffice. Recency yields to the cap here, and only here. O(num_blocks).
  int32_t evict_for_cap(const Row& row, int32_t lacking) {
    std::vector<BlockRange> stretches = store_.allocator().unreferenced();
    std::sort(stretches.begin(), stretches.end(), [](const BlockRange& a, const BlockRange& b) {
      return a.count != b.count ? a.count > b.count : a.start < b.start;
    });
    // A stretch right behind the tail costs no range; it is tried first.
    int32_t left = max_ranges_ - row.blocks.num_ranges();
    for (size_t i = 0; i < stretches.size(); ++i) {
      if (!row.blocks.joins_with(stretches[i].start)) continue;
      std::rotate(stretches.begin(), stretches.begin() + static_cast<std::ptrdiff_t>(i),
                  stretches.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      ++left;
      break;
    }
    int32_t covered = 0;
    size_t taken = 0;
    while (taken < stretches.size() && static_cast<int32_t>(taken) < left && covered < lacking) {
      covered += stretches[taken++].count;
    }
    if (covered < lacking) return -1;
    const int64_t before = store_.num_evictions();
    for (size_t i = 0; i < taken; ++i) {
      for (BlockId b = stretches[i].start; b < stretches[i].end(); ++b) {
        if (store_.allocator().is_cached(b)) store_.evict(b);
      }
    }
    if (store_.num_evictions() > before) ++num_cap_evictions_;
    return covered - lacking;
  }

  BlockStore& store_;
  RowTable& rows_;
  Compactor& compactor_;
  int32_t max_ranges_;
  int64_t num_cap_evictions_ = 0;
  int64_t num_cap_refusals_ = 0;
};

}  // namespace tagma
