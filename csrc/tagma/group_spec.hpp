// KV-cache groups: the layers of one kind share one row a request, and hits are looked up by kind.
//
// All groups take blocks from the same pool. Names and rules are vLLM's
// (v1/core/single_type_kv_cache_manager.py, find_longest_cache_hit).
#pragma once

#include <cstdint>
#include <vector>

#include "tagma/block_range.hpp"
#include "tagma/errors.hpp"
#include "tagma/prefix_index.hpp"

namespace tagma {

enum class GroupKind {
  kPrefix,  // full attention: every block from the first position on
  kWindow,  // sliding window: the last `window_blocks` blocks, null blocks in front of them
  kState,   // a recurrent state: the last block alone, null blocks in front of it
  kChunk    // chunked local attention: the blocks of the chunk that the next token is in
};

struct GroupSpec {
  GroupKind kind = GroupKind::kPrefix;
  // Of a window: blocks in a row that a hit needs, unless it is shorter. Of chunks: their length.
  int32_t window_blocks = 1;
  int32_t align_blocks = 1;  // hits end at multiples of this: another group's block is so long

  // Throws UsageError if a count is below 1, a state or prefix group names a window, or chunks are
  // to end where another group's longer blocks do.
  void check() const {
    if (window_blocks < 1)
      throw UsageError(message("window_blocks=", window_blocks, " is below 1"));
    if (align_blocks < 1) throw UsageError(message("align_blocks=", align_blocks, " is below 1"));
    if (kind != GroupKind::kWindow && kind != GroupKind::kChunk && window_blocks != 1) {
      throw UsageError(message("window_blocks=", window_blocks, " in a group without a window"));
    }
    if (kind == GroupKind::kChunk && align_blocks != 1) {
      throw UsageError(message("align_blocks=", align_blocks, " with chunks"));
    }
  }
};

// The longest published prefix of at most `max_blocks` blocks in at most `max_ranges` ranges whose
// end is aligned; key_at(i) gives the i-th block's key. O(blocks hit).
template <bool kGrouped = true, typename KeyAt>
RangeList longest_prefix(const PrefixIndex& index, int32_t group, int32_t max_blocks, int32_t align,
                         int32_t max_ranges, KeyAt&& key_at) {
  RangeList hit;
  BlockRange run;  // the last range so far, kept here while it grows block by block
  for (int32_t i = 0; i < max_blocks; ++i) {
    const BlockId last = run.count > 0 ? run.end() - 1 : kNullBlock;
    const BlockId block = index.find_behind<kGrouped>(group, last, key_at(i));
    if (block == kNullBlock) break;
    if (run.count > 0 && block == run.end()) {
      ++run.count;
      continue;
    }
    if (hit.num_ranges() + (run.count > 0 ? 1 : 0) == max_ranges) break;
    hit.append(run);
    run = {block, 1};
  }
  hit.append(run);
  if (align > 1) hit.truncate(hit.num_blocks() / align * align);
  return hit;
}

// Null blocks, and then the rightmost `window` published blocks in a row whose end is aligned; else
// as many as are published from the first block on. Empty if it lies in more than `max_ranges`
// ranges: a window cannot be cut short. O(max_blocks).
template <typename KeyAt>
RangeList rightmost_window(const PrefixIndex& index, int32_t group, int32_t max_blocks,
                           int32_t window, int32_t align, int32_t max_ranges, KeyAt&& key_at) {
  std::vector<BlockId> found;  // from the right
  int32_t first = max_blocks;
  while (first > 0 && static_cast<int32_t>(found.size()) < window) {
    const BlockId block = index.find(group, key_at(--first));
    if (block == kNullBlock) {
      found.clear();
    } else if (!found.empty() || (first + 1) % align == 0) {
      found.push_back(block);
    }
  }
  if (static_cast<int32_t>(found.size()) < window) first = 0;  // what was found begins there
  RangeList hit;
  if (found.empty()) return hit;
  hit.append({kNullBlock, first});
  for (size_t i = found.size(); i-- > 0;) hit.append({found[i], 1});
  return hit.num_ranges() > max_ranges ? RangeList() : hit;
}

// Null blocks up to the last multiple of `chunk`, and the published blocks that follow them without
// a gap: what lies in earlier chunks is not attended to, and counts as found. At most `max_ranges`
// ranges. O(chunk).
template <typename KeyAt>
RangeList last_chunk(const PrefixIndex& index, int32_t group, int32_t max_blocks, int32_t chunk,
                     int32_t max_ranges, KeyAt&& key_at) {
  const int32_t first = max_blocks / chunk * chunk;
  if (first > 0 && max_ranges < 1) return {};
  RangeList hit({kNullBlock, first});
  hit.append(longest_prefix(index, group, max_blocks - first, 1, max_ranges - (first > 0 ? 1 : 0),
                            [&](int32_t i) { return key_at(first + i); }));
  return hit;
}

}  // namespace tagma
