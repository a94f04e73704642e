// HoleIndex against a bitmap of free blocks: every small state with every step out of it, and long
// random runs in pools whose holes reach the size classes that hold several lengths.
#include "tagma/hole_index.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/check.hpp"

namespace {

using tagma::BlockId;
using tagma::BlockRange;
using tagma::HoleIndex;
using tagma::InvariantError;
using tagma::UsageError;

using Bitmap = std::vector<bool>;  // [block] free

std::vector<BlockRange> holes_of(const Bitmap& free) {
  std::vector<BlockRange> out;
  for (BlockId b = 1; b < static_cast<BlockId>(free.size()); ++b) {
    if (!free[b]) continue;
    if (!out.empty() && out.back().end() == b) {
      ++out.back().count;
    } else {
      out.push_back({b, 1});
    }
  }
  return out;
}

HoleIndex index_of(const Bitmap& free) {
  HoleIndex index(static_cast<int32_t>(free.size()));
  for (const BlockRange& hole : holes_of(free)) index.add(hole);
  return index;
}

void set(Bitmap& free, BlockRange range, bool value) {
  for (BlockId b = range.start; b < range.end(); ++b) free[b] = value;
}

bool contains(const std::vector<BlockRange>& holes, BlockRange hole) {
  return std::find(holes.begin(), holes.end(), hole) != holes.end();
}

void compare_best_fit(const HoleIndex& index, const std::vector<BlockRange>& holes, int32_t count) {
  int32_t shortest = 0;
  for (const BlockRange& hole : holes) {
    if (hole.count >= count && (shortest == 0 || hole.count < shortest)) shortest = hole.count;
  }
  const BlockRange fit = index.best_fit(count);
  CHECK(fit.count == shortest);
  CHECK(fit.count == 0 || contains(holes, fit));
}

void compare(const HoleIndex& index, const Bitmap& free) {
  index.check_invariants();
  const std::vector<BlockRange> holes = holes_of(free);
  std::vector<BlockRange> listed;
  index.visit_by_address([&](BlockRange hole) { listed.push_back(hole); });
  CHECK(listed == holes);
  CHECK(index.num_holes() == static_cast<int32_t>(holes.size()));
  int32_t blocks = 0;
  int32_t longest = 0;
  for (const BlockRange& hole : holes) {
    blocks += hole.count;
    longest = std::max(longest, hole.count);
    CHECK(index.hole_at(hole.start) == hole);
  }
  CHECK(index.num_blocks() == blocks);
  CHECK(index.largest().count == longest);
  CHECK(longest == 0 || contains(holes, index.largest()));
}

void every_small_state_and_every_step_out_of_it() {
  constexpr int kBlocks = 9;  // 8 blocks beside the null block: 256 states
  for (int bits = 0; bits < 1 << (kBlocks - 1); ++bits) {
    Bitmap free(kBlocks, false);
    for (int b = 1; b < kBlocks; ++b) free[b] = (bits >> (b - 1) & 1) != 0;
    compare(index_of(free), free);
    for (int32_t count = 1; count < kBlocks; ++count) {
      compare_best_fit(index_of(free), holes_of(free), count);
    }
    for (BlockId start = 1; start < kBlocks; ++start) {
      for (int32_t count = 1; start + count <= kBlocks; ++count) {
        const BlockRange range{start, count};
        const auto begin = free.begin() + start;
        if (std::count(begin, begin + count, true) == 0) {
          HoleIndex index = index_of(free);
          Bitmap after = free;
          index.add(range);
          set(after, range, true);
          compare(index, after);
        }
        if (std::count(begin, begin + count, true) == count) {
          HoleIndex index = index_of(free);
          Bitmap after = free;
          for (const BlockRange& hole : holes_of(free)) {
            if (hole.start <= start && range.end() <= hole.end()) index.carve(hole.start, range);
          }
          set(after, range, false);
          compare(index, after);
        }
      }
    }
  }
}

void carve_refuses_what_is_not_inside_a_hole() {
  Bitmap free(12, false);
  set(free, {3, 4}, true);
  set(free, {8, 4}, true);
  HoleIndex index = index_of(free);
  CHECK_THROWS(index.carve(3, {3, 5}), UsageError);   // too long
  CHECK_THROWS(index.carve(3, {2, 2}), UsageError);   // begins before
  CHECK_THROWS(index.carve(3, {3, 0}), UsageError);   // empty
  CHECK_THROWS(index.carve(3, {3, -1}), UsageError);  // negative
  CHECK_THROWS(index.carve(3, {8, 1}), UsageError);   // another hole
  CHECK_THROWS(index.carve(4, {4, 1}), UsageError);   // no hole begins at 4
  CHECK_THROWS(index.carve(0, {1, 1}), UsageError);
  CHECK_THROWS(index.carve(-1, {1, 1}), UsageError);
  CHECK_THROWS(index.carve(12, {12, 1}), UsageError);
  compare(index, free);
}

void random_runs_agree_with_the_bitmap() {
  // Long holes: lengths of 64 and more share a class with others.
  for (const int32_t num_blocks : {2, 70, 1000, 20000}) {
    std::mt19937_64 random(static_cast<uint64_t>(num_blocks));
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % uint64_t(n)); };
    Bitmap free(static_cast<size_t>(num_blocks), false);
    HoleIndex index(num_blocks);
    const int steps = num_blocks < 5000 ? 4000 : 1500;
    for (int step = 0; step < steps; ++step) {
      const BlockId start = 1 + below(num_blocks - 1);
      // Lengths spread evenly over their logarithms, so that all classes are met.
      int32_t count = 1 + below(1 << below(14));
      count = std::min(count, num_blocks - start);
      const bool was_free = free[start];
      int32_t run = 0;
      while (run < count && free[start + run] == was_free) ++run;
      const BlockRange range{start, run};
      if (was_free) {
        BlockId first = start;
        while (free[first - 1]) --first;
        index.carve(first, range);
      } else {
        index.add(range);
      }
      set(free, range, !was_free);
      if (step % (num_blocks < 5000 ? 1 : 25) == 0) compare(index, free);
      const std::vector<BlockRange> holes = holes_of(free);
      for (int i = 0; i < 4; ++i) compare_best_fit(index, holes, 1 + below(1 << below(14)));
      if (!holes.empty()) compare_best_fit(index, holes, holes[step % holes.size()].count);
    }
    for (BlockId b = 1; b < num_blocks; ++b) {
      if (!free[b]) index.add({b, 1});
    }
    CHECK(index.num_holes() == 1);
    CHECK((index.largest() == BlockRange{1, num_blocks - 1}));
    index.check_invariants();
  }
}

