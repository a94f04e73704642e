// The obvious prefix cache: for each group and key its blocks in order of publication, and look-ups
// as vLLM writes them (v1/core/single_type_kv_cache_manager.py, find_longest_cache_hit, with
// drop_eagle_block=False and one block as the unit of length).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tagma/group_spec.hpp"
#include "tests/check.hpp"
#include "tests/key_book.hpp"

class CacheModel {
 public:
  struct Entry {
    int32_t group = 0;
    int key = -1;  // -1: not published
  };

  CacheModel(const std::vector<tagma::GroupSpec>& groups, const KeyBook& book, int32_t num_blocks)
      : groups_(groups),
        book_(book),
        blocks_of_(groups.size(), Lists(static_cast<size_t>(book.size()))),
        entry_of_(static_cast<size_t>(num_blocks)) {}

  void publish(tagma::BlockId block, int32_t group, int key) {
    CHECK(entry(block).key < 0);
    entry(block) = {group, key};
    list(group, key).push_back(block);
  }

  void forget(tagma::BlockId block) {
    std::vector<tagma::BlockId>& blocks = list(entry(block).group, entry(block).key);
    blocks.erase(std::find(blocks.begin(), blocks.end(), block));
    entry(block) = {};
  }

  // Keeps the key and its turn. Nothing happens if the block is not published.
  void move(tagma::BlockId from, tagma::BlockId to) {
    if (entry(from).key < 0) return;
    CHECK(entry(to).key < 0);
    std::vector<tagma::BlockId>& blocks = list(entry(from).group, entry(from).key);
    std::replace(blocks.begin(), blocks.end(), from, to);
    std::swap(entry(from), entry(to));
  }

  const Entry& of(tagma::BlockId block) const { return entry_of_[static_cast<size_t>(block)]; }

  // The block published first, or the null block.
  tagma::BlockId first(int32_t group, int key) const {
    const std::vector<tagma::BlockId>& blocks =
        blocks_of_[static_cast<size_t>(group)][static_cast<size_t>(key)];
    return blocks.empty() ? tagma::kNullBlock : blocks.front();
  }

  // What the pool should find, under a cap on the ranges of a hit: a prefix is cut, a window or
  // state in more ranges is none.
  tagma::RangeList lookup(int32_t group, const Keys& keys, int32_t max_blocks,
                          int32_t max_ranges) const {
    const tagma::GroupSpec& spec = groups_[static_cast<size_t>(group)];
    std::vector<tagma::BlockId> hit;
    switch (spec.kind) {
      case tagma::GroupKind::kPrefix:
        hit = full_attention(group, keys, max_blocks, spec.align_blocks, max_ranges);
        break;
      case tagma::GroupKind::kWindow:
        hit = sliding_window(group, keys, max_blocks, spec.align_blocks, spec.window_blocks);
        break;
      case tagma::GroupKind::kChunk:
        hit = chunked_local(group, keys, max_blocks, spec.window_blocks, max_ranges);
        break;
      default:
        hit = mamba(group, keys, max_blocks, spec.align_blocks);
    }
    const tagma::RangeList ranges = as_ranges(hit);
    return ranges.num_ranges() > max_ranges ? tagma::RangeList() : ranges;
  }

  // Every key leads to its first block, in the index as here.
  void compare(const tagma::PrefixIndex& index) const {
    int32_t keys = 0;
    int32_t blocks = 0;
    for (int32_t group = 0; group < static_cast<int32_t>(groups_.size()); ++group) {
      for (int key = 0; key < book_.size(); ++key) {
        CHECK(index.find(group, book_[key]) == first(group, key));
        keys += first(group, key) != tagma::kNullBlock ? 1 : 0;
      }
    }
    for (size_t b = 0; b < entry_of_.size(); ++b) {
      const auto block = static_cast<tagma::BlockId>(b);
      const Entry& entry = entry_of_[b];
      CHECK(index.contains(block) == (entry.key >= 0));
      if (entry.key < 0) continue;
      ++blocks;
      CHECK(index.group(block) == entry.group);
      CHECK(index.has_key(block, entry.group, book_[entry.key]));
    }
    CHECK(index.num_keys() == keys && index.size() == blocks);
  }

