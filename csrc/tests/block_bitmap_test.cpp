// BlockBitmap against std::set: every subset of the places around the boundaries of words and of
// the summary, and random sets of every density.
#include "tagma/block_bitmap.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <random>
#include <set>
#include <vector>

#include "tests/check.hpp"

namespace {

using tagma::BlockBitmap;
using tagma::BlockId;
using tagma::BlockRange;

// The bitmap beside the set that it must equal.
class Pair {
 public:
  explicit Pair(int32_t num_blocks) : bitmap(num_blocks), num_blocks_(num_blocks) {}

  void insert(BlockRange range) {
    range.count == 1 ? bitmap.insert(range.start) : bitmap.insert(range);
    for (BlockId b = range.start; b < range.end(); ++b) members.insert(b);
  }
  void erase(BlockRange range) {
    range.count == 1 ? bitmap.erase(range.start) : bitmap.erase(range);
    members.erase(members.lower_bound(range.start), members.lower_bound(range.end()));
  }

  int32_t count(BlockRange range) const {
    return static_cast<int32_t>(
        std::distance(members.lower_bound(range.start), members.lower_bound(range.end())));
  }

  // The searches from one place; `end` bounds the one forwards.
  void compare_at(BlockId block, BlockId end) const {
    CHECK(bitmap.contains(block) == (members.count(block) > 0));
    const auto next = members.lower_bound(block);
    const BlockId first = next == members.end() ? end : std::min(*next, end);
    CHECK(bitmap.next_member(block, end) == first);
    const auto behind = members.upper_bound(block);
    CHECK(bitmap.previous_member(block) == (behind == members.begin() ? -1 : *std::prev(behind)));
    if (block < end) CHECK(bitmap.count({block, end - block}) == count({block, end - block}));
  }

  void compare_around(const std::vector<BlockId>& places) const {
    for (const BlockId place : places) {
      for (const BlockId at : {place - 1, place, place + 1}) {
        if (at < 0 || at >= num_blocks_) continue;
        for (const BlockId end : places) compare_at(at, end);
        compare_at(at, num_blocks_);
      }
    }
  }

  BlockBitmap bitmap;
  std::set<BlockId> members;

 private:
  int32_t num_blocks_;
};

// One id on each side of every boundary that a search can cross: words of 64, summary words of
// 4096.
void every_subset_of_the_places_at_boundaries() {
  constexpr int32_t kBlocks = 3 * 4096 + 2;
  const std::vector<BlockId> places = {
      0, 1, 63, 64, 127, 128, 4095, 4096, 8191, 2 * 4096 + 64, kBlocks - 2, kBlocks - 1};
  for (unsigned subset = 0; subset < 1U << places.size(); ++subset) {
    Pair pair(kBlocks);
    for (size_t i = 0; i < places.size(); ++i) {
      if ((subset >> i & 1) != 0) pair.insert({places[i], 1});
    }
    for (const BlockId place : places) {
      pair.compare_at(place, kBlocks);
      pair.compare_at(std::max(place - 1, 0), places[subset % places.size()]);
    }
  }
}

// Every range with ends next to a boundary, put into an empty set and taken out of a full one.
void every_range_between_boundaries() {
  constexpr int32_t kBlocks = 4096 + 130;
  std::vector<BlockId> places;
  for (const BlockId boundary : {0, 64, 4032, 4096, kBlocks}) {
    for (BlockId at = boundary - 1; at <= boundary + 1; ++at) {
      if (at >= 0 && at <= kBlocks) places.push_back(at);
    }
  }
  for (const BlockId start : places) {
    for (const BlockId end : places) {
      if (end < start) continue;
      Pair pair(kBlocks);
      pair.insert({start, end - start});
      pair.compare_around({start, end, 64, 4096});
      pair.erase({start, end - start});
      pair.compare_around({0, 64, 4096});
      Pair full(kBlocks);
      full.insert({0, kBlocks});
      full.erase({start, end - start});
      full.compare_around({start, end, 0, 63, 4096});
    }
  }
}

void random_sets_agree() {
  for (const int32_t num_blocks : {1, 63, 64, 65, 300, 4096, 4097, 20000}) {
    Pair pair(num_blocks);
    std::mt19937_64 random(static_cast<uint64_t>(num_blocks));
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % uint64_t(n)); };
    for (int step = 0; step < 3000; ++step) {
      const BlockId start = below(num_blocks);
      const int32_t most = std::min(num_blocks - start, step % 3 == 0 ? 1 : 200);
      const BlockRange range{start, 1 + below(most)};
      // Mostly full and mostly empty by turns.
      below(4) < (step / 300 % 2 == 0 ? 3 : 1) ? pair.insert(range) : pair.erase(range);
      const BlockId at = below(num_blocks);
      pair.compare_at(at, at + below(num_blocks - at + 1));
    }
  }
}

// The window lies in the range and holds what it says, and none of those looked at holds less:
// both ends and every 64th place.
void the_emptiest_window_is_what_it_says() {
  std::mt19937_64 random(5);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % uint64_t(n)); };
  int better_than_the_start = 0;
  for (int round = 0; round < 4000; ++round) {
    Pair pair(1000);
    const int clusters = below(12);
    for (int i = 0; i < clusters; ++i) {
      const BlockId start = below(990);
      pair.insert({start, 1 + below(std::min(1000 - start, 90))});
    }
    const BlockId start = 1 + below(500);
    const BlockRange range{start, 1 + below(1000 - start)};
    const int32_t width = 1 + below(range.count);
    int32_t members = -1;
    const BlockId found = pair.bitmap.emptiest_window(range, width, members);
    CHECK(found >= range.start && found + width <= range.end());
    CHECK(members == pair.count({found, width}));
    const BlockId last = range.end() - width;
    int32_t fewest = pair.count({last, width});
    for (BlockId at = range.start; at <= last; at += 64) {
      fewest = std::min(fewest, pair.count({at, width}));
    }
    CHECK(members == fewest);
    better_than_the_start += members < pair.count({range.start, width}) ? 1 : 0;
  }
  CHECK(better_than_the_start > 500);
}

}  // namespace

int main() {
  return run_tests({
      {"every subset of the places at boundaries", every_subset_of_the_places_at_boundaries},
      {"every range between boundaries", every_range_between_boundaries},
      {"random sets agree", random_sets_agree},
      {"the emptiest window is what it says", the_emptiest_window_is_what_it_says},
  });
}
