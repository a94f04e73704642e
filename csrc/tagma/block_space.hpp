// Free blocks of one kind as maximal ranges, found by size, by address and by any block in them.
#pragma once

#include <cstdint>

#include "tagma/block_bitmap.hpp"
#include "tagma/block_range.hpp"
#include "tagma/hole_index.hpp"

namespace tagma {

class BlockSpace {
 public:
  enum class Kind {
    kAbsent,     // always empty; every change is ignored
    kByRange,    // ranges are found by size and by their first block
    kByAnyBlock  // and by any block in them
  };

  // Empty at first. O(num_blocks).
  BlockSpace(int32_t num_blocks, Kind kind)
      : kind_(kind),
        ranges_(kind == Kind::kAbsent ? 1 : num_blocks),
        outside_(kind == Kind::kByAnyBlock ? num_blocks : 1) {
    outside_.insert(BlockRange{0, kind == Kind::kByAnyBlock ? num_blocks : 1});
  }

  // Adds blocks and merges them with what they touch. O(1 + blocks / 64).
  void add(BlockRange range) {
    if (kind_ == Kind::kAbsent || range.count == 0) return;
    ranges_.add(range);
    if (kind_ == Kind::kByAnyBlock) outside_.erase(range);
  }

  // Takes blocks out of the range that starts at `start`. O(1 + blocks / 64).
  void carve(BlockId start, BlockRange range) {
    if (kind_ == Kind::kAbsent || range.count == 0) return;
    ranges_.carve(start, range);
    if (kind_ == Kind::kByAnyBlock) outside_.insert(range);
  }

  // Takes blocks out of the range that they lie in; by any block. O(1 + blocks / 64).
  void take(BlockRange range) {
    if (kind_ == Kind::kAbsent || range.count == 0) return;
    carve(outside_.previous_member(range.start) + 1, range);
  }

  // The range around a block, of count 0 if it is not here; by any block.
  BlockRange around(BlockId block) const {
    if (!contains(block)) return {block, 0};
    return ranges_.hole_at(outside_.previous_member(block) + 1);
  }

  // By any block.
  bool contains(BlockId block) const {
    return kind_ == Kind::kByAnyBlock && block >= 0 && !outside_.contains(block);
  }

  const HoleIndex& ranges() const { return ranges_; }
  const BlockBitmap& outside() const { return outside_; }  // by any block: all that are not here
  int32_t num_blocks() const { return ranges_.num_blocks(); }
  size_t memory_bytes() const { return ranges_.memory_bytes() + outside_.memory_bytes(); }

  // Law A6: the space holds exactly the blocks below `end` for which belongs(block). Throws
  // InvariantError. O(end).
  template <typename Belongs>
  void check_invariants(BlockId end, Belongs&& belongs) const {
    ranges_.check_invariants();
    if (kind_ == Kind::kAbsent) return;
    BlockId at = 0;  // what lies before is checked
    auto check_outside = [&](BlockId to) {
      for (; at < to; ++at) require(!belongs(at), kLaw, "a free space lacks block", at);
    };
    ranges_.visit_by_address([&](BlockRange range) {
      check_outside(range.start);
      for (; at < range.end(); ++at)
        require(belongs(at), kLaw, "a free space should not hold block", at);
    });
    check_outside(end);
    if (kind_ != Kind::kByAnyBlock) return;
    for (BlockId b = 0; b < end; ++b) {
      require(outside_.contains(b) != belongs(b), kLaw, "a free space is marked wrongly at block",
              b);
    }
  }

 private:
  static constexpr const char* kLaw = "A6 (allocator)";

  Kind kind_;
  HoleIndex ranges_;
  BlockBitmap outside_;
};

}  // namespace tagma
