// KvAllocator: every short sequence of operations on tiny pools against BlockModel, long random
// runs, the alignment contract, misuse, and the whole pool as one range after every drain.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "tagma/kv_allocator.hpp"
#include "tests/block_model.hpp"
#include "tests/check.hpp"
#include "tests/exhaustive.hpp"

namespace {

using tagma::BlockId;
using tagma::BlockRange;
using tagma::KvAllocator;
using tagma::RangeList;
using tagma::UsageError;

RangeList list_of(std::initializer_list<BlockRange> ranges) {
  RangeList out;
  for (const BlockRange& range : ranges) out.append(range);
  return out;
}

// The allocator under test beside its model, and the rows that hold its blocks.
class Pair {
 public:
  explicit Pair(int32_t num_blocks, int32_t alignment = 1)
      : allocator(num_blocks, alignment), model(num_blocks, alignment) {}

  // Appends `count` blocks to a row: the pool must give them in as few ranges as there can be.
  void extend(RangeList& row, int32_t count, int32_t headroom) {
    const BlockId tail = row.tail();
    const int32_t before = row.num_ranges();
    const int32_t fewest = BlockModel::fewest_ranges(model.holes(), count, tail);
    RangeList placed;
    allocator.allocate(count, headroom, tail, placed);
    CHECK(placed.num_blocks() == count);
    model.take(placed);
    row.append(placed);
    CHECK(row.num_ranges() - before == fewest);
  }

  void allocate(int32_t count, int32_t headroom) {
    rows.emplace_back();
    extend(rows.back(), count, headroom);
  }

  void acquire(const RangeList& blocks) {
    allocator.acquire(blocks);
    model.acquire(blocks);
    rows.push_back(blocks);
  }

  void release(size_t row) {
    allocator.release(rows[row]);
    model.release(rows[row]);
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(row));
  }

  void cache(BlockId block) {
    allocator.cache(block);
    model.cache(block);
  }

  void uncache(BlockId block) {
    allocator.uncache(block);
    model.uncache(block);
  }

  void compare() const { model.compare(allocator); }

  // Releases and evicts everything, least recently used first, and takes the pool as one range.
  void drain() {
    while (!rows.empty()) release(rows.size() - 1);
    while (!model.lru().empty()) {
      CHECK(allocator.lru_victim() == model.lru().front());
      uncache(model.lru().front());
    }
    CHECK(allocator.lru_victim() == tagma::kNullBlock);
    allocate(model.capacity(), 0);
    CHECK(rows.back().num_ranges() == 1);
    CHECK(allocator.num_free() == 0);
    release(0);
    compare();
  }

  KvAllocator allocator;
  BlockModel model;
  std::vector<RangeList> rows;
};

// One operation out of all that the state allows.
void any_step(Pair& pair, Choices& choices) {
  struct Step {
    char kind;
    size_t row;
    int32_t n;
  };
  std::vector<Step> steps;
  const int32_t in_holes = pair.model.num_in_holes();
  for (int32_t n = 1; n <= in_holes; ++n) steps.push_back({'a', 0, n});
  for (size_t row = 0; row < pair.rows.size(); ++row) {
    const RangeList& blocks = pair.rows[row];
    steps.push_back({'r', row, 0});
    for (int32_t n = 1; n <= std::min(in_holes, 2); ++n) steps.push_back({'e', row, n});
    // Shares the whole row or half of it, which leaves it shared in part.
    steps.push_back({'s', row, blocks.num_blocks()});
    if (blocks.num_blocks() > 1) steps.push_back({'s', row, blocks.num_blocks() / 2});
    for (const BlockId b : BlockModel::ids(blocks)) {
      if (pair.model.cached(b)) continue;
      steps.push_back({'c', 0, b});
      break;
    }
  }
  for (BlockId b = 1; b < pair.allocator.num_blocks(); ++b) {
    if (pair.model.cached(b)) steps.push_back({'u', 0, b});
    if (pair.model.cached(b) && pair.model.refs(b) == 0) steps.push_back({'h', 0, b});
  }
  if (steps.empty()) return;
  const Step step = steps[static_cast<size_t>(choices.choose(static_cast<int>(steps.size())))];
  switch (step.kind) {
    case 'a':
      return pair.allocate(step.n, step.n % 3);
    case 'e':
      return pair.extend(pair.rows[step.row], step.n, step.n - 1);
    case 'r':
      return pair.release(step.row);
    case 's':
      return pair.acquire(pair.rows[step.row].slice(0, step.n));
    case 'c':
      return pair.cache(step.n);
    case 'u':
      return pair.uncache(step.n);
    default:
      return pair.acquire(list_of({{step.n, 1}}));
  }
}

