// MovePlanner: plans, made one step after the other, leave what copying all blocks at once leaves.
// Every list of copies over a small pool, and random ones over a larger one.
#include "tagma/move_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "tagma/block_mover.hpp"
#include "tests/check.hpp"
#include "tests/exhaustive.hpp"

namespace {

using tagma::BlockCopy;
using tagma::BlockId;
using tagma::BlockMover;
using tagma::MovePlan;
using tagma::MovePlanner;
using tagma::MoveSegment;
using tagma::MoveStep;
using tagma::SegmentPlan;
using tagma::UsageError;
using Copies = std::vector<BlockCopy>;
using Contents = std::vector<int32_t>;

Contents numbered(int32_t num_blocks) {
  Contents out(static_cast<size_t>(num_blocks));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

size_t at(BlockId block) { return static_cast<size_t>(block); }

Contents expected(const Copies& copies, int32_t num_blocks) {
  Contents out = numbered(num_blocks);
  for (const BlockCopy& copy : copies) out[at(copy.to)] = copy.from;
  return out;
}

// A step block by block; an open step is memmove.
void make(const MoveStep& step, const MovePlan& plan, Contents* memory) {
  const BlockId* nodes = &plan.nodes[at(step.first_node)];
  CHECK(step.closed || step.num_nodes == 2);
  const Contents before = *memory;
  for (int32_t n = 0; n + (step.closed ? 0 : 1) < step.num_nodes; ++n) {
    for (int32_t i = 0; i < step.count; ++i) {
      (*memory)[at(nodes[n] + i)] = before[at(nodes[(n + 1) % step.num_nodes] + i)];
    }
  }
}

void check_runs(MovePlanner& planner, const Copies& copies) {
  const MovePlan plan = planner.plan_runs(copies);
  Contents memory = numbered(planner.num_blocks());
  for (const MoveStep& step : plan.steps) make(step, plan, &memory);
  CHECK(memory == expected(copies, planner.num_blocks()));
}

// Segments in any order, each in batches that read before they write.
void check_segments(MovePlanner& planner, const Copies& copies, int32_t batch, std::mt19937& rng) {
  const SegmentPlan plan = planner.plan_segments(copies, batch);
  Contents memory = numbered(planner.num_blocks());
  std::vector<MoveSegment> segments = plan.segments;
  std::shuffle(segments.begin(), segments.end(), rng);
  for (const MoveSegment& segment : segments) {
    CHECK(segment.first < segment.end);
    std::vector<int32_t> order(at(segment.end - segment.first));
    std::iota(order.begin(), order.end(), segment.first);
    if (segment.kind == MoveSegment::kFree) {
      CHECK(segment.end - segment.first <= batch);
      std::shuffle(order.begin(), order.end(), rng);
    }
    const int32_t saved = segment.kind >= 0 ? memory[at(segment.kind)] : 0;
    for (size_t i = 0; i < order.size(); i += at(batch)) {
      const Contents before = memory;
      for (size_t j = i; j < std::min(i + at(batch), order.size()); ++j) {
        const BlockCopy copy = plan.copies[at(order[j])];
        const bool last = segment.kind >= 0 && order[j] == segment.end - 1;
        memory[at(copy.to)] = last ? saved : before[at(copy.from)];
      }
    }
  }
  CHECK(memory == expected(copies, planner.num_blocks()));
}

void test_every_list_over_five_blocks() {
  MovePlanner planner(5);
  std::mt19937 rng(1);
  Choices choices;
  int lists = 0;
  do {
    Copies copies;
    for (BlockId to = 0; to < 5; ++to) {
      const int from = choices.choose(6);  // 5: nothing is copied there
      if (from < 5) copies.push_back({from, to});
    }
    check_runs(planner, copies);
    for (const int32_t batch : {1, 2, 4}) check_segments(planner, copies, batch, rng);
    ++lists;
  } while (choices.next());
  CHECK(lists == 6 * 6 * 6 * 6 * 6);
}

// Runs and single blocks, shifted, exchanged and scattered, in random order.
Copies random_copies(int32_t num_blocks, std::mt19937& rng) {
  const auto below = [&](int32_t n) {
    return static_cast<int32_t>(rng() % static_cast<uint32_t>(n));
  };
  std::vector<BlockId> source(at(num_blocks), -1);
  for (int32_t i = below(12); i > 0; --i) {
    const int32_t count = 1 + below(num_blocks / 4);
    const BlockId a = below(num_blocks - count);
    const BlockId b = below(num_blocks - count);
    const bool swaps = below(2) == 0;
    for (int32_t j = 0; j < count; ++j) {
      source[at(b + j)] = a + j;
      if (swaps) source[at(a + j)] = b + j;
    }
  }
  for (int32_t i = below(num_blocks); i > 0; --i) source[at(below(num_blocks))] = below(num_blocks);
  Copies copies;
  for (BlockId to = 0; to < num_blocks; ++to) {
    if (source[at(to)] >= 0) copies.push_back({source[at(to)], to});
  }
  std::shuffle(copies.begin(), copies.end(), rng);
  return copies;
}

void test_random_lists() {
  std::mt19937 rng(7);
  MovePlanner planner(64);
  for (int i = 0; i < 4000; ++i) {
    const Copies copies = random_copies(64, rng);
    check_runs(planner, copies);
    check_segments(planner, copies, 1 << (i % 4), rng);
  }
}

void test_runs_stay_whole() {
  MovePlanner planner(1000);
  const auto run = [](BlockId from, BlockId to, int32_t count, Copies* out) {
    for (int32_t i = 0; i < count; ++i) out->push_back({from + i, to + i});
  };
  Copies copies;
  run(100, 97, 50, &copies);   // overlaps itself downwards
  run(300, 310, 50, &copies);  // and upwards
  run(600, 500, 20, &copies);  // waits for the next
  run(700, 600, 20, &copies);
  CHECK(planner.plan_runs(copies).steps.size() == 4);
  Copies swap;
  run(10, 40, 20, &swap);
  run(40, 10, 20, &swap);
  const MovePlan plan = planner.plan_runs(swap);
  CHECK(plan.steps.size() == 1);
  CHECK(plan.steps[0].closed && plan.steps[0].count == 20);
  CHECK((plan.nodes == std::vector<BlockId>{10, 40}));
}

void test_refusals_change_nothing() {
  MovePlanner planner(8);
  CHECK_THROWS(planner.plan_runs({{1, 8}}), UsageError);
  CHECK_THROWS(planner.plan_runs({{-1, 2}}), UsageError);
  CHECK_THROWS(planner.plan_runs({{1, 2}, {3, 2}}), UsageError);
  CHECK_THROWS(planner.plan_segments({{1, 2}}, 0), UsageError);
  CHECK_THROWS(MovePlanner(0), UsageError);
  check_runs(planner, {{1, 2}, {2, 1}, {4, 4}});
}

// The mover on memory whose regions are dense, strided and interleaved, larger than its scratch.
void test_memory_is_as_planned() {
  constexpr int32_t kBlocks = 12;
  constexpr int64_t kSmall = 1000;
  constexpr int64_t kLarge = BlockMover::kScratch + 8200;
  constexpr int64_t kStride = 2 * kLarge + 24;
  std::mt19937 rng(11);
  for (int i = 0; i < 40; ++i) {
    std::vector<char> dense(kBlocks * kSmall);
    std::vector<char> strided(kBlocks * kStride);
    for (auto* memory : {&dense, &strided}) {
      for (char& byte : *memory) byte = static_cast<char>(rng());
    }
    const auto address = [](std::vector<char>& memory) {
      return static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data()));
    };
    BlockMover mover(kBlocks, {{address(dense), kSmall, kSmall},
                               {address(strided), kStride, kLarge},
                               {address(strided) + kLarge + 8, kStride, kLarge}});
    CHECK(mover.block_bytes() == kSmall + 2 * kLarge);
    const Copies copies = random_copies(kBlocks, rng);
    std::vector<char> dense_after = dense;
    std::vector<char> strided_after = strided;
    for (const BlockCopy& copy : copies) {
      std::copy_n(&dense[at(copy.from) * kSmall], kSmall, &dense_after[at(copy.to) * kSmall]);
      for (const int64_t part : {int64_t{0}, kLarge + 8}) {
        std::copy_n(&strided[at(copy.from) * kStride + part], kLarge,
                    &strided_after[at(copy.to) * kStride + part]);
      }
    }
    mover.run(mover.plan(copies), 1 + i % 4);
    CHECK(dense == dense_after);
    CHECK(strided == strided_after);
  }
  CHECK_THROWS(BlockMover(4, {{64, 8, 16}}), UsageError);
  CHECK_THROWS(BlockMover(4, {{0, 8, 8}}), UsageError);
}

}  // namespace

int main() {
  return run_tests({
      {"every list over five blocks", test_every_list_over_five_blocks},
      {"random lists", test_random_lists},
      {"runs stay whole", test_runs_stay_whole},
      {"refusals change nothing", test_refusals_change_nothing},
      {"memory is as planned", test_memory_is_as_planned},
  });
}
