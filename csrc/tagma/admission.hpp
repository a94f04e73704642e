// What is checked before a request is given blocks: that it asks for something sensible, that its
// prefix hit is still there, and that enough blocks are free for all its groups together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "tagma/block_range.hpp"
#include "tagma/group_spec.hpp"
#include "tagma/kv_allocator.hpp"
#include "tagma/pool_options.hpp"

namespace tagma {

// Blocks that the rows of a request lack, over all groups. Sums are taken in 64 bits.
struct Lack {
  int64_t now = 0;
  int64_t gate = 0;
  bool gated = false;

  void add(int32_t held, const Need& need) {
    now += std::max(need.blocks - held, 0);
    gate += std::max(need.gate - held, 0);
    gated |= need.gate > 0;
  }

  // vLLM's rules: idle blocks that a hit takes away from the free ones count as demand. The gate
  // comes first, and before a window lets go of its head.
  bool passes_gate(int64_t free, int32_t idle_hits, const Spare& spare) const {
    return !gated || gate + idle_hits + spare.watermark <= free;
  }
  bool fits(int64_t free, int32_t idle_hits, const Spare& spare) const {
    return now + idle_hits + spare.watermark <= free - spare.reserved;
  }
};

// Everything that needs[0, groups) say is a count of blocks. Throws UsageError otherwise.
inline void check_needs(const Need* needs, size_t groups, const Spare& spare, int32_t alignment) {
  const auto check = [](int32_t value) {
    if (value < 0) throw UsageError(message("a demand of ", value, " blocks is negative"));
  };
  check(spare.watermark);
  check(spare.reserved);
  for (size_t g = 0; g < groups; ++g) {
    const Need& need = needs[g];
    check(need.blocks);
    check(need.gate);
    check(need.prompt);
    check(need.limit);
    check(need.skip);
    if (need.blocks % alignment != 0) {
      throw UsageError(message("a demand of ", need.blocks,
                               " blocks is not a multiple of the alignment ", alignment));
    }
  }
}

// A hit with an evicted block must not be adopted: the block may be somebody else's by now. (One
// that was evicted, handed out and published anew under another key is not told apart: a caller
// admits right after it looked up.) Null blocks stand in front of windows and states only.
// `nulls_follow`: the row has null blocks behind the hit. Throws UsageError. O(blocks).
inline void check_hit(const KvAllocator& allocator, const GroupSpec& spec, const RangeList& hit,
                      bool nulls_follow, int32_t max_ranges) {
  const int32_t ranges = hit.num_ranges() + (nulls_follow && hit.tail() != kNullBlock ? 1 : 0);
  if (ranges > max_ranges) {
    throw UsageError(message("a hit of ", ranges, " ranges", nulls_follow ? " with its nulls" : "",
                             ", above the cap of ", max_ranges));
  }
  for (size_t i = 0; i < hit.ranges().size(); ++i) {
    const BlockRange& range = hit.ranges()[i];
    if (range.is_null()) {
      if (i == 0 && spec.kind != GroupKind::kPrefix) continue;
      throw UsageError(message("a hit with ", range.count, " null blocks where none can be"));
    }
    for (BlockId b = range.start; b < range.end(); ++b) {
      if (!allocator.is_cached(b)) {
        throw UsageError(message("block ", b, " is not cached: a stale prefix hit"));
      }
    }
  }
  BlockBounds::check_disjoint(hit);
}

}  // namespace tagma
