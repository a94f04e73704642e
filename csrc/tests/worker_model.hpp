// What a worker knows of the pool: the block contents and rows that it was told of, no more.
//
// As vLLM's workers do in each step: copy all blocks at once (read all, then write all), update the
// rows that changed, and only then write. See docs/compaction.md. A pin stands for somebody outside
// the pool, such as a KV transfer, who watches the content of its blocks from the end of the step
// in which it was made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/block_model.hpp"
#include "tests/check.hpp"

class WorkerModel {
 public:
  WorkerModel(int32_t num_blocks, int32_t max_ranges)
      : max_ranges_(max_ranges), contents_(static_cast<size_t>(num_blocks), kNothing) {}

  // --- told while the step is scheduled ---------------------------------------------------------

  // A new row, whose blocks come with its first update; the leading `num_hit` are written already,
  // or by others.
  void admit(tagma::RowHandle handle, int32_t group, int32_t num_hit) {
    CHECK(rows_.emplace(Name{handle, group}, Row{{}, num_hit}).second);
  }
  void free(tagma::RowHandle handle, int32_t group) { CHECK(rows_.erase({handle, group}) == 1); }

  // Leading blocks of a row that are hits or were written.
  int32_t written(tagma::RowHandle handle, int32_t group) const {
    return rows_.at({handle, group}).written;
  }

  void pin(tagma::PinHandle pin, const std::vector<tagma::BlockId>& blocks) {
    CHECK(pins_.emplace(pin, Pin{blocks, {}, {}, false}).second);
  }
  void unpin(tagma::PinHandle pin) { CHECK(pins_.erase(pin) == 1); }

  // --- executed at its end, in this order -------------------------------------------------------

  void copy(const std::vector<tagma::BlockCopy>& copies) {
    std::vector<int64_t> read;
    std::vector<tagma::BlockId> targets;
    for (const tagma::BlockCopy& copy : copies) {
      read.push_back(content(copy.from));
      targets.push_back(copy.to);
      CHECK(!is_watched(copy.from) && !is_watched(copy.to));
    }
    std::sort(targets.begin(), targets.end());
    CHECK(std::adjacent_find(targets.begin(), targets.end()) == targets.end());
    for (size_t i = 0; i < copies.size(); ++i) {
      contents_[static_cast<size_t>(copies[i].to)] = read[i];
    }
  }

  // Law W2: an update continues what the worker's row holds, and never shortens it. And the row
  // stays under the cap, although what fell out of a window is told with the next change only.
  void update(const tagma::RowChange& change) {
    std::vector<tagma::BlockId>& blocks = rows_.at({change.row, change.group}).blocks;
    const auto first = static_cast<size_t>(change.first_block);
    CHECK(first <= blocks.size());
    CHECK(first + static_cast<size_t>(change.blocks.num_blocks()) >= blocks.size());
    blocks.resize(first);
    for (const tagma::BlockId b : BlockModel::ids(change.blocks)) blocks.push_back(b);
    tagma::RangeList row;
    for (const tagma::BlockId b : blocks) row.append({b, 1});
    CHECK(row.num_ranges() <= max_ranges_);
  }

  // The worker's row is the pool's, but for blocks that fell out of a window since its last change.
  void check_row(tagma::RowHandle handle, int32_t group, const tagma::RangeList& blocks) const {
    const std::vector<tagma::BlockId>& known = rows_.at({handle, group}).blocks;
    const std::vector<tagma::BlockId> expected = BlockModel::ids(blocks);
    CHECK(known.size() == expected.size());
    for (size_t i = 0; i < known.size(); ++i) {
      CHECK(known[i] == expected[i] || expected[i] == tagma::kNullBlock);
    }
  }

  // Writes some of what the row has not written yet, at least its first `least` blocks. `blocks`:
  // the row; null blocks of it are not written.
  template <typename ContentOf>
  void write(tagma::RowHandle handle, int32_t group, const tagma::RangeList& blocks, int32_t least,
             std::mt19937_64& random, ContentOf&& content_of) {
    Row& row = rows_.at({handle, group});
    const auto held = static_cast<int32_t>(row.blocks.size());
    int32_t upto = std::max(row.written, least);
    if (held > upto) upto += static_cast<int32_t>(random() % uint64_t(held - upto + 1));
    for (; row.written < upto; ++row.written) {
      if (blocks.at(row.written) == tagma::kNullBlock) continue;
      const tagma::BlockId block = row.blocks[static_cast<size_t>(row.written)];
      for (auto& [handle_of_pin, pin] : pins_) {
        if (!pin.watched) continue;
        const auto at = std::find(pin.blocks.begin(), pin.blocks.end(), block);
        if (at == pin.blocks.end()) continue;
        CHECK(pin.holders.count({handle, group}) == 1);  // it held the block before
        pin.contents[static_cast<size_t>(at - pin.blocks.begin())] = content_of(row.written);
      }
      contents_[static_cast<size_t>(block)] = content_of(row.written);
    }
  }

  // Everything that the row has written, or adopted, is where it looks for it.
  template <typename ContentOf>
  void check_contents(tagma::RowHandle handle, int32_t group, const tagma::RangeList& blocks,
                      ContentOf&& content_of) const {
    const Row& row = rows_.at({handle, group});
    for (int32_t i = 0; i < row.written; ++i) {
      if (blocks.at(i) == tagma::kNullBlock) continue;
      CHECK(content(row.blocks[static_cast<size_t>(i)]) == content_of(i));
    }
  }

  // Law R6, as whoever pinned the blocks sees it: what he reads does not change, but by the row
  // that held the block.
  void check_pins() {
    for (auto& [handle, pin] : pins_) {
      if (pin.watched) {
        for (size_t i = 0; i < pin.blocks.size(); ++i) {
          CHECK(content(pin.blocks[i]) == pin.contents[i]);
        }
        continue;
      }
      pin.watched = true;
      for (const tagma::BlockId b : pin.blocks) pin.contents.push_back(content(b));
      for (const auto& [name, row] : rows_) {
        for (const tagma::BlockId b : pin.blocks) {
          if (std::find(row.blocks.begin(), row.blocks.end(), b) != row.blocks.end()) {
            pin.holders.insert(name);
          }
        }
      }
    }
  }

  int64_t content(tagma::BlockId block) const { return contents_[static_cast<size_t>(block)]; }

 private:
  static constexpr int64_t kNothing = -1;

  using Name = std::pair<tagma::RowHandle, int32_t>;  // and group

  struct Row {
    std::vector<tagma::BlockId> blocks;
    int32_t written;  // leading blocks
  };

  struct Pin {
    std::vector<tagma::BlockId> blocks;
    std::vector<int64_t> contents;
    std::set<Name> holders;
    bool watched;  // not in the step in which it was made: copies of that step may still come
  };

  bool is_watched(tagma::BlockId block) const {
    for (const auto& [handle, pin] : pins_) {
      if (!pin.watched) continue;
      if (std::find(pin.blocks.begin(), pin.blocks.end(), block) != pin.blocks.end()) return true;
    }
    return false;
  }

  int32_t max_ranges_;  // that fit into the range table row
  std::vector<int64_t> contents_;
  std::map<Name, Row> rows_;
  std::map<tagma::PinHandle, Pin> pins_;
};
