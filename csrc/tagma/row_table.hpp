// The rows of requests, one for each group, and the handles by which callers name a request's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

// A request's rows: their place in the low half, generation in the high half, so that a handle kept
// after the rows were closed is recognised. 0 is never a handle.
using RowHandle = int64_t;

struct Row {
  RangeList blocks;                   // changed through RowTable only
  int32_t num_published = 0;          // leading blocks: hits, published or passed over
  int32_t published_before_step = 0;  // of these, before the step `published_step`
  int64_t published_step = -1;
  int64_t grown_step = -1;   // the last step that asked for blocks: they do not move in it
  int32_t num_prompt = 0;    // blocks of the prompt; growth beyond teaches the headroom
  int32_t num_expected = 0;  // blocks it is expected to hold in the end
  int32_t generation = 1;
  bool open = false;
  bool listed = false;                // among the rows that take_changes() looks at
  int32_t changed_from = kUnchanged;  // the first logical block that take_changes() has to tell
  int32_t told_nulls = 0;  // leading null blocks that the workers know of: see RowTable::skip()

  static constexpr int32_t kUnchanged = std::numeric_limits<int32_t>::max();
};

// From a logical block on, a row is elsewhere or longer than it was when last told.
struct RowChange {
  RowHandle row;
  int32_t group;
  int32_t first_block;
  RangeList blocks;  // from there to the row's end
};

// A request at place p has the rows p * groups to (p + 1) * groups - 1, called its slots.
class RowTable {
 public:
  // With `num_blocks` the table knows which row's range begins at a block (sole_owner()): 4 bytes a
  // block. Throws UsageError if there are no groups.
  explicit RowTable(int32_t num_groups = 1, int32_t num_blocks = 0)
      : num_groups_(num_groups), starts_(static_cast<size_t>(num_blocks), 0) {
    if (num_groups < 1) throw UsageError(message("groups=", num_groups, " is below 1"));
  }

  // Opens empty rows for a request, one for each group. O(groups).
  RowHandle open() {
    if (free_.empty()) {
      free_.push_back(static_cast<int32_t>(rows_.size() / groups()));
      rows_.resize(rows_.size() + groups());
    }
    const auto place = static_cast<size_t>(free_.back());
    free_.pop_back();
    for (size_t slot = place * groups(); slot < (place + 1) * groups(); ++slot) {
      rows_[slot].open = true;
    }
    ++size_;
    return handle_of(place * groups());
  }

  // Throws UsageError if the handle is not of open rows.
  void close(RowHandle handle) {
    const size_t first = slot_of(handle);
    const int32_t old = rows_[first].generation;
    // Wraps after 2^31 - 1 uses of one place: weeks of a busy server.
    const int32_t generation = old == std::numeric_limits<int32_t>::max() ? 1 : old + 1;
    for (size_t slot = first; slot < first + groups(); ++slot) {
      forget_starts(rows_[slot], 0);
      const bool listed = rows_[slot].listed;
      rows_[slot] = Row{};
      rows_[slot].generation = generation;
      rows_[slot].listed = listed;
    }
    free_.push_back(static_cast<int32_t>(first / groups()));
    --size_;
  }

  bool is_open(RowHandle handle) const {
    const size_t slot = static_cast<size_t>(handle & 0xffffffff) * groups();
    return handle > 0 && slot < rows_.size() && rows_[slot].open &&
           rows_[slot].generation == static_cast<int32_t>(handle >> 32);
  }

  // A request's row in a group. Throws UsageError if the handle is not of open rows or there is no
  // such group.
  const Row& at(RowHandle handle, int32_t group = 0) const {
    if (group < 0 || group >= num_groups_) {
      throw UsageError(message("group ", group, " is outside [0, ", num_groups_, ")"));
    }
    return rows_[slot_of(handle) + static_cast<size_t>(group)];
  }
  Row& at(RowHandle handle, int32_t group = 0) {
    return const_cast<Row&>(static_cast<const RowTable*>(this)->at(handle, group));
  }

  // --- changes of a row's blocks, noted for take_changes() --------------------------------------

  // O(ranges appended).
  void append(Row& row, const RangeList& blocks) {
    if (blocks.empty()) return;
    note_change(row, row.blocks.num_blocks());
    const auto before = static_cast<size_t>(row.blocks.num_ranges());
    row.blocks.append(blocks);
    note_starts(row, before);
  }

  // The logical blocks from `first` on are at `blocks` from now on. O(ranges).
  void replace(Row& row, int32_t first, const RangeList& blocks) {
    note_change(row, first);
    forget_starts(row, 0);
    row.blocks.replace(first, blocks);
    note_starts(row, 0);
  }

  // O(ranges).
  void truncate(Row& row, int32_t num_blocks) {
    note_change(row, std::min(num_blocks, row.blocks.num_blocks()));
    forget_starts(row, 0);
    row.blocks.truncate(num_blocks);
    note_starts(row, 0);
  }