void every_short_sequence_on_tiny_pools() {
  struct Size {
    int32_t num_blocks;
    int depth;
  };
  for (const Size size : {Size{2, 7}, Size{3, 6}, Size{4, 5}, Size{5, 5}, Size{6, 4}, Size{8, 4}}) {
    Choices choices;
    int64_t sequences = 0;
    do {
      Pair pair(size.num_blocks);
      for (int i = 0; i < size.depth; ++i) {
        any_step(pair, choices);
        if (choices.fresh()) pair.compare();
      }
      pair.drain();
      ++sequences;
    } while (choices.next());
    std::printf("  %d blocks, %d steps: %lld sequences\n", size.num_blocks, size.depth,
                static_cast<long long>(sequences));
    CHECK(sequences > 100);
  }
}

// Every way to free single blocks of a full pool, then every count: the number of ranges is the
// optimum over all subsets of holes, not only what a greedy rule would take.
void as_one_range_where_a_hole_allows_and_as_few_as_possible_else() {
  constexpr int kBlocks = 9;
  for (int bits = 1; bits < 1 << (kBlocks - 1); ++bits) {
    for (int headroom = 0; headroom <= 3; headroom += 3) {
      int32_t free = 0;
      for (int b = 1; b < kBlocks; ++b) free += bits >> (b - 1) & 1;
      for (int32_t count = 1; count <= free; ++count) {
        Pair pair(kBlocks);
        for (int b = 1; b < kBlocks; ++b) pair.allocate(1, headroom);
        for (int b = kBlocks - 1; b >= 1; --b) {
          if ((bits >> (b - 1) & 1) == 0) continue;
          for (size_t row = 0; row < pair.rows.size(); ++row) {
            if (pair.rows[row].tail() == b) pair.release(row--);
          }
        }
        const std::vector<BlockRange> holes = pair.model.holes();
        int best = kBlocks;
        for (int subset = 1; subset < 1 << holes.size(); ++subset) {
          int32_t sum = 0;
          int ranges = 0;
          for (size_t i = 0; i < holes.size(); ++i) {
            if ((subset >> i & 1) == 0) continue;
            sum += holes[i].count;
            ++ranges;
          }
          if (sum >= count) best = std::min(best, ranges);
        }
        CHECK(BlockModel::fewest_ranges(holes, count, 0) == best);
        pair.allocate(count, headroom);
        CHECK(pair.rows.back().num_ranges() == best);
        pair.compare();
      }
    }
  }
}

