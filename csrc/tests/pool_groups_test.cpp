// KvPool with several KV-cache groups: one capacity check, and all or nothing when one of them
// cannot be served. Every call goes to the obvious pool of pool_model.hpp as well.
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

using tagma::BlockId;
using tagma::Compaction;
using tagma::GroupKind;
using tagma::GroupSpec;
using tagma::kNullBlock;
using tagma::KvPool;
using tagma::Need;
using tagma::RangeList;
using tagma::Spare;
using tagma::UsageError;

using Groups = std::vector<GroupSpec>;

void one_capacity_check_for_all_groups() {
  const Keys keys = keys_from(0, 20);
  for (int32_t first = 0; first <= 8; ++first) {
    for (int32_t second = 0; second <= 8; ++second) {
      for (int32_t extra = 0; extra < 24; ++extra) {
        PoolPair pair(options_of(10, {full_group(), window_group(2)}), small_book());
        Spare spare;
        spare.watermark = extra % 2;
        spare.reserved = extra / 2 % 2;
        std::vector<Need> needs = needs_of({first, second});
        // One group asks for the whole prompt, and the other for nothing beyond.
        const size_t gated = extra / 12 == 0 ? 0 : 1;
        const int32_t gate = extra / 4 % 3 == 0 ? 0 : needs[gated].blocks + extra / 4 % 3 - 1;
        needs[gated].gate = gate;
        const bool fits = first + second + spare.watermark + spare.reserved <= 9 &&
                          (gate == 0 || gate + spare.watermark <= 9);
        const int row = pair.admit(keys, std::vector<RangeList>(2), needs, spare);
        CHECK((row >= 0) == fits);
        pair.compare();
        if (row < 0) continue;
        const int32_t free = 9 - first - second;
        CHECK(grow_groups(pair, 0, {first + free, second}));
        CHECK(!grow_groups(pair, 0, {first + free, second + 1}));
        pair.compare();
        pair.drain();
      }
    }
  }
}

// Single live blocks at every second place: nine holes of one block, and room for no more than
// three ranges.
void break_to_pieces(PoolPair& pair, const Keys& keys) {
  for (int i = 0; i < 19; ++i) CHECK(admit_groups(pair, keys, {1, 0}) >= 0);
  for (size_t row = 0; row < pair.rows.size();) {
    if (pair.rows[row].blocks().at(0) % 2 == 0) {
      pair.free(row);
    } else {
      ++row;
    }
  }
}

void when_a_later_group_is_refused_nothing_is_left_of_the_earlier_ones() {
  const Keys keys = keys_from(0, 20);
  const Keys cached = keys_from(50, 20);
  PoolPair pair(options_of(20, {full_group(), full_group()}, 5), small_book());
  break_to_pieces(pair, keys);
  // A hit for the first group, which is adopted before the second one is refused.
  CHECK(admit_groups(pair, cached, {2, 0}) >= 0);
  pair.publish(pair.rows.size() - 1, 1, 0);
  pair.free(pair.rows.size() - 1);
  const std::vector<BlockId> lru = pair.blocks.lru();
  const std::vector<RangeList> hits = pair.common_hit(cached, 5);
  CHECK(hits[0].empty());  // the second group has nothing of it
  const std::vector<RangeList> first = {pair.lookup(0, cached, 5), {}};
  CHECK(first[0].num_blocks() == 1 && lru.size() == 1);
  pair.begin_step();
  CHECK(pair.admit(cached, first, needs_of({2, 6}), {}) == -1);
  CHECK(pair.pool.num_cap_refusals() == 1);
  CHECK(pair.pool.allocator().num_free() == 9 && pair.blocks.num_idle() == 1);
  CHECK(pair.pool.take_row_changes().size() == pair.rows.size());  // those of the others
  pair.compare();
  CHECK(admit_groups(pair, keys, {2, 3}) >= 0);
  const size_t row = pair.rows.size() - 1;
  CHECK(pair.pool.take_row_changes().size() == 2);
  CHECK(!grow_groups(pair, row, {3, 6}));
  CHECK(pair.pool.num_cap_refusals() == 2);
  CHECK(pair.rows[row].blocks(0).num_blocks() == 2 && pair.rows[row].blocks(1).num_blocks() == 3);
  CHECK(pair.pool.take_row_changes().empty());
  pair.compare();
  CHECK(grow_groups(pair, row, {3, 4}));
  pair.compare();
  pair.drain();
}

