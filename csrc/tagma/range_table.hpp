// The worker's table of ranges: per batch row, where each logical block of a request lives.
//
//   row of block ids   7 8 9 | 40 41 | 0 0 0 | 12        (0 is the null block)
//   range_start        7       40      0       12
//   range_cum          0       3       5       8          logical index of the range's first block
//   num_blocks         9                                  closes the last range
//
// A position p lies in the range with range_cum <= p / block_size < the next range_cum, and then
//
//   slot = (range_start + p / block_size - range_cum) * block_size + p % block_size
//        = p + (range_start - range_cum) * block_size
//
// so a whole range shares one addend: a look-up serves every following position of the range, and
// nothing has to divide, whatever the block size. A run of null blocks is a range without slots.
//
// Rows change by write(): the ranges of a row update, from some logical block on. Ids that nobody
// sent ranges for (warm-up, dummy runs) become ranges on the way in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "tagma/block_range.hpp"
#include "tagma/errors.hpp"

namespace tagma {

// A row would need more ranges than the table holds. Thrown before anything changes.
class RangeCapError : public CapError {
 public:
  RangeCapError(int32_t row, int64_t needed, int32_t cap)
      : CapError(message("row ", row, " needs ", needed, " ranges, above the cap of ", cap)),
        row_(row),
        needed_(needed),
        cap_(cap) {}

  int32_t row() const { return row_; }
  int64_t needed() const { return needed_; }
  int32_t cap() const { return cap_; }

 private:
  int32_t row_;
  int64_t needed_;
  int32_t cap_;
};

class RangeTable {
 public:
  // Allocates everything here: two int32 arrays [max_rows, max_ranges] and 16 bytes a row.
  RangeTable(int32_t max_rows, int32_t max_ranges = kMaxRanges)
      : max_rows_(positive("max_rows", max_rows)),
        max_ranges_(positive("max_ranges", max_ranges)),
        starts_(static_cast<size_t>(max_rows) * static_cast<size_t>(max_ranges)),
        cums_(starts_.size()),
        ends_(static_cast<size_t>(max_rows)) {}

  // The row keeps its first `first_block` blocks and consists of `ranges` behind them. O(ranges),
  // and a binary search for a write inside the row. Returns the first range that was written: the
  // ones in front have their start and first logical block as before, the last of them perhaps
  // another length. Throws as check_write(), and changes nothing then.
  int32_t write(int32_t row, int32_t first_block, const RangeList& ranges) {
    const Plan plan = planned(row, first_block, ranges);
    BlockId* starts = starts_.data() + offset(row);
    int32_t* cums = cums_.data() + offset(row);
    RowEnd end = {plan.kept, first_block, kNullBlock, 0};
    if (plan.kept > 0) {
      end.last_start = starts[plan.kept - 1];
      end.last_cum = cums[plan.kept - 1];
    }
    bool joined = plan.joined;
    for (const BlockRange& range : ranges.ranges()) {
      if (!joined) {
        end.last_start = starts[end.num_ranges] = range.start;
        end.last_cum = cums[end.num_ranges] = end.num_blocks;
        ++end.num_ranges;
      }
      joined = false;  // only the first range can continue what is kept: a list is maximal
      end.num_blocks += range.count;
    }
    ends_[index(row)] = end;
    return plan.kept;
  }

  // Whether write() would go through: throws UsageError (row out of bounds, `first_block` not in
  // [0, blocks of the row], more than 2^31 - 1 blocks) or RangeCapError.
  void check_write(int32_t row, int32_t first_block, const RangeList& ranges) const {
    planned(row, first_block, ranges);
  }

  // Appends `count` block ids behind the row's last block. O(count). Throws UsageError (a negative
  // id, and as check_write()) or RangeCapError, and changes nothing then. Returns as write().
  int32_t append(int32_t row, const BlockId* ids, int64_t count) {
    const int32_t held = num_blocks(row);
    if (count > std::numeric_limits<int32_t>::max() - held) {
      throw UsageError(
          message("row ", row, " holds ", held, " blocks; ", count, " more do not fit in 32 bits"));
    }
    return write(row, held, RangeList::of(ids, count));
  }

  // Empties a row. O(1).
  void clear(int32_t row) {
    check_row(row);
    ends_[index(row)] = {};
  }

