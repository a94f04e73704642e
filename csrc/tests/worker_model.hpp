// What a worker knows of the pool: the block contents and rows that it was told of, no more.
//
// As vLLM's workers do in each step: copy all blocks at once (read all, then write all), update the
// rows that changed, and only then write. See docs/compaction.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/block_model.hpp"
#include "tests/check.hpp"

class WorkerModel {
 public:
  explicit WorkerModel(int32_t num_blocks) : contents_(static_cast<size_t>(num_blocks), kNothing) {}

  // --- told while the step is scheduled ---------------------------------------------------------

  // A new row, whose blocks come with its first update; the leading `num_hit` are written already,
  // or by others.
  void admit(tagma::RowHandle handle, int32_t num_hit) {
    CHECK(rows_.emplace(handle, Row{{}, num_hit}).second);
  }
  void free(tagma::RowHandle handle) { CHECK(rows_.erase(handle) == 1); }

  // --- executed at its end, in this order -------------------------------------------------------

  void copy(const std::vector<tagma::BlockCopy>& copies) {
    std::vector<int64_t> read;
    std::vector<tagma::BlockId> targets;
    for (const tagma::BlockCopy& copy : copies) {
      read.push_back(content(copy.from));
      targets.push_back(copy.to);
    }
    std::sort(targets.begin(), targets.end());
    CHECK(std::adjacent_find(targets.begin(), targets.end()) == targets.end());
    for (size_t i = 0; i < copies.size(); ++i) {
      contents_[static_cast<size_t>(copies[i].to)] = read[i];
    }
  }

  // Law W2: an update continues what the worker's row holds, and never shortens it.
  void update(const tagma::RowChange& change) {
    std::vector<tagma::BlockId>& blocks = rows_.at(change.row).blocks;
    const auto first = static_cast<size_t>(change.first_block);
    CHECK(first <= blocks.size() && change.group == 0);
    CHECK(first + static_cast<size_t>(change.blocks.num_blocks()) >= blocks.size());
    blocks.resize(first);
    for (const tagma::BlockId b : BlockModel::ids(change.blocks)) blocks.push_back(b);
  }

  void check_row(tagma::RowHandle handle, const tagma::RangeList& blocks) const {
    CHECK(rows_.at(handle).blocks == BlockModel::ids(blocks));
  }

  // Writes some of what the row has not written yet, at least its first `least` blocks.
  template <typename ContentOf>
  void write(tagma::RowHandle handle, int32_t least, std::mt19937_64& random,
             ContentOf&& content_of) {
    Row& row = rows_.at(handle);
    const auto held = static_cast<int32_t>(row.blocks.size());
    int32_t upto = std::max(row.written, least);
    if (held > upto) upto += static_cast<int32_t>(random() % uint64_t(held - upto + 1));
    for (; row.written < upto; ++row.written) {
      contents_[static_cast<size_t>(row.blocks[static_cast<size_t>(row.written)])] =
          content_of(row.written);
    }
  }

  // Everything that the row has written, or adopted, is where it looks for it.
  template <typename ContentOf>
  void check_contents(tagma::RowHandle handle, ContentOf&& content_of) const {
    const Row& row = rows_.at(handle);
    for (int32_t i = 0; i < row.written; ++i) {
      CHECK(content(row.blocks[static_cast<size_t>(i)]) == content_of(i));
    }
  }

  int64_t content(tagma::BlockId block) const { return contents_[static_cast<size_t>(block)]; }

 private:
  static constexpr int64_t kNothing = -1;

  struct Row {
    std::vector<tagma::BlockId> blocks;
    int32_t written;  // leading blocks
  };

  std::vector<int64_t> contents_;
  std::map<tagma::RowHandle, Row> rows_;
};