// The same if the call ends by an exception: lacking blocks that break the alignment.
void an_exception_leaves_nothing_of_the_earlier_groups_either() {
  KvPool pool(options_of(64, {full_group(), window_group(2)}, 256, 4));
  const RangeList hits[2];
  RangeList added[2];
  std::vector<Need> needs = needs_of({8, 8});
  needs[1].skip = 2;
  for (int i = 0; i < 3; ++i) {
    CHECK_THROWS(pool.admit(hits, needs.data(), {}, added), UsageError);
    CHECK(pool.num_rows() == 0 && pool.allocator().num_live() == 0);
    CHECK(pool.allocator().holes().num_holes() == 1 && pool.take_row_changes().empty());
    CHECK(added[0].empty() && added[1].empty());
    pool.check_invariants();
  }
  needs[1].skip = 4;
  CHECK(pool.admit(hits, needs.data(), {}, added) != 0);
  CHECK(pool.allocator().num_live() == 12);
  pool.check_invariants();
}

// A list that a caller passes again holds the new blocks alone, and a refused call takes no block
// of an earlier one away.
void lists_of_added_blocks_may_be_used_again() {
  KvPool pool(options_of(20, {full_group(), full_group()}, 3));
  const RangeList hits[2];
  RangeList added[2];
  std::vector<tagma::RowHandle> singles;
  for (int i = 0; i < 19; ++i) {
    singles.push_back(pool.admit(hits, needs_of({1, 0}).data(), {}, added));
  }
  for (size_t i = 1; i < 19; i += 2) pool.free(singles[i]);
  const tagma::RowHandle row = pool.admit(hits, needs_of({1, 2}).data(), {}, added);
  CHECK(added[0].num_blocks() == 1 && added[1].num_blocks() == 2);
  CHECK(!pool.grow(row, needs_of({2, 4}).data(), {}, added));
  CHECK(added[0].empty() && added[1].empty());
  CHECK(pool.row_blocks(row, 0).num_blocks() == 1 && pool.row_blocks(row, 1).num_blocks() == 2);
  pool.check_invariants();
  CHECK(pool.grow(row, needs_of({2, 3}).data(), {}, added));
  CHECK(added[0].num_blocks() == 1 && added[1].num_blocks() == 1);
  pool.check_invariants();
}

// A row of one group moves, or goes aside, and the worker hears of it for that group.
void rows_move_within_their_group() {
  std::mt19937_64 random(1);
  PoolOptions options = options_of(40, {full_group(), full_group()});
  options.compaction = Compaction::kLive;
  options.copy_budget = 100;
  PoolPair pair(options, small_book());
  const Keys keys = keys_from(0, 20);
  pair.begin_step();
  CHECK(admit_groups(pair, keys, {4, 2}) == 0);
  pair.publish(0, 4, 0);
  pair.publish(0, 2, 1);
  CHECK(!pair.relocate(0, 0, 2, 1));  // grew in this step
  pair.execute(random);
  pair.begin_step();
  CHECK(pair.rows[0].blocks(1).at(0) == pair.rows[0].blocks(0).tail() + 1);
  CHECK(grow_groups(pair, 0, {6, 2}));
  CHECK(pair.rows[0].blocks(0).num_ranges() == 1);  // its other row made room
  CHECK(pair.pool.num_moved_live() == 2);
  CHECK(pair.lookup(1, keys, 2).num_blocks() == 2);
  pair.execute(random);
  pair.compare();
  pair.begin_step();
  CHECK(pair.relocate(0, 0, 2, 1));
  pair.execute(random);
  pair.compare();
  CHECK_THROWS(pair.pool.relocate(pair.rows[0].handle, 0, 1, 2), UsageError);
  pair.drain();
}

void held_rows_do_not_move_in_any_group() {
  PoolOptions options = options_of(40, {full_group(), full_group()});
  options.compaction = Compaction::kLive;
  options.copy_budget = 100;
  PoolPair pair(options, small_book());
  const Keys keys = keys_from(0, 20);
  pair.begin_step();
  CHECK(admit_groups(pair, keys, {4, 2}) == 0);
  pair.begin_step();
  pair.pool.hold(pair.rows[0].handle);
  CHECK(!pair.relocate(0, 0, 4, 0) && !pair.relocate(0, 0, 2, 1));
  pair.begin_step();
  CHECK(pair.relocate(0, 0, 4, 0) && pair.relocate(0, 0, 2, 1));
  pair.drain();
}