  // Moves row `src` over row `dst` and leaves `src` empty. O(ranges).
  void move(int32_t src, int32_t dst) {
    check_row(src);
    check_row(dst);
    if (src == dst) throw UsageError(message("row ", src, " moved onto itself"));
    const ptrdiff_t used = ends_[index(src)].num_ranges;
    std::copy_n(starts_.begin() + offset(src), used, starts_.begin() + offset(dst));
    std::copy_n(cums_.begin() + offset(src), used, cums_.begin() + offset(dst));
    ends_[index(dst)] = ends_[index(src)];
    clear(src);
  }

  // Exchanges two rows. O(ranges).
  void swap(int32_t a, int32_t b) {
    check_row(a);
    check_row(b);
    if (a == b) return;
    const ptrdiff_t used = std::max(ends_[index(a)].num_ranges, ends_[index(b)].num_ranges);
    std::swap_ranges(starts_.begin() + offset(a), starts_.begin() + offset(a) + used,
                     starts_.begin() + offset(b));
    std::swap_ranges(cums_.begin() + offset(a), cums_.begin() + offset(a) + used,
                     cums_.begin() + offset(b));
    std::swap(ends_[index(a)], ends_[index(b)]);
  }

  // The ranges of a row as the table keeps them, num_ranges() of each; valid until the next write.
  const BlockId* range_starts(int32_t row) const {
    check_row(row);
    return starts_.data() + offset(row);
  }
  const int32_t* range_cums(int32_t row) const {
    check_row(row);
    return cums_.data() + offset(row);
  }

  int32_t num_ranges(int32_t row) const {
    check_row(row);
    return ends_[index(row)].num_ranges;
  }

  int32_t num_blocks(int32_t row) const {
    check_row(row);
    return ends_[index(row)].num_blocks;
  }

  // One range of a row; start 0 stands for a run of null blocks.
  BlockRange range(int32_t row, int32_t i) const {
    check_row(row);
    if (i < 0 || i >= ends_[index(row)].num_ranges) {
      throw UsageError(
          message("range ", i, " of row ", row, ", which has ", ends_[index(row)].num_ranges));
    }
    return {starts_[static_cast<size_t>(offset(row) + i)], cum_end(row, i) - cum_begin(row, i)};
  }

  // Fills out[0, pad_to): the slot of each token, PAD beyond the last request's tokens.
  //
  // Request r is row r and owns the tokens [query_start_loc[r], query_start_loc[r + 1]);
  // query_start_loc has num_reqs + 1 entries, starts at 0 and never falls. A position that is
  // negative, past the row's blocks or in a null run gets PAD. out[pad_to, ...) is not touched.
  // Returns the number of descriptor look-ups: at most one per block of positions entered, one per
  // range for ascending positions. Throws UsageError before writing anything.
  int64_t compute_slots(int32_t num_reqs, const int32_t* query_start_loc, const int64_t* positions,
                        int64_t num_tokens, int64_t* out, int64_t pad_to,
                        int32_t block_size) const {
    check_batch(num_reqs, query_start_loc, num_tokens, pad_to, block_size);
    int64_t lookups = 0;
    for (int32_t row = 0; row < num_reqs;) {
      const int64_t token = query_start_loc[row];
      const int32_t last = std::min(row + kDecodes, num_reqs);
      if (decodes(row, last, query_start_loc) &&
          last_slots(row, last, positions + token, out + token, block_size)) {
        lookups += last - row;
        row = last;
      } else {
        for (; row < last; ++row) {
          lookups += row_slots(row, positions, query_start_loc[row], query_start_loc[row + 1], out,
                               block_size);
        }
      }
    }
    std::fill(out + query_start_loc[num_reqs], out + pad_to, kPadSlot);
    return lookups;
  }

  int32_t max_rows() const { return max_rows_; }
  int32_t max_ranges() const { return max_ranges_; }

 private:
  // Counts of a row and a copy of its last range: a decoding request reads these 16 bytes only.
  struct RowEnd {
    int32_t num_ranges = 0;
    int32_t num_blocks = 0;
    BlockId last_start = kNullBlock;
    int32_t last_cum = 0;
  };

  // How a write would go: the ranges in front that stay (the last of them perhaps shorter), and
  // whether the first new range continues it.
  struct Plan {
    int32_t kept;
    bool joined;
  };

  // Positions lo..last of one range (or of the gap behind a row) and what to add to get a slot.
  // Inclusive, because the gap ends at the greatest position there is.
  struct Window {
    int64_t lo = 0;
    int64_t last = 0;
    int64_t addend = 0;
    int32_t range = -1;
    bool mapped = false;
  };