void keeps_the_alignment_contract() {
  for (const int32_t alignment : {2, 3, 4}) {
    for (int32_t num_blocks = 2 * alignment; num_blocks <= 5 * alignment + 1; ++num_blocks) {
      Choices choices;
      do {
        Pair pair(num_blocks, alignment);
        CHECK(pair.allocator.capacity() == (num_blocks / alignment - 1) * alignment);
        for (int i = 0; i < 5; ++i) {
          const int32_t units = pair.model.num_in_holes() / alignment;
          const int rows = static_cast<int>(pair.rows.size());
          const int step = choices.choose(units + (units > 0 ? 2 : 1) * rows);
          if (step < units) {
            pair.allocate((step + 1) * alignment, step);  // headroom need not be aligned
          } else if (step < units + rows) {
            pair.release(static_cast<size_t>(step - units));
          } else {
            pair.extend(pair.rows[static_cast<size_t>(step - units - rows)], alignment, 1);
          }
          for (const RangeList& row : pair.rows) {
            for (const BlockRange& range : row.ranges()) {
              CHECK(range.start % alignment == 0 && range.count % alignment == 0);
              CHECK(range.start >= alignment);
            }
          }
          if (choices.fresh()) pair.compare();
        }
        pair.drain();
      } while (choices.next());
    }
  }
}

void refuses_unaligned_counts_and_changes_nothing() {
  Pair pair(21, 4);
  pair.allocate(4, 0);
  RangeList out;
  for (const int32_t count : {1, 2, 3, 5, 7, -4, -1}) {
    CHECK_THROWS(pair.allocator.allocate(count, 0, 0, out), UsageError);
    CHECK_THROWS(pair.allocator.allocate(count, 0, pair.rows[0].tail(), out), UsageError);
  }
  CHECK_THROWS(pair.allocator.release(list_of({{pair.rows[0].ranges()[0].start, 2}})), UsageError);
  CHECK_THROWS(pair.allocator.release(list_of({{pair.rows[0].ranges()[0].start + 2, 4}})),
               UsageError);
  CHECK_THROWS(pair.allocator.cache(pair.rows[0].tail()), UsageError);
  CHECK(out.empty());
  pair.compare();
  pair.drain();
}

void refuses_pools_that_hold_nothing() {
  CHECK_THROWS(KvAllocator(0), UsageError);
  CHECK_THROWS(KvAllocator(1), UsageError);
  CHECK_THROWS(KvAllocator(-5), UsageError);
  CHECK_THROWS(KvAllocator(std::numeric_limits<int32_t>::min()), UsageError);
  CHECK_THROWS(KvAllocator(10, 0), UsageError);
  CHECK_THROWS(KvAllocator(10, -1), UsageError);
  CHECK_THROWS(KvAllocator(7, 4), UsageError);
  CHECK(KvAllocator(2).capacity() == 1);
  CHECK(KvAllocator(8, 4).capacity() == 4);
}