// The past of a pool: rows of two prompts in all groups, grown by turns, freed by chance, until one
// is left or none.
void tear_apart(PoolPair& pair, const Keys (&prompts)[2], int32_t goal, size_t groups,
                std::mt19937_64& random) {
  for (int step = 0; step < 80; ++step) {
    const Keys& keys = prompts[random() % 2];
    const size_t row = pair.rows.empty() ? 0 : random() % pair.rows.size();
    if (random() % 3 == 0) {
      admit_groups(pair, keys, std::vector<int32_t>(groups, 1 + random() % 2));
    } else if (!pair.rows.empty() && random() % 3 != 0) {
      const int32_t held = pair.rows[row].blocks().num_blocks();
      std::vector<int32_t> needs(groups, std::min(held + 1, goal));
      if (random() % 2 == 0) needs[random() % groups] = std::min(held + 2, goal);
      grow_groups(pair, row, needs);
      publish_all(pair, row);
    } else if (!pair.rows.empty()) {
      pair.free(row);
    }
  }
  while (pair.rows.size() > 1) pair.free(pair.rows.size() - 1);
}

// See a_request_alone_always_makes_progress(). Rows of several groups that grow by turns into one
// stretch use up their ranges there; preempted and admitted with all it had, and one block more,
// the request gets on.
void a_request_alone_makes_progress_in(size_t groups, int32_t cap, int32_t goal, uint64_t seed) {
  const auto count = static_cast<int32_t>(groups);
  PoolPair pair(options_of(goal * count + 1, Groups(groups, full_group()), cap), small_book());
  std::mt19937_64 random(seed);
  const Keys prompts[] = {keys_from(0, goal), keys_from(60, goal)};
  tear_apart(pair, prompts, goal, groups, random);
  const auto held = [&] {
    int32_t least = goal;
    for (size_t g = 0; g < groups; ++g) {
      least = std::min(least, pair.rows[0].blocks(g).num_blocks());
    }
    return least;
  };
  for (int32_t reached = 0, step = 0; reached < goal; ++step) {
    CHECK(step < 3 * goal);
    pair.begin_step();
    if (pair.rows.empty()) {
      const std::vector<RangeList> hits = pair.common_hit(prompts[0], std::max(reached - 1, 0));
      const std::vector<int32_t> blocks(groups, std::min(reached + 1, goal));
      CHECK(pair.admit(prompts[0], hits, needs_of(blocks), {}) == 0);
    } else if (!grow_groups(pair, 0, std::vector<int32_t>(groups, std::min(held() + 1, goal)))) {
      pair.free(0);
    }
    pair.end_scheduling();
    if (pair.rows.empty()) continue;
    publish_all(pair, 0);
    reached = std::max(reached, held());
    pair.compare();
  }
  pair.drain();
}

void a_request_alone_makes_progress() {
  for (const size_t groups : {2, 3}) {
    for (const int32_t cap : {4, 6, 8, 12, 20}) {
      for (const int32_t goal : {10, 30}) {
        for (uint64_t seed = 0; seed < 15; ++seed) {
          a_request_alone_makes_progress_in(groups, cap, goal, seed);
        }
      }
    }
  }
}

void nonsense_is_refused() {
  CHECK_THROWS(KvPool(options_of(10, Groups{})), UsageError);
  CHECK_THROWS(KvPool(options_of(10, Groups(257))), UsageError);
  CHECK_THROWS(KvPool(options_of(10, {full_group(0)})), UsageError);
  CHECK_THROWS(KvPool(options_of(10, {window_group(0)})), UsageError);
  CHECK_THROWS(KvPool(options_of(10, {GroupSpec{GroupKind::kPrefix, 2, 1}})), UsageError);
  CHECK_THROWS(KvPool(options_of(10, {GroupSpec{GroupKind::kState, 2, 1}})), UsageError);
  CHECK_THROWS(KvPool(options_of(10, {GroupSpec{GroupKind::kChunk, 2, 2}})), UsageError);
  PoolPair pair(options_of(10, {full_group(), window_group(2)}), small_book());
  RangeList added;
  CHECK_THROWS(pair.pool.admit(RangeList(), demand_of(1), added), UsageError);
  CHECK(admit_groups(pair, keys_from(0, 5), {1, 1}) == 0);
  CHECK_THROWS(pair.pool.grow(pair.rows[0].handle, demand_of(2), added), UsageError);
  CHECK_THROWS(pair.pool.row_blocks(pair.rows[0].handle, 2), UsageError);
  CHECK_THROWS(pair.pool.headroom_blocks(2), UsageError);
  // Null blocks stand in front of windows only, and nowhere else.
  const RangeList null({kNullBlock, 2});
  std::vector<RangeList> hits = {null, null};
  std::vector<RangeList> lists(2);
  const std::vector<Need> needs = needs_of({3, 3});
  CHECK_THROWS(pair.pool.admit(hits.data(), needs.data(), {}, lists.data()), UsageError);
  for (size_t g = 0; g < 2; ++g) {
    for (const int field : {0, 1, 2, 3, 4}) {
      std::vector<Need> bad = needs;
      int32_t* const fields[] = {&bad[g].blocks, &bad[g].gate, &bad[g].prompt, &bad[g].limit,
                                 &bad[g].skip};
      *fields[field] = -1;
      std::vector<RangeList> none(2);
      CHECK_THROWS(pair.pool.admit(none.data(), bad.data(), {}, lists.data()), UsageError);
      CHECK_THROWS(pair.pool.grow(pair.rows[0].handle, bad.data(), {}, lists.data()), UsageError);
    }
  }
  pair.compare();
  pair.drain();
}

