// KvPool: rows whose first blocks are null, from the start or since they fell out of a window.
// Every call goes to the obvious pool of pool_model.hpp as well.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/check.hpp"
#include "tests/exhaustive.hpp"
#include "tests/pool_fixtures.hpp"
#include "tests/pool_model.hpp"

namespace {

using tagma::Need;
using tagma::RangeList;
using tagma::UsageError;

// Null blocks and block 1, the first of the pool, are different ranges.
void null_blocks_do_not_merge_with_the_first_block() {
  PoolPair pair(options_of(9, {window_group(2)}), small_book());
  std::vector<Need> needs = needs_of({5});
  needs[0].skip = 3;
  CHECK(pair.admit(keys_from(0, 8), {RangeList()}, needs, {}) == 0);
  CHECK(pair.rows[0].blocks().num_ranges() == 2 && pair.rows[0].blocks().at(3) == 1);
  CHECK(pair.blocks.num_live() == 2);
  pair.compare();
  pair.skip(0, 0, 4);
  CHECK(pair.rows[0].blocks().num_ranges() == 2 && pair.rows[0].blocks().at(4) == 2);
  CHECK(pair.blocks.num_live() == 1);
  pair.compare();
  pair.drain();
}

void what_falls_out_of_a_window_is_free_again() {
  PoolPair pair(options_of(20, {full_group(), window_group(3)}), small_book());
  const Keys keys = keys_from(0, 20);
  CHECK(admit_groups(pair, keys, {6, 6}) == 0);
  pair.publish(0, 4, 1);
  CHECK(pair.blocks.num_free() == 7);
  pair.skip(0, 1, 3);
  CHECK(pair.blocks.num_free() == 10 && pair.blocks.num_idle() == 3);
  pair.skip(0, 1, 2);  // no more than before
  CHECK(pair.blocks.num_free() == 10);
  pair.compare();
  CHECK(pair.lookup(1, keys, 6).num_blocks() == 4);  // still cached
  pair.skip(0, 1, 6);                                // everything
  CHECK(pair.blocks.num_free() == 13 && pair.rows[0].blocks(1).num_ranges() == 1);
  pair.compare();
  CHECK(grow_groups(pair, 0, {6, 8}));
  pair.publish(0, 8, 1);  // null blocks have no key
  CHECK(pair.blocks.num_cached() == 4 + 2);
  pair.compare();
  CHECK_THROWS(pair.pool.skip(pair.rows[0].handle, 1, 9), UsageError);
  CHECK_THROWS(pair.pool.skip(pair.rows[0].handle, 1, -1), UsageError);
  CHECK_THROWS(pair.pool.skip(pair.rows[0].handle, 2, 0), UsageError);
  pair.compare();
  pair.drain();
}

// Named for what was wrong: half of a first range became one range more than the cap.
void a_row_at_the_cap_keeps_its_first_range_until_all_of_it_falls_out() {
  PoolPair pair(options_of(20, {window_group(3)}, 2), small_book());
  const Keys keys = keys_from(0, 20);
  CHECK(pair.admit(keys, {RangeList()}, needs_of({3}), {}) == 0);
  CHECK(pair.admit(keys, {RangeList()}, needs_of({1}), {}) == 1);
  CHECK(grow_groups(pair, 0, {5}));
  CHECK(pair.rows[0].blocks().num_ranges() == 2);
  for (int32_t count = 1; count <= 5; ++count) {
    pair.skip(0, 0, count);
    CHECK(pair.rows[0].blocks().num_leading_nulls() == (count < 3 ? 0 : count));
    CHECK(pair.rows[0].blocks().num_ranges() <= 2);
    pair.compare();
  }
  pair.drain();
}

// Named for what was wrong: the row that a worker knows kept every range that ever fell out.
void a_long_row_with_a_window_stays_small_at_the_worker() {
  constexpr int32_t kCap = 8;
  PoolOptions options = options_of(141, {window_group(2)}, kCap);
  PoolPair pair(options, small_book());
  std::mt19937_64 random(1);
  const Keys keys = keys_from(0, 90);
  const Keys spacer = keys_from(100, 1);
  pair.begin_step();
  for (int i = 0; i < 140; ++i) CHECK(admit_groups(pair, spacer, {1}) == i);
  pair.execute(random);
  for (size_t row = 0; row < pair.rows.size();) {  // holes of one block, and nothing else
    pair.rows[row].blocks().at(0) % 2 == 0 ? pair.free(row) : static_cast<void>(++row);
  }
  pair.begin_step();
  CHECK(admit_groups(pair, keys, {1}) >= 0);
  const size_t row = pair.rows.size() - 1;
  for (int32_t blocks = 2; blocks < 60; ++blocks) {
    CHECK(grow_groups(pair, row, {blocks}));
    pair.execute(random);  // counts the ranges of the worker's row
    pair.begin_step();
    const int32_t out = std::min(blocks - 2, pair.worker.written(pair.rows[row].handle, 0));
    pair.skip(row, 0, out);
    CHECK(pair.rows[row].blocks().num_ranges() <= kCap);
    pair.compare();
  }
  pair.execute(random);
  pair.drain();
}

// Admitted with a window's head left out: only the rest is placed, and counted.
void a_new_row_can_begin_behind_its_window() {
  const Keys keys = keys_from(0, 20);
  for (int32_t skip = 0; skip <= 9; ++skip) {
    for (int32_t blocks = 0; blocks <= 7; ++blocks) {
      PoolPair pair(options_of(12, {full_group(), window_group(2)}), small_book());
      CHECK(admit_groups(pair, keys, {0, 3}) == 0);
      pair.publish(0, 3, 1);
      pair.free(0);
      std::vector<Need> needs = needs_of({2, blocks});
      needs[1].skip = skip;
      std::vector<RangeList> hits = {RangeList(), pair.lookup(1, keys, 3)};
      CHECK(hits[1].num_blocks() == 3);
      CHECK(pair.admit(keys, hits, needs, {}) == 0);
      const RangeList& row = pair.rows[0].blocks(1);
      CHECK(row.num_blocks() == std::max(blocks, 3));
      const int32_t nulls = std::clamp(std::min(skip, blocks) - 3, 0, 20);
      CHECK(pair.blocks.num_live() == 2 + 2 + std::max(blocks - 3, 0) - nulls);
      CHECK(pair.pool.num_published(pair.rows[0].handle, 1) == 3);
      pair.publish(0, row.num_blocks(), 1);
      pair.compare();
      pair.drain();
    }
  }
}

// Between the gate and the capacity check a growing row lets go of its head, whatever comes of it.
void a_growing_row_lets_go_of_its_head_behind_the_gate() {
  const Keys keys = keys_from(0, 20);
  for (int32_t skip = 0; skip <= 6; ++skip) {
    for (int32_t gate = 0; gate <= 9; ++gate) {
      for (int32_t blocks = 0; blocks <= 9; ++blocks) {
        PoolPair pair(options_of(12, {full_group(), window_group(2)}), small_book());
        CHECK(admit_groups(pair, keys, {4, 4}) == 0);
        pair.publish(0, 2, 1);
        std::vector<Need> needs = needs_of({4, blocks});
        needs[1].skip = skip;
        needs[1].gate = gate;
        const bool passes = std::max(gate - 4, 0) <= 3;
        const int32_t gone = passes ? std::min(skip, 4) : 0;
        const bool fits = passes && std::max(blocks - 4, 0) <= 3 + gone;
        CHECK(pair.grow(0, needs, {}) == fits);
        CHECK(pair.rows[0].blocks(1).num_leading_nulls() == gone);
        CHECK(pair.rows[0].blocks(1).num_blocks() == (fits ? std::max(blocks, 4) : 4));
        pair.compare();
        pair.drain();
      }
    }
  }
}

}  // namespace

int main() {
  return run_tests({
      {"null blocks do not merge with the first block",
       null_blocks_do_not_merge_with_the_first_block},
      {"what falls out of a window is free again", what_falls_out_of_a_window_is_free_again},
      {"a row at the cap keeps its first range until all of it falls out",
       a_row_at_the_cap_keeps_its_first_range_until_all_of_it_falls_out},
      {"a long row with a window stays small at the worker",
       a_long_row_with_a_window_stays_small_at_the_worker},
      {"a new row can begin behind its window", a_new_row_can_begin_behind_its_window},
      {"a growing row lets go of its head behind the gate",
       a_growing_row_lets_go_of_its_head_behind_the_gate},
  });
}
