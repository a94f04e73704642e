// A pool of 65,536 blocks held 85 % full, counts log-uniform in 1..1,024: the hole index and the
// whole allocator against the textbook best fit on two balanced trees.
//
// One call is one allocation or one release, as in the figures that other allocators publish. The
// sequence of counts and victims comes from one seed; a candidate that fails to place a range skips
// it and says so in a counter.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "bench/allocator_bench.hpp"
#include "bench/round.hpp"
#include "tagma/hole_index.hpp"
#include "tagma/kv_allocator.hpp"
#include "tagma/placement.hpp"

namespace tagma::bench {

// Holes by address and by size in std::map and std::set: O(log holes), one range or nothing.
class TreeBestFit {
 public:
  explicit TreeBestFit(int32_t num_blocks) { link({1, num_blocks - 1}); }

  BlockRange allocate(int32_t count) {
    const auto fit = by_size_.lower_bound({count, 0});
    if (fit == by_size_.end()) return {0, 0};
    const BlockRange hole{fit->second, fit->first};
    by_size_.erase(fit);
    by_start_.erase(hole.start);
    if (hole.count > count) link({hole.start + count, hole.count - count});
    return {hole.start, count};
  }

  void release(BlockRange range) {
    auto right = by_start_.lower_bound(range.start);
    if (right != by_start_.begin()) {
      const auto left = std::prev(right);
      if (left->first + left->second == range.start) {
        range = {left->first, left->second + range.count};
        unlink(left);
      }
    }
    if (right != by_start_.end() && right->first == range.end()) {
      range.count += right->second;
      unlink(right);
    }
    link(range);
  }

 private:
  using ByStart = std::map<BlockId, int32_t>;

  void link(BlockRange hole) {
    by_start_.emplace(hole.start, hole.count);
    by_size_.emplace(hole.count, hole.start);
  }
  void unlink(ByStart::iterator at) {
    by_size_.erase({at->second, at->first});
    by_start_.erase(at);
  }

  ByStart by_start_;
  std::set<std::pair<int32_t, BlockId>> by_size_;
};

// The hole index and the placement policy, without references per block: what the tree does too.
class HoleBestFit {
 public:
  explicit HoleBestFit(int32_t num_blocks) : holes_(num_blocks) { holes_.add({1, num_blocks - 1}); }

  BlockRange allocate(int32_t count) {
    const BlockRange hole = holes_.best_fit(count);
    if (hole.count == 0) return {0, 0};
    const BlockRange taken{hole.start, count};
    holes_.carve(hole.start, taken);
    return taken;
  }
  void release(BlockRange range) { holes_.add(range); }

 private:
  HoleIndex holes_;
};

// Runs the churn on anything that allocates `Held` from a count and releases it. `allocate` returns
// an item whose `ok` is false if it could not be placed.
template <typename Allocate, typename Release>
void churn(Round& round, Allocate&& allocate, Release&& release) {
  constexpr int64_t kLoad = int64_t{kPoolBlocks} * 85 / 100;
  constexpr int64_t kSettle = 100'000;  // calls before the clock starts: holes as old as they get
  Random random(85);
  using Held = decltype(allocate(1));
  std::vector<std::pair<Held, int32_t>> live;
  int64_t used = 0;
  int64_t failures = 0;
  int32_t count = 0;
  const auto call = [&] {
    if (count == 0) count = static_cast<int32_t>(std::exp2(random.unit() * 10.0));
    if (used + count > kLoad) {
      const auto victim = static_cast<size_t>(random.below(static_cast<int32_t>(live.size())));
      used -= live[victim].second;
      release(live[victim].first);
      live[victim] = std::move(live.back());
      live.pop_back();
      return;
    }
    Held held = allocate(count);
    if (held.count_placed() == count) {
      live.emplace_back(std::move(held), count);
      used += count;
    } else {
      ++failures;
    }
    count = 0;
  };
  for (int64_t i = 0; i < kSettle; ++i) call();
  failures = 0;
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("failures", failures);
  round.count("live_ranges", static_cast<int64_t>(live.size()));
}

struct OneRange {
  BlockRange range;
  int32_t count_placed() const { return range.count; }
};

inline void churn_tree(Round& round) {
  TreeBestFit tree(kPoolBlocks);
  churn(
      round, [&](int32_t count) { return OneRange{tree.allocate(count)}; },
      [&](const OneRange& held) { tree.release(held.range); });
}

inline void churn_holes(Round& round) {
  HoleBestFit holes(kPoolBlocks);
  churn(
      round, [&](int32_t count) { return OneRange{holes.allocate(count)}; },
      [&](const OneRange& held) { holes.release(held.range); });
}

struct ManyRanges {
  RangeList list;
  int32_t count_placed() const { return list.num_blocks(); }
};

// Everything: placement with headroom, references per block, double-free checks.
inline void churn_allocator(Round& round) {
  KvAllocator allocator(kPoolBlocks);
  churn(
      round,
      [&](int32_t count) {
        ManyRanges held;
        if (count <= allocator.num_free()) allocator.allocate(count, 0, kNullBlock, held.list);
        return held;
      },
      [&](const ManyRanges& held) { allocator.release(held.list); });
}

// A prompt of 8,192 blocks (131,072 tokens at 16 a block) is placed in a pool of 131,072 blocks
// that requests of 1 to 1,024 blocks hold 85 % full and have churned before.
inline void churn_long_prompt(Round& round) {
  constexpr int32_t kBlocks = 131'072;
  constexpr int64_t kLoad = int64_t{kBlocks} * 85 / 100;
  constexpr int32_t kPrompt = 8'192;
  KvAllocator allocator(kBlocks);
  Random random(85);
  std::vector<RangeList> live;
  const auto stir = [&](int32_t calls) {
    for (int32_t i = 0; i < calls; ++i) {
      const auto count = static_cast<int32_t>(std::exp2(random.unit() * 10.0));
      while (allocator.num_live() + count > kLoad) {
        const auto victim = static_cast<size_t>(random.below(static_cast<int32_t>(live.size())));
        allocator.release(live[victim]);
        live[victim] = std::move(live.back());
        live.pop_back();
      }
      live.emplace_back();
      allocator.allocate(count, 8, kNullBlock, live.back());
    }
  };
  stir(100'000);
  int64_t ranges = 0;
  RangeList prompt;
  const auto place = [&] { allocator.allocate(kPrompt, 8, kNullBlock, prompt); };
  round.warm_up(place);
  while (round.left() > 0) {
    allocator.release(prompt);
    prompt.clear();
    stir(100);
    round.time(1, place);
    ranges += prompt.num_ranges();
  }
  round.count("ranges", ranges);
}

}  // namespace tagma::bench