// Every short sequence of calls, pins among them, on tiny pools of two groups; moving ones execute
// their steps.
void every_short_sequence_of(const Groups& groups, int32_t num_blocks, int32_t cap, bool moves,
                             int depth) {
  const Keys prompts[] = {keys_from(0, 8), keys_from(100, 8)};
  PoolOptions options = options_of(num_blocks, groups, cap);
  if (moves) {
    options.compaction = Compaction::kLive;
    options.copy_budget = 3;
    options.policy.slack = 1;
  }
  Choices choices;
  int64_t sequences = 0;
  do {
    std::mt19937_64 random(1);
    PoolPair pair(options, small_book());
    pair.begin_step();
    for (int step = 0; step < depth; ++step) {
      const int rows = static_cast<int>(pair.rows.size());
      const int choice = choices.choose(4 + 5 * rows + (pair.pins.empty() ? 0 : 1));
      if (!pair.scheduling && choice > 0) pair.begin_step();
      if (choice == 0) {
        pair.scheduling ? pair.execute(random) : pair.begin_step();
      } else if (choice < 3) {
        const Keys& keys = prompts[choice - 1];
        const std::vector<RangeList> hits = pair.common_hit(keys, 7);
        const int32_t blocks = hits[0].num_blocks() + 1;
        const int row = pair.admit(keys, hits, needs_of({blocks, blocks}), {});
        for (int32_t g = 0; row >= 0 && g < 2; ++g) {
          pair.publish(static_cast<size_t>(row), std::min(blocks, 8), g);
        }
      } else if (choice == 3) {
        pair.pin(pair.lookup(1, prompts[0], 3));
      } else if (choice < 4 + 5 * rows) {
        const auto row = static_cast<size_t>((choice - 4) / 5);
        const tagma::RowHandle handle = pair.rows[row].handle;
        const int32_t held = pair.rows[row].blocks(0).num_blocks();
        const int32_t second = pair.rows[row].blocks(1).num_blocks();
        switch ((choice - 4) % 5) {
          case 0:
            pair.grow(row, needs_of({held + 1, second + 1}), {});
            break;
          case 1:
            pair.publish(row, std::min(held, 8), 0);
            pair.publish(row, std::min(second, 8), 1);
            break;
          case 2:
            pair.skip(row, 1, std::min(pair.worker.written(handle, 1), second));
            break;
          case 3:
            pair.pin(row, 1, 0, second);
            break;
          default:
            if (pair.may_be_preempted(row)) pair.free(row);
        }
      } else {
        pair.unpin(0);
      }
      if (choices.fresh()) pair.compare();
    }
    pair.execute(random);
    pair.drain();
    ++sequences;
  } while (choices.next());
  std::printf("  %d blocks, cap %d, %s, %d steps: %lld sequences\n", num_blocks, cap,
              moves ? "moving" : "still", depth, static_cast<long long>(sequences));
}

void every_short_sequence_on_tiny_pools_of_two_groups() {
  for (const bool moves : {false, true}) {
    every_short_sequence_of({full_group(), window_group(1)}, 5, 3, moves, 5);
    every_short_sequence_of({full_group(), window_group(2)}, 8, 256, moves, 4);
    every_short_sequence_of({full_group(), state_group()}, 7, 4, moves, 4);
    every_short_sequence_of({full_group(), chunk_group(2)}, 7, 4, moves, 4);
  }
}

}  // namespace

int main() {
  return run_tests({
      {"one capacity check for all groups", one_capacity_check_for_all_groups},
      {"when a later group is refused, nothing is left of the earlier ones",
       when_a_later_group_is_refused_nothing_is_left_of_the_earlier_ones},
      {"an exception leaves nothing of the earlier groups either",
       an_exception_leaves_nothing_of_the_earlier_groups_either},
      {"lists of added blocks may be used again", lists_of_added_blocks_may_be_used_again},
      {"rows move within their group", rows_move_within_their_group},
      {"held rows do not move in any group", held_rows_do_not_move_in_any_group},
      {"a request alone makes progress in all groups", a_request_alone_makes_progress},
      {"nonsense is refused", nonsense_is_refused},
      {"every short sequence on tiny pools of two groups",
       every_short_sequence_on_tiny_pools_of_two_groups},
  });
}
