// The holes of a pool: maximal ranges of free blocks, always coalesced, found by address or size.
//
// Boundary tags (Knuth, TAOCP vol. 1, 2.5) make coalescing O(1): the first block of a hole knows
// it, and so does the last one with a minus sign; what there is to know is kept in one node a hole,
// so that a pool of few holes costs 4 bytes a block. Size
// classes with a bitmap (two-level segregated fit, Masmano et al., ECRTS 2004) find a fitting hole:
// lengths below 64 have a class each, longer ones 32 classes per power of two. Best fit is exact:
// inside the first class that can fit, all holes are compared. Holes of a class below 64 are all
// alike, so one look is enough; above, they differ by at most 3 % and cannot overlap, so that the
// list is short. Unlike OffsetAllocator's bins, no request is rounded up, so a hole that fits
// exactly is found.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

class HoleIndex {
 public:
  // Addresses [0, num_blocks); block 0 is never free, so 0 serves as "none". O(num_blocks).
  explicit HoleIndex(int32_t num_blocks) : tag_(static_cast<size_t>(num_blocks), kNone), nodes_(1) {
    heads_.fill(kNone);
    bitmap_.fill(0);
  }

  // Frees a range and merges it with the holes on both sides. The caller vouches that no block of
  // it is free already (KvAllocator checks references first). O(1).
  void add(BlockRange range) {
    const BlockId start = range.start;
    const BlockId end = range.end();
    num_blocks_ += range.count;
    const int32_t left = ends_at(start - 1);
    const int32_t right = end < num_ids() && tag_[end] > 0 ? tag_[end] : kNone;
    if (left != kNone) {
      BlockRange hole = nodes_[left].hole;
      hole.count += range.count;
      if (right != kNone) {
        hole.count += nodes_[right].hole.count;
        unlink(right);
      }
      resize(left, hole);
    } else if (right != kNone) {
      resize(right, {start, nodes_[right].hole.end() - start});
    } else {
      link(range);
    }
  }

  // Takes a sub-range out of the hole that starts at `hole_start`. O(1).
  void carve(BlockId hole_start, BlockRange range) {
    const BlockRange hole = hole_at(hole_start);
    if (hole.count == 0 || range.count <= 0 || range.start < hole.start ||
        range.end() > hole.end()) {
      throw UsageError(message("range [", range.start, ", ", range.end(),
                               ") is not inside the hole [", hole.start, ", ", hole.end(), ")"));
    }
    const int32_t at = tag_[hole.start];
    const BlockRange before{hole.start, range.start - hole.start};
    const BlockRange behind{range.end(), hole.end() - range.end()};
    num_blocks_ -= range.count;
    if (before.count > 0) {
      resize(at, before);
      if (behind.count > 0) link(behind);
    } else if (behind.count > 0) {
      resize(at, behind);
    } else {
      unlink(at);
    }
  }

  // The hole whose first block is `start`, of count 0 if there is none. O(1).
  BlockRange hole_at(BlockId start) const {
    if (start <= 0 || start >= num_ids() || tag_[start] <= 0) return {start, 0};
    return nodes_[tag_[start]].hole;
  }

  // The shortest hole of at least `count` blocks, or count 0. O(holes in two classes of 64 or
  // more).
  BlockRange best_fit(int32_t count) const {
    BlockRange best{0, 0};
    visit_at_least(count, [&](BlockRange hole, bool new_class) {
      if (new_class && best.count > 0) return false;
      if (best.count == 0 || hole.count < best.count) best = hole;
      return best.count >= kExact && best.count > count;
    });
    return best;
  }

  // The longest hole, or count 0. O(holes in the top class), O(1) below 64 blocks.
  BlockRange largest() const {
    BlockRange best{0, 0};
    for (int word = kWords - 1; word >= 0; --word) {
      if (bitmap_[word] == 0) continue;
      const int top = word * 64 + 63 - __builtin_clzll(bitmap_[word]);
      for (int32_t at = heads_[top]; at != kNone; at = nodes_[at].next) {
        if (nodes_[at].hole.count > best.count) best = nodes_[at].hole;
        if (top < kExact) break;
      }
      break;
    }
    return best;
  }