// Everything that must not be done to a pool with a live row, a cached idle block and holes.
void detects_misuse_and_changes_nothing() {
  Pair pair(12);
  pair.allocate(3, 2);
  pair.allocate(3, 0);
  pair.cache(pair.rows[0].at(0));
  pair.acquire(pair.rows[0]);
  const BlockId idle = pair.rows[1].at(0);
  pair.cache(idle);
  pair.release(1);
  const BlockId live = pair.rows[0].at(0);
  const BlockId hole = pair.model.holes()[0].start;
  pair.compare();

  KvAllocator& pool = pair.allocator;
  RangeList out;
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  // Double free: a hole, an idle block, half of a list, and one block named twice.
  CHECK_THROWS(pool.release(list_of({{hole, 1}})), UsageError);
  CHECK_THROWS(pool.release(list_of({{idle, 1}})), UsageError);
  CHECK_THROWS(pool.release(list_of({{live, 1}, {hole, 1}})), UsageError);
  CHECK_THROWS(pool.release(list_of({{live, 1}, {live, 1}})), UsageError);
  CHECK_THROWS(pool.release(list_of({{live, 2}, {live + 1, 1}})), UsageError);
  // Foreign ids.
  for (const BlockRange foreign : {BlockRange{-1, 1}, BlockRange{12, 1}, BlockRange{11, 2},
                                   BlockRange{5, kMax - 5}, BlockRange{-3, 5}}) {
    CHECK_THROWS(pool.release(list_of({foreign})), UsageError);
    CHECK_THROWS(pool.release(list_of({{live, 1}, foreign})), UsageError);
    CHECK_THROWS(pool.acquire(list_of({{live, 1}, foreign})), UsageError);
    CHECK_THROWS(pool.count_idle(list_of({foreign})), UsageError);
  }
  // Null runs are nobody's: passed over, however many.
  const int32_t before = pool.num_free();
  const int32_t refs = pool.request_refs(live);
  pool.acquire(list_of({{0, 3}, {live, 1}, {0, 9}}));
  CHECK(pool.count_idle(list_of({{0, 3}})) == 0 && pool.request_refs(live) == refs + 1);
  pool.unreference(list_of({{0, 3}, {live, 1}, {0, 9}}));
  CHECK(pool.request_refs(live) == refs && pool.num_free() == before);
  for (const BlockId foreign : {0, -1, 12, kMax, std::numeric_limits<int32_t>::min()}) {
    CHECK_THROWS(pool.cache(foreign), UsageError);
    CHECK_THROWS(pool.uncache(foreign), UsageError);
    CHECK_THROWS(pool.request_refs(foreign), UsageError);
    CHECK_THROWS(pool.is_cached(foreign), UsageError);
    if (foreign != 0) CHECK_THROWS(pool.allocate(1, 0, foreign, out), UsageError);
  }
  // Stale hits, tails that nobody holds, cache references out of order, impossible counts.
  CHECK_THROWS(pool.acquire(list_of({{live, 1}, {hole, 1}})), UsageError);
  CHECK_THROWS(pool.acquire(list_of({{live, 1}, {live, 1}})), UsageError);
  CHECK_THROWS(pool.allocate(1, 0, idle, out), UsageError);
  CHECK_THROWS(pool.allocate(1, 0, hole, out), UsageError);
  CHECK_THROWS(pool.allocate(1, -1, 0, out), UsageError);
  CHECK_THROWS(pool.allocate(-1, 0, 0, out), UsageError);
  CHECK_THROWS(pool.allocate(pool.holes().num_blocks() + 1, 0, 0, out), UsageError);
  CHECK_THROWS(pool.allocate(kMax, 0, 0, out), UsageError);
  CHECK_THROWS(pool.cache(live), UsageError);
  CHECK_THROWS(pool.cache(idle), UsageError);
  CHECK_THROWS(pool.cache(hole), UsageError);
  CHECK_THROWS(pool.uncache(hole), UsageError);
  CHECK_THROWS(pool.uncache(pair.rows[0].at(1)), UsageError);
  CHECK(out.empty());
  pair.compare();
  pair.drain();
}

void grows_in_place_while_the_next_block_is_free() {
  Pair pair(100);
  pair.allocate(5, 0);
  for (int i = 0; i < 90; ++i) pair.extend(pair.rows[0], 1, 0);
  CHECK(pair.rows[0].num_ranges() == 1);
  pair.drain();
}

void headroom_keeps_others_out_of_the_way_while_there_is_room() {
  Pair pair(1000);
  pair.allocate(10, 50);
  pair.allocate(10, 50);
  pair.allocate(10, 50);
  for (int i = 0; i < 50; ++i) {
    for (RangeList& row : pair.rows) pair.extend(row, 1, 49 - i);
  }
  for (const RangeList& row : pair.rows) CHECK(row.num_ranges() == 1);
  // It is a wish and not a reservation: all of it can be taken.
  pair.allocate(pair.allocator.num_free(), 0);
  CHECK(pair.allocator.num_free() == 0);
  pair.compare();
  pair.drain();
}

void a_partially_shared_range_splits() {
  Pair pair(20);
  pair.allocate(8, 0);
  const BlockId start = pair.rows[0].at(0);
  pair.acquire(pair.rows[0].slice(2, 5));  // [start + 2, start + 5) has two owners
  pair.release(0);
  const RangeList shared = list_of({{start + 2, 3}});
  CHECK(pair.rows[0].ranges() == shared.ranges());
  CHECK(pair.allocator.num_live() == 3);
  CHECK(pair.model.in_hole(start + 1) && pair.model.in_hole(start + 5));
  pair.compare();
  pair.drain();
}