  // Decoding rows tested together; some decode in every batch, rarely all when prompts come in.
  static constexpr int32_t kDecodes = 64;

  // Tokens tested together: long enough to vectorise, short enough for block sizes of 16.
  static constexpr int64_t kStride = 16;

  static int32_t positive(const char* name, int32_t value) {
    if (value <= 0) throw UsageError(message(name, "=", value, " is not positive"));
    return value;
  }

  static size_t index(int32_t row) { return static_cast<size_t>(row); }
  ptrdiff_t offset(int32_t row) const { return ptrdiff_t{row} * max_ranges_; }

  void check_row(int32_t row) const {
    if (row < 0 || row >= max_rows_) {
      throw UsageError(message("row ", row, " is outside [0, ", max_rows_, ")"));
    }
  }

  void check_batch(int32_t num_reqs, const int32_t* query_start_loc, int64_t num_tokens,
                   int64_t pad_to, int32_t block_size) const {
    positive("block_size", block_size);
    if (num_reqs < 0 || num_reqs > max_rows_) {
      throw UsageError(message("num_reqs=", num_reqs, " is outside [0, ", max_rows_, "]"));
    }
    if (query_start_loc[0] != 0) {
      throw UsageError(message("query_start_loc[0]=", query_start_loc[0], ", expected 0"));
    }
    bool falls = false;
    for (int32_t row = 0; row < num_reqs; ++row) {
      falls |= query_start_loc[row + 1] < query_start_loc[row];
    }
    if (falls) throw UsageError("query_start_loc falls between two requests");
    if (query_start_loc[num_reqs] > num_tokens) {
      throw UsageError(message("query_start_loc ends at ", query_start_loc[num_reqs], ", but only ",
                               num_tokens, " positions are given"));
    }
    if (pad_to < query_start_loc[num_reqs]) {
      throw UsageError(message("pad_to=", pad_to, " is below the ", query_start_loc[num_reqs],
                               " tokens of the batch"));
    }
  }

  Plan planned(int32_t row, int32_t first_block, const RangeList& ranges) const {
    check_row(row);
    const RowEnd& end = ends_[index(row)];
    if (first_block < 0 || first_block > end.num_blocks) {
      throw UsageError(message("write from block ", first_block, " on to row ", row, ", which has ",
                               end.num_blocks, " blocks"));
    }
    if (ranges.num_blocks() > std::numeric_limits<int32_t>::max() - first_block) {
      throw UsageError(message("row ", row, " keeps ", first_block, " blocks; ",
                               ranges.num_blocks(), " more do not fit in 32 bits"));
    }
    const int32_t* cums = cums_.data() + offset(row);
    int32_t kept = end.num_ranges;
    if (kept > 0 && end.last_cum >= first_block) {  // else behind the start of the last: growth
      kept = static_cast<int32_t>(std::lower_bound(cums, cums + kept, first_block) - cums);
    }
    const bool joined =
        kept > 0 && !ranges.empty() &&
        joins({starts_[static_cast<size_t>(offset(row) + kept - 1)], first_block - cums[kept - 1]},
              ranges.ranges().front().start);
    const int64_t needed = int64_t{kept} + ranges.num_ranges() - joined;
    if (needed > max_ranges_) throw RangeCapError(row, needed, max_ranges_);
    return {kept, joined};
  }

  int32_t cum_begin(int32_t row, int32_t i) const {
    return cums_[static_cast<size_t>(offset(row) + i)];
  }

  int32_t cum_end(int32_t row, int32_t i) const {
    return i + 1 < ends_[index(row)].num_ranges ? cum_begin(row, i + 1)
                                                : ends_[index(row)].num_blocks;
  }

  // Whether each of these rows computes one token.
  static bool decodes(int32_t row, int32_t last, const int32_t* query_start_loc) {
    int32_t other = 0;
    for (int32_t r = row; r < last; ++r) {
      other |= (query_start_loc[r + 1] - query_start_loc[r]) ^ 1;
    }
    return other == 0;
  }

