// The rows of requests and the handles by which callers name them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

// A request's row: slot number in the low half, generation in the high half, so that a handle kept
// after the row was closed is recognised. 0 is never a handle.
using RowHandle = int64_t;

struct Row {
  RangeList blocks;
  int32_t num_published = 0;          // leading blocks that are hits or were published
  int32_t published_before_step = 0;  // of these, before the step `published_step`
  int64_t published_step = -1;
  int64_t grown_step = -1;   // the last step that asked for blocks: they do not move in it
  int32_t num_prompt = 0;    // blocks of the prompt; growth beyond teaches the headroom
  int32_t num_expected = 0;  // blocks it is expected to hold in the end
  int32_t generation = 1;
  int32_t slot = -1;  // in the table
  bool open = false;
  bool moved = false;  // some of its blocks moved and take_row_moves() has not told yet
  int32_t changed_from = kUnchanged;  // the first logical block that take_changes() has to tell

  static constexpr int32_t kUnchanged = std::numeric_limits<int32_t>::max();
};

// From a logical block on, a row is elsewhere or longer than it was when last told.
struct RowChange {
  RowHandle row;
  int32_t first_block;
  RangeList blocks;  // from there to the row's end
};

class RowTable {
 public:
  // Opens a row. Its slot and generation are chosen here.
  RowHandle open(Row&& row) {
    if (free_.empty()) {
      free_.push_back(static_cast<int32_t>(rows_.size()));
      rows_.emplace_back();
    }
    const int32_t slot = free_.back();
    free_.pop_back();
    row.generation = rows_[static_cast<size_t>(slot)].generation;
    row.slot = slot;
    row.open = true;
    rows_[static_cast<size_t>(slot)] = std::move(row);
    ++size_;
    return handle_of(static_cast<size_t>(slot));
  }

  // Throws UsageError if the handle is not of an open row.
  void close(RowHandle handle) {
    Row& row = at(handle);
    // Wraps after 2^31 - 1 uses of one slot: weeks of a busy server.
    const int32_t generation =
        row.generation == std::numeric_limits<int32_t>::max() ? 1 : row.generation + 1;
    row = Row{};
    row.generation = generation;
    free_.push_back(static_cast<int32_t>(handle & 0xffffffff));
    --size_;
  }

  bool is_open(RowHandle handle) const {
    const auto slot = static_cast<size_t>(handle & 0xffffffff);
    return handle > 0 && slot < rows_.size() && rows_[slot].open &&
           rows_[slot].generation == static_cast<int32_t>(handle >> 32);
  }

  // Throws UsageError if the handle is not of an open row.
  const Row& at(RowHandle handle) const {
    if (!is_open(handle)) throw UsageError(message("row handle ", handle, " is not open"));
    return rows_[static_cast<size_t>(handle & 0xffffffff)];
  }
  Row& at(RowHandle handle) {
    return const_cast<Row&>(static_cast<const RowTable*>(this)->at(handle));
  }

  // The row's blocks from a logical index on are others than before. O(1).
  void note_change(Row& row, int32_t first_block) {
    if (row.changed_from == Row::kUnchanged) changed_.push_back(row.slot);
    row.changed_from = std::min(row.changed_from, first_block);
  }

  // The changes of open rows since the last call, one a row. O(ranges of these).
  std::vector<RowChange> take_changes() {
    std::vector<RowChange> out;
    for (const int32_t at : changed_) {
      Row& row = rows_[static_cast<size_t>(at)];
      // Closed rows have forgotten their change; a slot may be listed twice then.
      const int32_t first = std::exchange(row.changed_from, Row::kUnchanged);
      if (first == Row::kUnchanged) continue;
      out.push_back({handle_of(static_cast<size_t>(at)), first,
                     row.blocks.slice(first, row.blocks.num_blocks())});
    }
    changed_.clear();
    return out;
  }

  // By slot, closed ones included.
  size_t num_slots() const { return rows_.size(); }
  const Row& slot(size_t slot) const { return rows_[slot]; }
  Row& slot(size_t slot) { return rows_[slot]; }
  RowHandle handle_of(size_t slot) const {
    return (static_cast<RowHandle>(rows_[slot].generation) << 32) | static_cast<RowHandle>(slot);
  }

  int32_t size() const { return size_; }  // open rows

  size_t memory_bytes() const {
    size_t bytes = 0;
    for (const Row& row : rows_) bytes += sizeof(Row) + row.blocks.memory_bytes();
    return bytes;
  }

 private:
  std::vector<Row> rows_;
  std::vector<int32_t> free_;
  std::vector<int32_t> changed_;  // slots
  int32_t size_ = 0;
};

}  // namespace tagma