// The last block of a request becomes the first victim, and requests follow in order of release.
void evicts_in_exact_order_leaf_first() {
  Pair pair(30);
  pair.allocate(4, 0);
  pair.allocate(3, 0);
  std::vector<BlockId> expected;
  for (const size_t row : {size_t{1}, size_t{0}}) {
    std::vector<BlockId> ids = BlockModel::ids(pair.rows[row]);
    for (const BlockId b : ids) pair.cache(b);
    expected.insert(expected.end(), ids.rbegin(), ids.rend());
  }
  pair.release(1);
  pair.release(0);
  // A hit refreshes what it adopts, also leaf first.
  const BlockId hit = expected[2];
  pair.acquire(list_of({{hit, 1}}));
  pair.release(0);
  expected.erase(expected.begin() + 2);
  expected.push_back(hit);
  for (const BlockId victim : expected) {
    CHECK(pair.allocator.lru_victim() == victim);
    pair.uncache(victim);
    pair.compare();
  }
  pair.drain();
}

void random_runs_end_with_the_whole_pool_as_one_range() {
  for (const int32_t num_blocks : {2, 17, 64, 257, 1000, 1001, 4096}) {
    Pair pair(num_blocks);
    std::mt19937_64 random(static_cast<uint64_t>(num_blocks));
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % uint64_t(n)); };
    for (int step = 0; step < 1500; ++step) {
      const int32_t in_holes = pair.model.num_in_holes();
      const int kind = below(10);
      const size_t row = pair.rows.empty() ? 0 : random() % pair.rows.size();
      if (kind < 3 && in_holes > 0) {
        pair.allocate(1 + below(std::min(in_holes, 60)), below(40));
      } else if (kind < 6 && in_holes > 0 && !pair.rows.empty()) {
        pair.extend(pair.rows[row], 1 + below(std::min(in_holes, 3)), below(10));
      } else if (kind < 7 && !pair.rows.empty()) {
        const RangeList& blocks = pair.rows[row];
        pair.acquire(blocks.slice(0, 1 + below(blocks.num_blocks())));
      } else if (kind < 8 && !pair.rows.empty()) {
        for (const BlockId b : BlockModel::ids(pair.rows[row])) {
          if (!pair.model.cached(b)) pair.cache(b);
        }
      } else if (kind < 9 && !pair.model.lru().empty()) {
        CHECK(pair.allocator.lru_victim() == pair.model.lru().front());
        pair.uncache(pair.model.lru().front());
      } else if (!pair.rows.empty()) {
        pair.release(row);
      }
      if (step % (num_blocks < 300 ? 1 : 50) == 0) pair.compare();
    }
    pair.drain();
  }
}

}  // namespace

int main() {
  return run_tests({
      {"every short sequence on tiny pools", every_short_sequence_on_tiny_pools},
      {"as one range where a hole allows, and as few as possible else",
       as_one_range_where_a_hole_allows_and_as_few_as_possible_else},
      {"keeps the alignment contract", keeps_the_alignment_contract},
      {"refuses unaligned counts and changes nothing",
       refuses_unaligned_counts_and_changes_nothing},
      {"refuses pools that hold nothing", refuses_pools_that_hold_nothing},
      {"detects misuse and changes nothing", detects_misuse_and_changes_nothing},
      {"grows in place while the next block is free", grows_in_place_while_the_next_block_is_free},
      {"headroom keeps others out of the way while there is room",
       headroom_keeps_others_out_of_the_way_while_there_is_room},
      {"a partially shared range splits", a_partially_shared_range_splits},
      {"evicts in exact order, leaf first", evicts_in_exact_order_leaf_first},
      {"random runs end with the whole pool as one range",
       random_runs_end_with_the_whole_pool_as_one_range},
  });
}
