// What observers count in a pool: ranges by row, blocks by place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tagma/kv_allocator.hpp"
#include "tagma/row_table.hpp"

namespace tagma {

struct RowRanges {
  int64_t total = 0;    // over all open rows
  int32_t longest = 0;  // of one row
  int32_t single = 0;   // rows in one range
};

struct PartCount {
  int32_t live = 0;
  int32_t idle = 0;
};

// Ranges of the open rows; runs of null blocks are none. O(ranges).
inline RowRanges count_row_ranges(const RowTable& rows) {
  RowRanges out;
  for (size_t slot = 0; slot < rows.num_slots(); ++slot) {
    const Row& row = rows.slot(slot);
    if (!row.open) continue;
    int32_t ranges = 0;
    for (const BlockRange& range : row.blocks.ranges()) ranges += range.is_null() ? 0 : 1;
    out.total += ranges;
    out.longest = std::max(out.longest, ranges);
    out.single += ranges == 1 ? 1 : 0;
  }
  return out;
}

// Live and idle blocks in each `n`-th of the pool, by address. Throws UsageError if n < 1.
// O(num_blocks).
inline std::vector<PartCount> count_parts(const KvAllocator& allocator, int32_t n) {
  if (n < 1) throw UsageError(message("parts=", n, " is below 1"));
  std::vector<PartCount> out(static_cast<size_t>(n));
  const int64_t blocks = allocator.num_blocks();
  BlockId b = allocator.bounds().first;
  for (int32_t i = 0; i < n; ++i) {  // part i holds the b with b * n / blocks == i
    const auto stop = static_cast<BlockId>((int64_t{i} * blocks + blocks + n - 1) / n);
    PartCount& part = out[static_cast<size_t>(i)];
    for (; b < std::min(stop, allocator.bounds().end); ++b) {
      const bool live = allocator.request_refs(b) > 0;
      part.live += live ? 1 : 0;
      part.idle += !live && allocator.is_cached(b) ? 1 : 0;
    }
  }
  return out;
}

}  // namespace tagma
