// A set of block ids that finds and counts its members 64 at a time.
//
// A second level marks the words that are not empty, so a search skips 4096 ids at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

class BlockBitmap {
 public:
  explicit BlockBitmap(int32_t num_blocks)
      : num_ids_(num_blocks),
        words_(static_cast<size_t>(num_blocks) / 64 + 1, 0),
        summary_(words_.size() / 64 + 1, 0) {}

  bool contains(BlockId block) const { return (words_[word(block)] & bit(block)) != 0; }

  void insert(BlockId block) {
    words_[word(block)] |= bit(block);
    mark(word(block));
  }

  void erase(BlockId block) {
    words_[word(block)] &= ~bit(block);
    if (words_[word(block)] == 0) unmark(word(block));
  }

  // O(blocks / 64).
  void insert(BlockRange range) {
    visit_words(range, [this](size_t w, uint64_t mask) {
      words_[w] |= mask;
      mark(w);
    });
  }

  // O(blocks / 64).
  void erase(BlockRange range) {
    visit_words(range, [this](size_t w, uint64_t mask) {
      words_[w] &= ~mask;
      if (words_[w] == 0) unmark(w);
    });
  }

  // Members in a range. O(blocks / 64).
  int32_t count(BlockRange range) const {
    int32_t total = 0;
    visit_words(range,
                [&](size_t w, uint64_t mask) { total += __builtin_popcountll(words_[w] & mask); });
    return total;
  }

  // The first member in [block, end), or `end`. O(1 + distance / 4096).
  BlockId next_member(BlockId block, BlockId end) const {
    if (block >= end) return end;
    size_t w = word(block);
    uint64_t bits = words_[w] & (~uint64_t{0} << (block & 63));
    if (bits == 0) {
      ++w;
      size_t s = w >> 6;
      if (s >= summary_.size()) return end;
      uint64_t full = summary_[s] & (~uint64_t{0} << (w & 63));
      while (full == 0) {
        if (++s == summary_.size()) return end;
        full = summary_[s];
      }
      w = s * 64 + static_cast<size_t>(__builtin_ctzll(full));
      bits = words_[w];
    }
    const auto found = static_cast<BlockId>(w * 64) + __builtin_ctzll(bits);
    return found < end ? found : end;
  }

  // The last member in [0, block], or -1. O(1 + distance / 4096).
  BlockId previous_member(BlockId block) const {
    size_t w = word(block);
    uint64_t bits = words_[w] & (~uint64_t{0} >> (63 - (block & 63)));
    if (bits == 0) {
      if (w == 0) return -1;
      --w;
      size_t s = w >> 6;
      uint64_t full = summary_[s] & (~uint64_t{0} >> (63 - (w & 63)));
      while (full == 0) {
        if (s-- == 0) return -1;
        full = summary_[s];
      }
      w = s * 64 + 63 - static_cast<size_t>(__builtin_clzll(full));
      bits = words_[w];
    }
    return static_cast<BlockId>(w * 64) + 63 - __builtin_clzll(bits);
  }

  // The maximal runs of members in a range, in address order. O(range).
  std::vector<BlockRange> runs(BlockRange range) const {
    std::vector<BlockRange> out;
    for (BlockId at = next_member(range.start, range.end()); at < range.end();
         at = next_member(at, range.end())) {
      BlockRange run{at, 0};
      while (run.end() < range.end() && contains(run.end())) ++run.count;
      out.push_back(run);
      at = run.end();
    }
    return out;
  }

  // The start of a window of `width` blocks inside `range` with few members, looked for at both
  // ends and at every 64th block between; `members` is set to its count. O(range / 64).
  BlockId emptiest_window(BlockRange range, int32_t width, int32_t& members) const {
    const BlockId last = range.end() - width;
    BlockId best = range.start;
    BlockId at = range.start;
    int32_t inside = count({at, width});
    members = inside;
    while (at < last && members > 0) {
      const BlockId next = at + 64 < last ? at + 64 : last;
      inside += count({at + width, next - at}) - count({at, next - at});
      at = next;
      if (inside < members) {
        members = inside;
        best = at;
      }
    }
    return best;
  }

  int32_t num_ids() const { return num_ids_; }

  size_t memory_bytes() const {
    return (words_.capacity() + summary_.capacity()) * sizeof(uint64_t);
  }

 private:
  static size_t word(BlockId block) { return static_cast<size_t>(block) >> 6; }
  static uint64_t bit(BlockId block) { return uint64_t{1} << (block & 63); }
  void mark(size_t w) { summary_[w >> 6] |= uint64_t{1} << (w & 63); }
  void unmark(size_t w) { summary_[w >> 6] &= ~(uint64_t{1} << (w & 63)); }

  template <typename Visit>
  static void visit_words(BlockRange range, Visit&& visit) {
    if (range.count <= 0) return;
    const size_t first = word(range.start);
    const size_t last = word(range.end() - 1);
    const uint64_t head = ~uint64_t{0} << (range.start & 63);
    const uint64_t tail = ~uint64_t{0} >> (63 - ((range.end() - 1) & 63));
    if (first == last) {
      visit(first, head & tail);
      return;
    }
    visit(first, head);
    for (size_t w = first + 1; w < last; ++w) visit(w, ~uint64_t{0});
    visit(last, tail);
  }

  int32_t num_ids_;
  std::vector<uint64_t> words_;
  std::vector<uint64_t> summary_;  // bit w: words_[w] is not 0
};

}  // namespace tagma