 private:
  using Lists = std::vector<std::vector<tagma::BlockId>>;  // [key]

  static tagma::RangeList as_ranges(const std::vector<tagma::BlockId>& blocks) {
    tagma::RangeList out;
    for (const tagma::BlockId b : blocks) out.append({b, 1});
    return out;
  }

  // FullAttentionManager: blocks from the first on until one is missing, rounded down.
  std::vector<tagma::BlockId> full_attention(int32_t group, const Keys& keys, int32_t max_blocks,
                                             int32_t align, int32_t max_ranges) const {
    std::vector<tagma::BlockId> computed;
    for (int32_t i = 0; i < max_blocks; ++i) {
      const tagma::BlockId block = first(group, keys[static_cast<size_t>(i)]);
      if (block == tagma::kNullBlock) break;
      computed.push_back(block);
      if (as_ranges(computed).num_ranges() > max_ranges) {
        computed.pop_back();
        break;
      }
    }
    computed.resize(computed.size() - computed.size() % static_cast<size_t>(align));
    return computed;
  }

  // SlidingWindowManager: from right to left, until `window` blocks in a row are found.
  std::vector<tagma::BlockId> sliding_window(int32_t group, const Keys& keys, int32_t max_blocks,
                                             int32_t align, int32_t window) const {
    std::vector<tagma::BlockId> computed(static_cast<size_t>(max_blocks), tagma::kNullBlock);
    int32_t contiguous = 0;
    bool match_found = false;
    for (int32_t i = max_blocks - 1; i >= 0; --i) {
      const tagma::BlockId block = first(group, keys[static_cast<size_t>(i)]);
      if (block != tagma::kNullBlock) {
        if (contiguous == 0 && align != 1 && (i + 1) % align != 0) continue;
        computed[static_cast<size_t>(i)] = block;
        if (++contiguous >= window) {
          computed.resize(static_cast<size_t>(i + contiguous));
          match_found = true;
          break;
        }
      } else {
        contiguous = 0;
      }
    }
    if (!match_found) {
      computed.resize(static_cast<size_t>(contiguous));
      while (align != 1 && computed.size() % static_cast<size_t>(align) != 0) computed.pop_back();
    }
    return computed;
  }

  // ChunkedLocalAttentionManager: null blocks up to the chunk, blocks from there until one is
  // missing.
  std::vector<tagma::BlockId> chunked_local(int32_t group, const Keys& keys, int32_t max_blocks,
                                            int32_t chunk, int32_t max_ranges) const {
    std::vector<tagma::BlockId> computed(static_cast<size_t>(max_blocks - max_blocks % chunk),
                                         tagma::kNullBlock);
    for (auto i = computed.size(); i < static_cast<size_t>(max_blocks); ++i) {
      const tagma::BlockId block = first(group, keys[i]);
      if (block == tagma::kNullBlock) break;
      computed.push_back(block);
      if (as_ranges(computed).num_ranges() <= max_ranges) continue;
      computed.pop_back();
      break;
    }
    return computed;
  }

  // MambaManager: the last block whose end is aligned.
  std::vector<tagma::BlockId> mamba(int32_t group, const Keys& keys, int32_t max_blocks,
                                    int32_t align) const {
    std::vector<tagma::BlockId> computed;
    for (int32_t i = max_blocks - 1; i >= 0; --i) {
      const tagma::BlockId block = first(group, keys[static_cast<size_t>(i)]);
      if (block == tagma::kNullBlock || (align != 1 && (i + 1) % align != 0)) continue;
      computed.assign(static_cast<size_t>(i), tagma::kNullBlock);
      computed.push_back(block);
      break;
    }
    return computed;
  }

  Entry& entry(tagma::BlockId block) { return entry_of_[static_cast<size_t>(block)]; }
  std::vector<tagma::BlockId>& list(int32_t group, int key) {
    return blocks_of_[static_cast<size_t>(group)][static_cast<size_t>(key)];
  }

  std::vector<tagma::GroupSpec> groups_;
  const KeyBook& book_;
  std::vector<Lists> blocks_of_;  // [group][key] in order of publication
  std::vector<Entry> entry_of_;   // [block]
};