  // The leading `blocks` become null. By itself no change to tell: nobody reads or writes there any
  // more, so that a worker may keep what it knows. It learns of the nulls with the row's next
  // change; else its row could keep more ranges than the range table holds. O(ranges).
  void skip(Row& row, int32_t blocks) {
    forget_starts(row, 0);
    row.blocks.replace(0, RangeList({kNullBlock, blocks}));
    note_starts(row, 0);
  }

  // The changes of open rows since the last call, one a row. O(ranges of these).
  std::vector<RowChange> take_changes() {
    std::vector<RowChange> out;
    for (const int32_t slot : changed_) {
      Row& row = rows_[static_cast<size_t>(slot)];
      // Closed rows have forgotten their change; one that grew and was cut back has none to tell.
      row.listed = false;
      int32_t first = std::exchange(row.changed_from, Row::kUnchanged);
      if (first >= row.blocks.num_blocks()) continue;
      const int32_t nulls = row.blocks.num_leading_nulls();
      if (nulls > row.told_nulls) first = std::min(first, row.told_nulls);
      row.told_nulls = nulls;
      out.push_back({handle_of(static_cast<size_t>(slot)), slot % num_groups_, first,
                     row.blocks.slice(first, row.blocks.num_blocks())});
    }
    changed_.clear();
    return out;
  }

  // The row of which a range begins at a block that one row, and nothing else, references; null if
  // the block lies inside its range, or nobody's. O(1).
  Row* sole_owner(BlockId block) {
    const size_t at = static_cast<size_t>(block);
    if (at >= starts_.size() || starts_[at] == 0) return nullptr;
    return &rows_[static_cast<size_t>(starts_[at]) - 1];
  }

  // --- by slot, closed ones included ------------------------------------------------------------

  size_t num_slots() const { return rows_.size(); }
  const Row& slot(size_t slot) const { return rows_[slot]; }
  Row& slot(size_t slot) { return rows_[slot]; }
  size_t slot_of(const Row& row) const { return static_cast<size_t>(&row - rows_.data()); }
  // The handle of the request that a slot belongs to.
  RowHandle handle_of(size_t slot) const {
    return (static_cast<RowHandle>(rows_[slot].generation) << 32) |
           static_cast<RowHandle>(slot / groups());
  }

  int32_t size() const { return size_; }  // requests with open rows
  int32_t num_groups() const { return num_groups_; }

  size_t memory_bytes() const {
    size_t bytes = starts_.capacity() * sizeof(int32_t);
    for (const Row& row : rows_) bytes += sizeof(Row) + row.blocks.memory_bytes();
    return bytes;
  }

  // Law R7: the table knows where ranges begin. Throws InvariantError. O(num_blocks + ranges).
  void check_invariants() const {
    std::vector<int32_t> starts(starts_.size(), 0);
    for (size_t slot = 0; slot < rows_.size(); ++slot) {
      for (const BlockRange& range : rows_[slot].blocks.ranges()) {
        if (!range.is_null() && !starts.empty()) {
          starts[static_cast<size_t>(range.start)] ^= static_cast<int32_t>(slot) + 1;
        }
      }
    }
    for (size_t b = 0; b < starts.size(); ++b) {
      require(starts[b] == starts_[b], "R7 (rows)", "the wrong owner of a range at block",
              static_cast<int64_t>(b));
    }
  }

 private:
  size_t groups() const { return static_cast<size_t>(num_groups_); }

  size_t slot_of(RowHandle handle) const {
    if (!is_open(handle)) throw UsageError(message("row handle ", handle, " is not open"));
    return static_cast<size_t>(handle & 0xffffffff) * groups();
  }

  // The row's blocks from a logical index on are others than before. O(1).
  void note_change(Row& row, int32_t first_block) {
    if (!row.listed) changed_.push_back(static_cast<int32_t>(slot_of(row)));
    row.listed = true;
    row.changed_from = std::min(row.changed_from, first_block);
  }

  void note_starts(const Row& row, size_t first_range) {
    if (starts_.empty()) return;
    const auto owner = static_cast<int32_t>(slot_of(row)) + 1;
    const std::vector<BlockRange>& ranges = row.blocks.ranges();
    for (size_t i = first_range; i < ranges.size(); ++i) {
      if (!ranges[i].is_null()) starts_[static_cast<size_t>(ranges[i].start)] ^= owner;
    }
  }
  void forget_starts(const Row& row, size_t first_range) { note_starts(row, first_range); }

  int32_t num_groups_;
  std::vector<Row> rows_;
  std::vector<int32_t> free_;     // places of closed rows
  std::vector<int32_t> changed_;  // slots
  // [block] the exclusive or of slot + 1 over all rows of which a range begins here: of a block
  // that only one row references it is that row's, without a list to keep.
  std::vector<int32_t> starts_;
  int32_t size_ = 0;
};

}  // namespace tagma
