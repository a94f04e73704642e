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
// nothing has to divide, whatever the block size. Ranges are derived from the ids that vLLM sends
// (and so cannot disagree with them); a run of null blocks is a range of its own without slots.
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
        rows_(static_cast<size_t>(max_rows)) {}

  // Appends `count` block ids behind the row's last block. O(count). Throws UsageError (row out of
  // bounds, negative id, more than 2^31 - 1 blocks) or RangeCapError, and changes nothing then.
  void append(int32_t row, const BlockId* ids, int64_t count) {
    check_row(row);
    if (count < 0) throw UsageError(message("append of ", count, " block ids"));
    Entry entry = last_entry(row);
    if (count > std::numeric_limits<int32_t>::max() - entry.num_blocks) {
      throw UsageError(message("row ", row, " holds ", entry.num_blocks, " blocks; ", count,
                               " more do not fit in 32 bits"));
    }
    const Entry before = entry;
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0) {
        throw UsageError(message("block id ", ids[i], " at index ", i, " is negative"));
      }
      entry.push(ids[i]);
    }
    if (entry.num_ranges > max_ranges_) throw RangeCapError(row, entry.num_ranges, max_ranges_);

    // Same walk again, now writing: counting first is what keeps a refused row whole.
    entry = before;
    BlockId* starts = starts_.data() + offset(row);
    int32_t* cums = cums_.data() + offset(row);
    for (int64_t i = 0; i < count; ++i) {
      if (entry.push(ids[i])) {
        starts[entry.num_ranges - 1] = ids[i];
        cums[entry.num_ranges - 1] = entry.num_blocks - 1;
      }
    }
    if (entry.num_blocks == 0) return;
    const int64_t last = entry.num_ranges - 1;
    rows_[index(row)] = {static_cast<int32_t>(last + 1), entry.num_blocks, starts[last],
                         cums[last]};
  }

  // Empties a row. O(1).
  void clear(int32_t row) {
    check_row(row);
    rows_[index(row)] = {};
  }

  // Moves row `src` over row `dst` and leaves `src` empty. O(ranges).
  void move(int32_t src, int32_t dst) {
    check_row(src);
    check_row(dst);
    if (src == dst) throw UsageError(message("row ", src, " moved onto itself"));
    const ptrdiff_t used = rows_[index(src)].num_ranges;
    std::copy_n(starts_.begin() + offset(src), used, starts_.begin() + offset(dst));
    std::copy_n(cums_.begin() + offset(src), used, cums_.begin() + offset(dst));
    rows_[index(dst)] = rows_[index(src)];
    clear(src);
  }

  // Exchanges two rows. O(ranges).
  void swap(int32_t a, int32_t b) {
    check_row(a);
    check_row(b);
    if (a == b) return;
    const ptrdiff_t used = std::max(rows_[index(a)].num_ranges, rows_[index(b)].num_ranges);
    std::swap_ranges(starts_.begin() + offset(a), starts_.begin() + offset(a) + used,
                     starts_.begin() + offset(b));
    std::swap_ranges(cums_.begin() + offset(a), cums_.begin() + offset(a) + used,
                     cums_.begin() + offset(b));
    std::swap(rows_[index(a)], rows_[index(b)]);
  }

  int32_t num_ranges(int32_t row) const {
    check_row(row);
    return rows_[index(row)].num_ranges;
  }

  int32_t num_blocks(int32_t row) const {
    check_row(row);
    return rows_[index(row)].num_blocks;
  }

  // One range of a row; start 0 stands for a run of null blocks.
  BlockRange range(int32_t row, int32_t i) const {
    check_row(row);
    if (i < 0 || i >= rows_[index(row)].num_ranges) {
      throw UsageError(
          message("range ", i, " of row ", row, ", which has ", rows_[index(row)].num_ranges));
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
  struct Row {
    int32_t num_ranges = 0;
    int32_t num_blocks = 0;
    BlockId last_start = kNullBlock;
    int32_t last_cum = 0;
  };

  // The state that run-length encoding carries from one id to the next.
  struct Entry {
    int64_t num_ranges;
    int32_t num_blocks;
    int64_t next;  // the id that would extend the last range; -1 before the first

    // True if `id` opens a range.
    bool push(BlockId id) {
      const bool opens = id != next;
      num_ranges += opens;
      num_blocks += 1;
      next = id == kNullBlock ? kNullBlock : int64_t{id} + 1;
      return opens;
    }
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

  Entry last_entry(int32_t row) const {
    const int32_t used = rows_[index(row)].num_ranges;
    if (used == 0) return {0, 0, -1};
    const BlockRange last = range(row, used - 1);
    const int64_t next = last.start == kNullBlock ? kNullBlock : int64_t{last.start} + last.count;
    return {used, rows_[index(row)].num_blocks, next};
  }

  int32_t cum_begin(int32_t row, int32_t i) const {
    return cums_[static_cast<size_t>(offset(row) + i)];
  }

  int32_t cum_end(int32_t row, int32_t i) const {
    return i + 1 < rows_[index(row)].num_ranges ? cum_begin(row, i + 1)
                                                : rows_[index(row)].num_blocks;
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
    const Row* rows = rows_.data() + row;
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
    const Row& state = rows_[index(row)];
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
  static int64_t fill_window(const Window& window, const int64_t* positions, int64_t token,
                             int64_t end, int64_t* out) {
    const auto lo = static_cast<uint64_t>(window.lo);
    const auto last = static_cast<uint64_t>(window.last);
    for (; token + kStride <= end; token += kStride) {
      // Sign bits say "left the window": plain 64-bit arithmetic, which vectorises on any target
      // where an unsigned comparison or an early exit would not.
      uint64_t outside = 0;
      for (int64_t i = 0; i < kStride; ++i) {
        const auto p = static_cast<uint64_t>(positions[token + i]);
        outside |= p | (p - lo) | (last - p);
      }
      if (outside >> 63) break;
      write(window, positions + token, kStride, out + token);
    }
    int64_t stop = token;
    while (stop < end && positions[stop] >= window.lo && positions[stop] <= window.last) ++stop;
    write(window, positions + token, stop - token, out + token);
    return stop;
  }

  static void write(const Window& window, const int64_t* positions, int64_t count, int64_t* out) {
    if (!window.mapped) {
      std::fill_n(out, count, kPadSlot);
      return;
    }
    for (int64_t i = 0; i < count; ++i) out[i] = positions[i] + window.addend;
  }

  int32_t max_rows_;
  int32_t max_ranges_;
  std::vector<BlockId> starts_;  // [max_rows, max_ranges]
  std::vector<int32_t> cums_;    // [max_rows, max_ranges]
  std::vector<Row> rows_;        // [max_rows]
};

}  // namespace tagma