  // The slots of decoding rows, each of which has its token in its last range. False if one of them
  // has not, or its last range is of null blocks; what was written is then to be overwritten.
  bool last_slots(int32_t row, int32_t last, const int64_t* positions, int64_t* out,
                  int32_t block_size) const {
    // Unsigned 32 by 32 bits: the one 64-bit product that every vector unit has.
    const auto times_block = [block_size](int32_t count) {
      return uint64_t{static_cast<uint32_t>(count)} * static_cast<uint32_t>(block_size);
    };
    const RowEnd* rows = ends_.data() + row;
    uint64_t outside = 0;  // its sign bit, as in fill_window()
    for (int32_t i = 0; i < last - row; ++i) {
      const auto position = static_cast<uint64_t>(positions[i]);
      const uint64_t lo = times_block(rows[i].last_cum);
      const uint64_t end = times_block(rows[i].num_blocks);
      const uint64_t start = times_block(rows[i].last_start);
      outside |= position | (position - lo) | (end - 1 - position) | (start - 1);
      out[i] = static_cast<int64_t>(position - lo + start);
    }
    return outside >> 63 == 0;
  }

  // The window around a position >= 0. `hint` is the range found before, or -1; the range behind it
  // is tried first, for prefills that walk through their ranges, then the last one.
  Window find(int32_t row, int64_t position, int64_t block_size, int32_t hint) const {
    const RowEnd& state = ends_[index(row)];
    const int64_t row_end = state.num_blocks * block_size;
    if (position >= row_end) {
      return {row_end, std::numeric_limits<int64_t>::max(), 0, hint, false};
    }
    const int32_t* cums = cums_.data() + offset(row);
    const int32_t last = state.num_ranges - 1;
    int32_t i = last;
    if (hint + 1 < last && position >= cums[hint + 1] * block_size &&
        position < cums[hint + 2] * block_size) {
      i = hint + 1;
    } else if (position < state.last_cum * block_size) {
      // The last range that begins at or before the position.
      const int32_t* above =
          std::upper_bound(cums, cums + last, position,
                           [block_size](int64_t p, int32_t cum) { return p < cum * block_size; });
      i = static_cast<int32_t>(above - cums) - 1;
    }
    const BlockId start = starts_[static_cast<size_t>(offset(row) + i)];
    const int64_t cum = cums[i];
    return {cum * block_size, cum_end(row, i) * block_size - 1, (start - cum) * block_size, i,
            start != kNullBlock};
  }

  int64_t row_slots(int32_t row, const int64_t* positions, int64_t token, int64_t end, int64_t* out,
                    int64_t block_size) const {
    int64_t lookups = 0;
    int32_t hint = -1;
    while (token < end) {
      const int64_t position = positions[token];
      if (position < 0) {
        out[token++] = kPadSlot;
        continue;
      }
      const Window window = find(row, position, block_size, hint);
      ++lookups;
      hint = window.range;
      token = fill_window(window, positions, token, end, out);
    }
    return lookups;
  }

  // Writes tokens for as long as their positions stay in the window; returns the first that leaves.
  // What lies behind it may have been written as well, and is to be overwritten.
  static int64_t fill_window(const Window& window, const int64_t* __restrict positions,
                             int64_t token, int64_t end, int64_t* __restrict out) {
    const auto lo = static_cast<uint64_t>(window.lo);
    const auto last = static_cast<uint64_t>(window.last);
    const auto addend = static_cast<uint64_t>(window.addend);
    const uint64_t pad = window.mapped ? 0 : ~uint64_t{0};  // kPadSlot is -1: all bits set
    static_assert(kPadSlot == -1);
    for (; token + kStride <= end; token += kStride) {
      // Sign bits say "left the window": plain 64-bit arithmetic, which vectorises on any target
      // where an unsigned comparison or an early exit would not.
      uint64_t outside = 0;
      for (int64_t i = 0; i < kStride; ++i) {
        const auto p = static_cast<uint64_t>(positions[token + i]);
        outside |= p | (p - lo) | (last - p);
        out[token + i] = static_cast<int64_t>((p + addend) | pad);
      }
      if (outside >> 63) break;
    }
    for (; token < end; ++token) {
      const int64_t position = positions[token];
      if (position < window.lo || position > window.last) break;
      out[token] = window.mapped ? position + window.addend : kPadSlot;
    }
    return token;
  }

  int32_t max_rows_;
  int32_t max_ranges_;
  std::vector<BlockId> starts_;  // [max_rows, max_ranges]
  std::vector<int32_t> cums_;    // [max_rows, max_ranges]
  std::vector<RowEnd> ends_;     // [max_rows]
};

}  // namespace tagma