  // Calls visit(hole, first_of_its_class) for holes of at least `count` blocks, class by class
  // upwards, until it returns false. Inside a class the order is that of release, latest first.
  template <typename Visit>
  void visit_at_least(int32_t count, Visit&& visit) const {
    for (int cls = next_class(size_class(count)); cls >= 0; cls = next_class(cls + 1)) {
      bool first = true;
      for (int32_t at = heads_[cls]; at != kNone; at = nodes_[at].next) {
        const BlockRange hole = nodes_[at].hole;
        if (hole.count < count) continue;
        if (!visit(hole, first)) return;
        first = false;
      }
    }
  }

  // Calls visit(hole) in address order. O(num_blocks).
  template <typename Visit>
  void visit_by_address(Visit&& visit) const {
    for (BlockId at = 1; at < num_ids();) {
      if (tag_[at] > 0) {
        const BlockRange hole = nodes_[tag_[at]].hole;
        visit(hole);
        at += hole.count;
      } else {
        ++at;
      }
    }
  }

  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_holes() const { return num_holes_; }
  size_t memory_bytes() const {
    return tag_.capacity() * sizeof(int32_t) + nodes_.capacity() * sizeof(Node) + sizeof(heads_) +
           sizeof(bitmap_);
  }

  // Law H: tags, classes and counters describe the same maximal holes. Throws InvariantError.
  // O(num_blocks).
  void check_invariants() const {
    int32_t blocks = 0;
    int32_t holes = 0;
    BlockId previous_end = 0;
    int32_t blocks_tagged = 0;  // less those that should be
    visit_by_address([&](BlockRange hole) {
      require(hole.start > previous_end, kLaw, "two holes touch or overlap at", hole.start);
      require(hole.end() <= num_ids(), kLaw, "a hole leaves the pool at", hole.start);
      require(nodes_[tag_[hole.start]].hole == hole && ends_at(hole.end() - 1) == tag_[hole.start],
              kLaw, "the end tag is wrong for", hole.start);
      previous_end = hole.end();
      blocks += hole.count;
      ++holes;
      blocks_tagged -= hole.count == 1 ? 1 : 2;
    });
    require(blocks == num_blocks_, kLaw, "free blocks counted", blocks);
    require(holes == num_holes_, kLaw, "holes counted", holes);
    for (const int32_t tag : tag_) blocks_tagged += tag != kNone ? 1 : 0;
    require(blocks_tagged == 0, kLaw, "tags that belong to no hole:", blocks_tagged);
    int32_t listed = 0;
    for (int cls = 0; cls < kClasses; ++cls) {
      require((heads_[cls] != kNone) == ((bitmap_[cls / 64] >> (cls % 64) & 1) != 0), kLaw,
              "the bitmap is wrong for class", cls);
      int32_t previous = kNone;
      for (int32_t at = heads_[cls]; at != kNone; at = nodes_[at].next) {
        const BlockRange hole = nodes_[at].hole;
        require(tag_[hole.start] == at && size_class(hole.count) == cls, kLaw,
                "listed in the wrong class:", hole.start);
        require(nodes_[at].previous == previous, kLaw, "the list of its class is broken at",
                hole.start);
        require(++listed <= num_holes_, kLaw, "more listed than counted, at", hole.start);
        previous = at;
      }
    }
    int32_t unused = 0;
    for (int32_t at = unused_; at != kNone; at = nodes_[at].next) ++unused;
    require(listed + unused + 1 == static_cast<int32_t>(nodes_.size()), kLaw,
            "nodes lost or doubled:", unused);
    require(listed == num_holes_, kLaw, "holes listed by class", listed);
  }

 private:
  static constexpr const char* kLaw = "H (holes)";