void visits_holes_class_by_class() {
  Bitmap free(3000, false);
  BlockId at = 1;
  for (int32_t length = 1; at + length < 3000; length += 5) {
    set(free, {at, length}, true);
    at += length + 1;
  }
  const HoleIndex index = index_of(free);
  for (int32_t count = 1; count < 200; ++count) {
    std::vector<BlockRange> visited;
    int32_t lower = 0;  // no hole of a class is shorter than all of the class before
    int32_t longest_so_far = 0;
    index.visit_at_least(count, [&](BlockRange hole, bool first_of_class) {
      if (first_of_class) lower = longest_so_far;
      CHECK(hole.count >= count);
      CHECK(hole.count > lower);
      longest_so_far = std::max(longest_so_far, hole.count);
      visited.push_back(hole);
      return true;
    });
    size_t expected = 0;
    for (const BlockRange& hole : holes_of(free)) expected += hole.count >= count ? 1 : 0;
    CHECK(visited.size() == expected);
    int calls = 0;
    index.visit_at_least(count, [&](BlockRange, bool) { return ++calls < 2; });
    CHECK(calls == std::min<int>(2, static_cast<int>(expected)));
  }
}

// From 64 blocks on a class holds several lengths; which hole was freed last must not matter.
void lengths_that_share_a_class_are_told_apart() {
  for (int32_t shorter = 60; shorter < 1200; shorter += shorter < 300 ? 1 : 37) {
    for (const int32_t more : {1, 2, 5, 15}) {
      for (const bool shorter_last : {false, true}) {
        const BlockRange one{1, shorter};
        const BlockRange two{shorter + 2, shorter + more};
        HoleIndex index(2 * shorter + 20);
        index.add(shorter_last ? two : one);
        index.add(shorter_last ? one : two);
        CHECK(index.largest() == two);
        CHECK(index.best_fit(shorter) == one);
        CHECK(index.best_fit(shorter + 1) == two);
        CHECK(index.best_fit(shorter + more) == two);
        CHECK(index.best_fit(shorter + more + 1).count == 0);
        index.check_invariants();
      }
    }
  }
}

// Holes of 1,024 to 1,055 blocks share a class; placement sees the one that changed last first.
void in_a_class_the_hole_that_changed_last_is_first() {
  HoleIndex index(8'000);
  const auto first = [&] {
    BlockRange found{0, 0};
    index.visit_at_least(1'024, [&](BlockRange hole, bool) {
      found = hole;
      return false;
    });
    return found;
  };
  index.add({1, 1'030});
  index.add({2'000, 1'030});
  index.add({4'000, 1'030});
  CHECK(first() == BlockRange({4'000, 1'030}));
  index.add({1'031, 1});
  CHECK(first() == BlockRange({1, 1'031}));  // from the end of the list
  index.add({1'032, 1});
  CHECK(first() == BlockRange({1, 1'032}));  // in its place
  index.carve(2'000, {2'000, 2});
  CHECK(first() == BlockRange({2'002, 1'028}));
  index.carve(2'002, {3'028, 2});
  CHECK(first() == BlockRange({2'002, 1'026}));
  index.check_invariants();
}

void the_checker_sees_a_block_freed_twice() {
  // The caller vouches for what it adds; the law is what catches a caller that lied.
  HoleIndex index(10);
  index.add({2, 3});
  index.add({3, 1});
  CHECK_THROWS(index.check_invariants(), InvariantError);
}

}  // namespace

int main() {
  return run_tests({
      {"every small state and every step out of it", every_small_state_and_every_step_out_of_it},
      {"carve refuses what is not inside a hole", carve_refuses_what_is_not_inside_a_hole},
      {"random runs agree with the bitmap", random_runs_agree_with_the_bitmap},
      {"visits holes class by class", visits_holes_class_by_class},
      {"lengths that share a class are told apart", lengths_that_share_a_class_are_told_apart},
      {"in a class the hole that changed last is first",
       in_a_class_the_hole_that_changed_last_is_first},
      {"the checker sees a block freed twice", the_checker_sees_a_block_freed_twice},
  });
}
