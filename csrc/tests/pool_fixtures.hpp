// What the KvPool tests share: books of keys, demands, and pools in a known state.
#pragma once

#include <cstdint>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/check.hpp"
#include "tests/pool_model.hpp"

using tagma::Demand;
using tagma::PoolOptions;

inline const KeyBook& book() {
  static const KeyBook keys(2000, 32, false);
  return keys;
}

// For the tests that compare very often: each comparison looks up every key of its book.
inline const KeyBook& small_book() {
  static const KeyBook keys(120, 32, true);
  return keys;
}

// The keys of a prompt: `first`, first + 1, ...
inline Keys keys_from(int first, int count) {
  Keys keys;
  for (int i = 0; i < count; ++i) keys.push_back(first + i);
  return keys;
}

inline PoolOptions options_of(int32_t num_blocks, int32_t max_ranges = 256, int32_t alignment = 1) {
  PoolOptions options;
  options.num_blocks = num_blocks;
  options.max_ranges = max_ranges;
  options.alignment = alignment;
  return options;
}

inline Demand demand_of(int32_t blocks) {
  Demand demand;
  demand.blocks = blocks;
  return demand;
}

// Opens a row and publishes all of it; the row must fit.
inline size_t cached_row(PoolPair& pair, const Keys& keys, int32_t blocks) {
  const int row = pair.admit(keys, {}, demand_of(blocks));
  CHECK(row >= 0);
  pair.publish(static_cast<size_t>(row), blocks);
  return static_cast<size_t>(row);
}

// Leaves idle cached single blocks at every second place, oldest first in address order, and holes
// between them: the most broken pool there can be.
inline void shatter(PoolPair& pair, std::vector<Keys>& keys) {
  const int32_t capacity = pair.blocks.capacity();
  keys.clear();
  for (int32_t i = 0; i < capacity; ++i) keys.push_back(keys_from(1000 + i, 1));
  for (int32_t i = 0; i < capacity; ++i)
    CHECK(pair.admit(keys[static_cast<size_t>(i)], {}, demand_of(1)) >= 0);
  for (size_t row = 0; row < pair.rows.size(); ++row) {
    if (pair.rows[row].blocks().at(0) % 2 == 0) pair.publish(row, 1);
  }
  while (!pair.rows.empty()) pair.free(0);
  pair.compare();
}

// --- pools of several groups --------------------------------------------------------------------

inline tagma::GroupSpec full_group(int32_t align_blocks = 1) {
  return {tagma::GroupKind::kPrefix, 1, align_blocks};
}
inline tagma::GroupSpec window_group(int32_t window_blocks, int32_t align_blocks = 1) {
  return {tagma::GroupKind::kWindow, window_blocks, align_blocks};
}
inline tagma::GroupSpec state_group(int32_t align_blocks = 1) {
  return {tagma::GroupKind::kState, 1, align_blocks};
}
inline tagma::GroupSpec chunk_group(int32_t chunk_blocks) {
  return {tagma::GroupKind::kChunk, chunk_blocks, 1};
}

inline PoolOptions options_of(int32_t num_blocks, const std::vector<tagma::GroupSpec>& groups,
                              int32_t max_ranges = 256, int32_t alignment = 1) {
  PoolOptions options = options_of(num_blocks, max_ranges, alignment);
  options.groups = groups;
  return options;
}

// What each group needs to hold.
inline std::vector<tagma::Need> needs_of(const std::vector<int32_t>& blocks) {
  std::vector<tagma::Need> needs(blocks.size());
  for (size_t g = 0; g < blocks.size(); ++g) needs[g].blocks = blocks[g];
  return needs;
}

// A row without a hit, or -1.
inline int admit_groups(PoolPair& pair, const Keys& keys, const std::vector<int32_t>& blocks) {
  return pair.admit(keys, std::vector<tagma::RangeList>(blocks.size()), needs_of(blocks), {});
}
inline bool grow_groups(PoolPair& pair, size_t row, const std::vector<int32_t>& blocks) {
  return pair.grow(row, needs_of(blocks), {});
}

inline void publish_all(PoolPair& pair, size_t row) {
  for (size_t g = 0; g < pair.rows[row].parts.size(); ++g) {
    pair.publish(row, pair.rows[row].blocks(g).num_blocks(), static_cast<int32_t>(g));
  }
}