  struct Node {
    BlockRange hole;
    int32_t next = 0;  // of its class, or the next unused node
    int32_t previous = 0;
  };

  static constexpr int32_t kNone = 0;     // the first node is never a hole's
  static constexpr int kExact = 64;       // lengths below this have a class of their own
  static constexpr int kSubClasses = 32;  // classes per power of two above
  static constexpr int kClasses = kExact + (31 - 6) * kSubClasses;
  static constexpr int kWords = (kClasses + 63) / 64;

  static int size_class(int32_t length) {
    if (length < kExact) return length;
    const int log2 = 31 - __builtin_clz(static_cast<uint32_t>(length));
    const int sub = (length >> (log2 - 5)) & (kSubClasses - 1);
    return kExact + (log2 - 6) * kSubClasses + sub;
  }

  // The first non-empty class at or above `cls`, or -1.
  int next_class(int cls) const {
    if (cls >= kClasses) return -1;
    int word = cls / 64;
    uint64_t bits = bitmap_[word] & (~uint64_t{0} << (cls % 64));
    while (bits == 0) {
      if (++word == kWords) return -1;
      bits = bitmap_[word];
    }
    return word * 64 + __builtin_ctzll(bits);
  }

  BlockId num_ids() const { return static_cast<BlockId>(tag_.size()); }

  // The node of the hole whose last block is `last`, or kNone.
  int32_t ends_at(BlockId last) const {
    const int32_t tag = tag_[last];
    if (tag < 0) return -tag;
    return tag != kNone && nodes_[tag].hole.count == 1 ? tag : kNone;
  }

  void link(BlockRange hole) {
    if (unused_ == kNone) {
      unused_ = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
    }
    const int32_t at = unused_;
    unused_ = nodes_[at].next;
    if (hole.count > 1) tag_[hole.end() - 1] = -at;
    tag_[hole.start] = at;
    const int cls = size_class(hole.count);
    nodes_[at] = {hole, heads_[cls], kNone};
    if (heads_[cls] != kNone) nodes_[heads_[cls]].previous = at;
    heads_[cls] = at;
    bitmap_[cls / 64] |= uint64_t{1} << (cls % 64);
    ++num_holes_;
  }

  // unlink() and link() of a hole that grew or shrank. Most stay in their class, where the one that
  // changed last is the first already.
  void resize(int32_t at, BlockRange hole) {
    Node& node = nodes_[at];
    if (node.previous != kNone || size_class(node.hole.count) != size_class(hole.count)) {
      unlink(at);
      link(hole);
      return;
    }
    tag_[node.hole.start] = kNone;
    tag_[node.hole.end() - 1] = kNone;
    if (hole.count > 1) tag_[hole.end() - 1] = -at;
    tag_[hole.start] = at;
    node.hole = hole;
  }

  void unlink(int32_t at) {
    const Node node = nodes_[at];
    const int cls = size_class(node.hole.count);
    if (node.previous != kNone) {
      nodes_[node.previous].next = node.next;
    } else {
      heads_[cls] = node.next;
      if (heads_[cls] == kNone) bitmap_[cls / 64] &= ~(uint64_t{1} << (cls % 64));
    }
    if (node.next != kNone) nodes_[node.next].previous = node.previous;
    tag_[node.hole.start] = kNone;
    tag_[node.hole.end() - 1] = kNone;
    nodes_[at].next = unused_;
    unused_ = at;
    --num_holes_;
  }

  // [block] node of the hole that starts here; minus the node of the hole, longer than one block,
  // that ends here; else kNone
  std::vector<int32_t> tag_;
  std::vector<Node> nodes_;
  std::array<int32_t, kClasses> heads_;
  std::array<uint64_t, kWords> bitmap_;
  int32_t unused_ = kNone;  // first of the nodes without a hole
  int32_t num_blocks_ = 0;
  int32_t num_holes_ = 0;
};

}  // namespace tagma
