// The obvious allocator: one entry a block and a list for recency. Slow and easy to believe; the
// tests compare KvAllocator with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tagma/kv_allocator.hpp"
#include "tests/check.hpp"

class BlockModel {
 public:
  explicit BlockModel(int32_t num_blocks, int32_t alignment = 1)
      : first_(alignment),
        end_(num_blocks / alignment * alignment),
        refs_(static_cast<size_t>(num_blocks), 0),
        cached_(static_cast<size_t>(num_blocks), 0) {}

  static std::vector<tagma::BlockId> ids(const tagma::RangeList& list) {
    std::vector<tagma::BlockId> out;
    for (const tagma::BlockRange& range : list.ranges()) {
      const bool null = range.start == 0;
      for (int32_t i = 0; i < range.count; ++i) out.push_back(null ? 0 : range.start + i);
    }
    CHECK(static_cast<int32_t>(out.size()) == list.num_blocks());
    return out;
  }

  // ids() without the null blocks, to which nobody has a reference.
  static std::vector<tagma::BlockId> held(const tagma::RangeList& list) {
    std::vector<tagma::BlockId> out = ids(list);
    out.erase(std::remove(out.begin(), out.end(), tagma::kNullBlock), out.end());
    return out;
  }

  // Blocks that the allocator gave out: each must have been in a hole.
  void take(const tagma::RangeList& list) {
    for (const tagma::BlockId b : ids(list)) {
      CHECK(in_hole(b));
      refs_[b] = 1;
    }
  }

  void acquire(const tagma::RangeList& list) {
    for (const tagma::BlockId b : held(list)) {
      CHECK(!in_hole(b));
      if (refs_[b]++ == 0) lru_.erase(std::find(lru_.begin(), lru_.end(), b));
    }
  }

  void release(const tagma::RangeList& list) {
    const std::vector<tagma::BlockId> blocks = held(list);
    for (size_t i = blocks.size(); i-- > 0;) {
      CHECK(refs_[blocks[i]] > 0);
      if (--refs_[blocks[i]] == 0 && cached_[blocks[i]]) lru_.push_back(blocks[i]);
    }
  }

  void cache(tagma::BlockId b) {
    CHECK(refs_[b] > 0 && !cached_[b]);
    cached_[b] = 1;
  }

  void uncache(tagma::BlockId b) {
    CHECK(cached_[b]);
    cached_[b] = 0;
    if (refs_[b] == 0) lru_.erase(std::find(lru_.begin(), lru_.end(), b));
  }

  // The content of an idle or live block goes to a block in a hole.
  void relocate(tagma::BlockId from, tagma::BlockId to) {
    CHECK(in_hole(to));
    CHECK(!in_hole(from));
    refs_[to] = refs_[from];
    cached_[to] = cached_[from];
    std::replace(lru_.begin(), lru_.end(), from, to);
    refs_[from] = 0;
    cached_[from] = 0;
  }

  bool inside(tagma::BlockId b) const { return b >= first_ && b < end_; }
  bool in_hole(tagma::BlockId b) const { return inside(b) && refs_[b] == 0 && !cached_[b]; }
  int32_t refs(tagma::BlockId b) const { return refs_[b]; }
  bool cached(tagma::BlockId b) const { return cached_[b] != 0; }
  const std::vector<tagma::BlockId>& lru() const { return lru_; }
  int32_t capacity() const { return end_ - first_; }

  int32_t num_live() const {
    return static_cast<int32_t>(
        std::count_if(refs_.begin(), refs_.end(), [](int32_t r) { return r > 0; }));
  }
  int32_t num_idle() const { return static_cast<int32_t>(lru_.size()); }
  int32_t num_cached() const {
    return static_cast<int32_t>(std::count(cached_.begin(), cached_.end(), 1));
  }
  int32_t num_in_holes() const { return capacity() - num_live() - num_idle(); }
  int32_t num_free() const { return capacity() - num_live(); }

  // Maximal ranges of blocks in holes; with `idle`, of blocks that no request references.
  std::vector<tagma::BlockRange> holes(bool idle = false) const {
    std::vector<tagma::BlockRange> out;
    for (tagma::BlockId b = first_; b < end_; ++b) {
      if (refs_[b] > 0 || (cached_[b] && !idle)) continue;
      if (!out.empty() && out.back().end() == b) {
        ++out.back().count;
      } else {
        out.push_back({b, 1});
      }
    }
    return out;
  }

  // The fewest ranges by which a row that ends with `tail` (0: empty) must grow to get `count`
  // blocks out of `stretches`: the stretch behind the tail is free of charge, then the longest
  // first. -1 if they do not suffice.
  static int32_t fewest_ranges(std::vector<tagma::BlockRange> stretches, int32_t count,
                               tagma::BlockId tail) {
    int32_t left = count;
    for (tagma::BlockRange& s : stretches) {
      if (tail != 0 && s.start == tail + 1) {
        left -= s.count;
        s.count = 0;
      }
    }
    std::sort(stretches.begin(), stretches.end(),
              [](const auto& a, const auto& b) { return a.count > b.count; });
    int32_t ranges = 0;
    for (const tagma::BlockRange& s : stretches) {
      if (left <= 0) break;
      left -= s.count;
      ++ranges;
    }
    return left > 0 ? -1 : ranges;
  }

  void compare(const tagma::KvAllocator& allocator, int32_t slack = 0) const {
    allocator.check_invariants();
    CHECK(allocator.capacity() == capacity());
    CHECK(allocator.num_live() == num_live());
    CHECK(allocator.num_idle() == num_idle());
    CHECK(allocator.num_cached() == num_cached());
    CHECK(allocator.num_free() == num_free());
    CHECK(allocator.holes().num_blocks() == num_in_holes());
    CHECK(allocator.lru_victim() == (lru_.empty() ? tagma::kNullBlock : lru_.front()));
    for (tagma::BlockId b = first_; b < end_; ++b) {
      CHECK(allocator.request_refs(b) == refs_[b]);
      CHECK(allocator.is_cached(b) == cached(b));
    }
    for (size_t i = 0; i < lru_.size(); ++i) {
      CHECK(allocator.is_cold(lru_[i]) == (static_cast<int32_t>(i) < slack));
    }
    std::vector<tagma::BlockRange> listed;
    allocator.holes().visit_by_address([&](tagma::BlockRange hole) { listed.push_back(hole); });
    CHECK(listed == holes());
    CHECK(allocator.unreferenced() == holes(true));
  }

 private:
  tagma::BlockId first_;
  tagma::BlockId end_;
  std::vector<int32_t> refs_;
  std::vector<char> cached_;         // [block] 0 or 1
  std::vector<tagma::BlockId> lru_;  // idle blocks, oldest first
};
