// The laws of a pool as a whole: rows, pins, references and the prefix index agree.
#pragma once

#include <cstdint>
#include <vector>

#include "tagma/block_store.hpp"
#include "tagma/pin_table.hpp"
#include "tagma/row_table.hpp"

namespace tagma {

// Laws R1 to R7, and those of the parts. Throws InvariantError. O(num_blocks + blocks in rows).
inline void check_pool_laws(const BlockStore& store, const RowTable& rows, const PinTable& pins,
                            int32_t max_ranges) {
  const KvAllocator& allocator = store.allocator();
  allocator.check_invariants();
  store.index().check_invariants();
  rows.check_invariants();
  std::vector<int32_t> refs(static_cast<size_t>(allocator.num_blocks()), 0);
  std::vector<int32_t> seen(refs.size(), -1);
  std::vector<uint8_t> ends_row(refs.size(), 0);
  int32_t open = 0;
  for (size_t slot = 0; slot < rows.num_slots(); ++slot) {
    const Row& row = rows.slot(slot);
    const auto number = static_cast<int64_t>(slot);
    open += row.open ? 1 : 0;
    require(row.open || row.blocks.empty(), "R1 (pool)", "a closed row holds blocks: slot", number);
    require(row.num_published <= row.blocks.num_blocks(), "R4 (pool)",
            "more published than held: slot", number);
    require(row.blocks.num_ranges() <= max_ranges, "R3 (pool)", "over the range cap: slot", number);
    if (row.open && !row.blocks.empty()) ends_row[static_cast<size_t>(row.blocks.tail())] = 1;
    const std::vector<BlockRange>& ranges = row.blocks.ranges();
    for (size_t i = 0; i < ranges.size(); ++i) {
      require(i == 0 || !joins(ranges[i - 1], ranges[i].start), "R3 (pool)",
              "a range that could be merged: slot", number);
      if (ranges[i].is_null()) continue;
      for (BlockId b = ranges[i].start; b < ranges[i].end(); ++b) {
        require(seen[b] != static_cast<int32_t>(slot), "R1 (pool)",
                "a row holds a block twice:", b);
        seen[b] = static_cast<int32_t>(slot);
        ++refs[b];
      }
    }
  }
  require(open == rows.size() * rows.num_groups(), "R1 (pool)", "open rows counted", open);
  pins.visit([&](const RangeList& blocks) {
    for (const BlockRange& range : blocks.ranges()) {
      require(!range.is_null(), "R6 (pool)", "a pin of null blocks, many:", range.count);
      for (BlockId b = range.start; b < range.end(); ++b) ++refs[b];
    }
  });
  for (BlockId b = 0; b < allocator.num_blocks(); ++b) {
    if (!allocator.bounds().contains(b)) {
      require(refs[b] == 0, "R2 (pool)", "a row or pin holds a block outside the pool:", b);
      continue;
    }
    require(allocator.headroom_behind(b) == 0 || ends_row[static_cast<size_t>(b)] != 0, "R5 (pool)",
            "a wish for room behind a block that ends no row:", b);
    require(refs[b] == allocator.request_refs(b), "R2 (pool)",
            "rows, pins and references disagree on block", b);
    require(allocator.is_cached(b) == store.index().contains(b), "R2 (pool)",
            "cache and prefix index disagree on block", b);
  }
}

}  // namespace tagma
