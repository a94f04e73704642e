// What moves and what must not, in layouts built by hand. Every call goes to the obvious pool of
// pool_model.hpp as well, and a worker executes each step: rows and contents must be right after
// it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <initializer_list>
#include <random>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/check.hpp"
#include "tests/pool_fixtures.hpp"
#include "tests/pool_model.hpp"

namespace {

using tagma::BlockCopy;
using tagma::BlockId;
using tagma::BlockRange;
using tagma::Compaction;
using tagma::KvPool;
using tagma::RangeList;
using tagma::UsageError;

// A pool whose steps are executed. Rows of demand_of() hope for no growth, so that they are placed
// one behind the other.
class Stepped {
 public:
  Stepped(int32_t num_blocks, Compaction mode, int32_t budget = 1000, int32_t slack = 0)
      : pair(options(num_blocks, mode, budget, slack), book()), random_(1) {
    pair.begin_step();
  }

  // A row of a prompt of its own, whose keys begin at 50 * `prompt`.
  size_t admit(int prompt, int32_t blocks, int32_t published = 0) {
    prompts_.push_back(keys_from(50 * prompt, 49));
    const int row = pair.admit(prompts_.back(), {}, demand_of(blocks));
    CHECK(row >= 0);
    pair.publish(static_cast<size_t>(row), published);
    return static_cast<size_t>(row);
  }

  // A row that begins with what is cached of a prompt.
  size_t admit_hit(int prompt, int32_t hit, int32_t blocks) {
    prompts_.push_back(keys_from(50 * prompt, 49));
    const RangeList found = pair.lookup(prompts_.back(), hit);
    CHECK(found.num_blocks() == hit);
    const int row = pair.admit(prompts_.back(), found, demand_of(blocks));
    CHECK(row >= 0);
    return static_cast<size_t>(row);
  }

  void grow(size_t row, int32_t blocks) { CHECK(pair.grow(row, demand_of(blocks))); }
  void next_step() {
    pair.execute(random_);
    pair.compare();
    pair.begin_step();
  }
  // Between two steps, so that what the row published stays cached.
  void finish(size_t row) {
    pair.execute(random_);
    pair.free(row);
    pair.begin_step();
  }
  ~Stepped() {
    next_step();
    pair.execute(random_);
    pair.drain();
  }

  const std::vector<BlockRange>& ranges(size_t row) const {
    return pair.rows[row].blocks().ranges();
  }
  int32_t cached(int prompt) { return pair.lookup(keys_from(50 * prompt, 49), 49).num_blocks(); }
  int64_t moved() const { return pair.pool.num_moved(); }
  int64_t moved_live() const { return pair.pool.num_moved_live(); }

  PoolPair pair;

 private:
  static PoolOptions options(int32_t num_blocks, Compaction mode, int32_t budget, int32_t slack) {
    PoolOptions out = options_of(num_blocks);
    out.compaction = mode;
    out.copy_budget = budget;
    out.policy.slack = slack;
    return out;
  }

  std::mt19937_64 random_;
  std::deque<Keys> prompts_;  // rows point to their keys
};

bool is(const std::vector<BlockRange>& ranges, std::initializer_list<BlockRange> expected) {
  return ranges == std::vector<BlockRange>(expected);
}

std::mt19937_64& random_source() {
  static std::mt19937_64 random(9);
  return random;
}

constexpr Compaction kModes[] = {Compaction::kOff, Compaction::kIdle, Compaction::kLive};

// Row [1, 5), idle [5, 9), hole [9, 21).
void grow_into_an_idle_neighbour(Stepped& pool) {
  const size_t row = pool.admit(0, 4);
  pool.finish(pool.admit(1, 4, 4));
  CHECK(is(pool.ranges(row), {{1, 4}}) && pool.pair.blocks.lru().front() == 8);
  pool.grow(row, 6);
}

void an_idle_neighbour_makes_room() {
  for (const Compaction mode : {Compaction::kIdle, Compaction::kLive}) {
    Stepped pool(21, mode);
    grow_into_an_idle_neighbour(pool);
    CHECK(is(pool.ranges(0), {{1, 6}}));
    CHECK(pool.moved() >= 2 && pool.moved() <= 4 && pool.moved_live() == 0);
    CHECK(pool.pair.pool.num_evictions() == 0 && pool.cached(1) == 4);
    pool.next_step();
    // The rest of the chain, and everything behind it.
    pool.grow(0, 16);
    CHECK(is(pool.ranges(0), {{1, 16}}) && pool.cached(1) == 4);
    pool.next_step();
    pool.grow(0, 20);
    CHECK(pool.cached(1) == 0 && pool.pair.pool.num_evictions() == 4);
  }
}

void nothing_moves_without_permission() {
  for (const int32_t budget : {0, 1000}) {
    Stepped pool(21, budget == 0 ? Compaction::kLive : Compaction::kOff, budget);
    CHECK(!pool.pair.pool.can_move() && pool.pair.is_strict());
    grow_into_an_idle_neighbour(pool);
    CHECK(pool.ranges(0).size() == 2);
    CHECK(!pool.pair.relocate(0, 0, 1));
    CHECK(pool.moved() == 0 && pool.cached(1) == 4);
  }
}

// A budget bounds the moves of a step; what may not move is evicted, from the far end of its chain.
void the_budget_bounds_the_moves_of_a_step() {
  for (int32_t budget = 1; budget <= 6; ++budget) {
    for (const int32_t slack : {0, 1, 2, 4, 20}) {
      Stepped pool(31, Compaction::kIdle, budget, slack);
      const size_t row = pool.admit(0, 4);
      pool.finish(pool.admit(1, 6, 6));
      const int64_t before = pool.moved();
      pool.grow(row, 10);
      CHECK(is(pool.ranges(row), {{1, 10}}));
      CHECK(pool.moved() - before <= budget);
      CHECK(pool.moved() - before == std::min(budget, 6));
      CHECK(pool.cached(1) == std::min(budget, 6));
      CHECK(pool.pair.pool.take_relocations().empty());  // taken by the model
      pool.next_step();
    }
  }
}

// A live move and the cold blocks that it displaces share the budget.
void a_live_move_and_what_it_displaces_share_the_budget() {
  Stepped pool(21, Compaction::kLive, 6, 20);
  const size_t row = pool.admit(0, 4);
  for (int i = 0; i < 4; ++i) {  // three cold blocks and a hole, four times
    pool.admit(1 + i, 3, 3);
    pool.admit(10, 1);
  }
  pool.next_step();
  while (pool.pair.rows.size() > 1) pool.finish(1);
  CHECK(pool.pair.relocate(row, 0, 4));
  CHECK(pool.moved_live() == 4 && pool.moved() == 6);
  pool.next_step();
}

// The next step has its whole budget again.
void the_budget_returns_with_the_next_step() {
  Stepped pool(41, Compaction::kIdle, 3);
  const size_t row = pool.admit(0, 2);
  pool.finish(pool.admit(1, 9, 9));
  for (const int32_t blocks : {5, 8, 11}) {
    const int64_t before = pool.moved();
    pool.grow(row, blocks);
    CHECK(pool.moved() - before <= 3 && pool.ranges(row).size() == 1);
    pool.next_step();
  }
  CHECK(pool.cached(1) == 9);
}

// Rows [1, 5), [5, 9): the tail that is no longer than its neighbour goes where it can grow.
void a_blocked_tail_moves() {
  for (const Compaction mode : kModes) {
    Stepped pool(31, mode);
    const size_t row = pool.admit(0, 4, 3);
    const size_t other = pool.admit(1, 4);
    pool.next_step();
    pool.grow(row, 6);
    if (mode == Compaction::kLive) {
      CHECK(pool.ranges(row).size() == 1 && pool.ranges(row)[0].start > 8);
      CHECK(pool.moved_live() == 4);
    } else {
      CHECK(is(pool.ranges(row), {{1, 4}, {9, 2}}));
      CHECK(pool.moved() == 0);
    }
    CHECK(is(pool.ranges(other), {{5, 4}}));
    CHECK(pool.cached(0) == 3);
  }
}

// Rows [1, 7), [7, 9): the shorter one goes, and the worker is told of it alone.
void a_shorter_neighbour_moves() {
  Stepped pool(31, Compaction::kLive);
  const size_t row = pool.admit(0, 6);
  const size_t other = pool.admit(1, 2, 1);
  pool.next_step();
  pool.grow(row, 8);
  CHECK(is(pool.ranges(row), {{1, 8}}));
  CHECK(pool.ranges(other).size() == 1 && pool.ranges(other)[0].start > 8);
  CHECK(pool.moved_live() == 2 && pool.cached(1) == 1);
}

// Ten rows of two blocks, every second one freed: four more blocks fit only if somebody moves.
void live_ranges_move_to_make_room() {
  for (const Compaction mode : kModes) {
    Stepped pool(21, mode);
    for (int i = 0; i < 10; ++i) pool.admit(i, 2, 2);
    pool.next_step();
    pool.pair.execute(random_source());
    for (size_t i = 9; i < 10; i -= 2) {
      pool.pair.evict(BlockModel::ids(pool.pair.rows[i].blocks()));
      pool.pair.free(i);
    }
    pool.pair.begin_step();
    const size_t row = pool.admit(20, 4);
    CHECK(pool.ranges(row).size() == (mode == Compaction::kLive ? 1 : 2));
    CHECK(pool.moved_live() == (mode == Compaction::kLive ? 2 : 0));
    for (int i = 0; i < 10; i += 2) CHECK(pool.cached(i) == 2);
  }
}

// Blocks 0..7 of a prompt, idle at every second place.
void scatter(Stepped& pool, std::deque<Keys>& singles) {
  for (int i = 0; i < 8; ++i) {
    singles.push_back(keys_from(50 + i, 1));
    CHECK(pool.pair.admit(singles.back(), {}, demand_of(1)) >= 0);
    pool.pair.publish(pool.pair.rows.size() - 1, 1);
    pool.admit(10, 1);
  }
  pool.next_step();
  pool.pair.execute(random_source());
  while (!pool.pair.rows.empty()) pool.pair.free(0);
  pool.pair.begin_step();
  CHECK(pool.cached(1) == 8);
}

void a_scattered_hit_is_gathered() {
  for (const Compaction mode : kModes) {
    for (const int32_t budget : {14, 16, 1000}) {  // half of it may be spent on this
      std::deque<Keys> singles;
      Stepped pool(41, mode, budget);
      scatter(pool, singles);
      const size_t row = pool.admit_hit(1, 8, 10);
      const bool gathered = mode != Compaction::kOff && budget >= 16;
      if (gathered) CHECK(pool.ranges(row).size() == 1);
      if (mode == Compaction::kOff) CHECK(pool.moved() == 0 && pool.ranges(row).size() >= 8);
      CHECK(pool.cached(1) == 8 && pool.pair.rows[row].published() == 8);
      CHECK(pool.moved() <= budget);
    }
  }
}

// What another request references stays where it is, and so does the chain in front of it.
void a_shared_hit_is_not_gathered() {
  std::deque<Keys> singles;
  Stepped pool(41, Compaction::kLive);
  scatter(pool, singles);
  const size_t holder = pool.admit_hit(1, 8, 8);
  const std::vector<BlockRange> places = pool.ranges(holder);
  pool.next_step();
  const int64_t before = pool.moved();
  const size_t row = pool.admit_hit(1, 8, 10);
  CHECK(pool.ranges(holder) == places && pool.moved() == before);
  CHECK(pool.pair.rows[row].blocks().slice(0, 8).ranges() == places);
}

void shared_just_grown_and_foreign_blocks_do_not_move() {
  Stepped pool(41, Compaction::kLive);
  const size_t row = pool.admit(0, 6, 4);
  CHECK(!pool.pair.relocate(row, 0, 6));  // new in this step: the worker gets it as it is
  pool.next_step();
  const size_t sharer = pool.admit_hit(0, 4, 6);
  pool.next_step();
  CHECK(!pool.pair.relocate(row, 0, 6) && !pool.pair.relocate(row, 3, 5));
  CHECK(!pool.pair.relocate(sharer, 0, 4));
  CHECK(pool.ranges(sharer).size() == 2 && !pool.pair.relocate(sharer, 3, 5));  // not one range
  CHECK(!pool.pair.relocate(row, 2, 2) && !pool.pair.relocate(row, 6, 7));      // nothing
  CHECK(pool.moved() == 0);
  CHECK(pool.pair.relocate(row, 4, 6));
  CHECK(pool.ranges(row).size() == 2 && pool.moved_live() == 2);
  pool.next_step();
  pool.grow(row, 7);
  CHECK(!pool.pair.relocate(row, 4, 7));
  CHECK_THROWS(pool.pair.pool.relocate(0, 0, 1), UsageError);
}

// A neighbour that is shared, or new in this step, is no candidate either.
void an_immovable_neighbour_stays() {
  for (const bool shared : {false, true}) {
    Stepped pool(41, Compaction::kLive);
    const size_t row = pool.admit(0, 6);
    if (shared) pool.admit(1, 2, 2);
    pool.next_step();
    const size_t other = shared ? pool.admit_hit(1, 2, 2) : pool.admit(1, 2, 2);
    CHECK(pool.ranges(other)[0].start == 7);
    pool.grow(row, 8);
    CHECK(is(pool.ranges(other), {{7, 2}}));
    CHECK(pool.ranges(row).size() == 1);  // the tail moved instead
  }
}

void a_range_that_moves_twice_is_told_once() {
  Stepped pool(41, Compaction::kLive);
  const size_t row = pool.admit(0, 5);
  const size_t gone = pool.admit(1, 5);
  pool.next_step();
  CHECK(pool.pair.relocate(row, 0, 5) && pool.pair.relocate(row, 0, 5));
  CHECK(pool.pair.relocate(gone, 0, 5));
  pool.pair.free(gone);  // preempted: nobody needs to know where it went
  const auto changes = pool.pair.pool.take_row_changes();
  CHECK(changes.size() == 1 && changes[0].row == pool.pair.rows[row].handle);
  CHECK(changes[0].first_block == 0 && changes[0].blocks.ranges() == pool.ranges(row));
  pool.pair.worker.update(changes[0]);
  CHECK(pool.pair.pool.take_row_changes().empty());
}

// Moving a part of a range adds ranges: never beyond the cap.
void the_cap_holds_for_rows_that_are_moved() {
  for (int32_t cap = 1; cap <= 6; ++cap) {
    PoolOptions options = options_of(60, cap);
    options.compaction = Compaction::kLive;
    options.copy_budget = 1000;
    PoolPair pair(options, book());
    const Keys keys = keys_from(0, 30);
    pair.begin_step();
    CHECK(pair.admit(keys, {}, demand_of(20)) == 0);
    for (int i = 0; i < 10; ++i) {
      pair.execute(random_source());
      pair.begin_step();
      pair.relocate(0, 2 * i, 2 * i + 1);
      CHECK(pair.rows[0].blocks().num_ranges() <= cap);
      pair.compare();
    }
    pair.execute(random_source());
    pair.drain();
  }
}

void refuses_what_makes_no_sense() {
  for (const int32_t alignment : {1, 4}) {
    PoolOptions options = options_of(64, 256, alignment);
    options.copy_budget = -1;
    CHECK_THROWS(KvPool{options}, UsageError);
    options.copy_budget = 0;
    options.policy.slack = -1;
    CHECK_THROWS(KvPool{options}, UsageError);
    options.policy.slack = 1;
    if (alignment > 1) CHECK_THROWS(KvPool{options}, UsageError);
    options.policy.slack = 0;
    options.compaction = Compaction::kIdle;
    options.copy_budget = 1;
    if (alignment > 1) CHECK_THROWS(KvPool{options}, UsageError);
    options.copy_budget = 0;
    CHECK(!KvPool{options}.can_move());
  }
}

}  // namespace

int main() {
  return run_tests({
      {"an idle neighbour makes room", an_idle_neighbour_makes_room},
      {"nothing moves without permission", nothing_moves_without_permission},
      {"the budget bounds the moves of a step", the_budget_bounds_the_moves_of_a_step},
      {"a live move and what it displaces share the budget",
       a_live_move_and_what_it_displaces_share_the_budget},
      {"the budget returns with the next step", the_budget_returns_with_the_next_step},
      {"a blocked tail moves", a_blocked_tail_moves},
      {"a shorter neighbour moves", a_shorter_neighbour_moves},
      {"live ranges move to make room", live_ranges_move_to_make_room},
      {"a scattered hit is gathered", a_scattered_hit_is_gathered},
      {"a shared hit is not gathered", a_shared_hit_is_not_gathered},
      {"shared, just grown and foreign blocks do not move",
       shared_just_grown_and_foreign_blocks_do_not_move},
      {"an immovable neighbour stays", an_immovable_neighbour_stays},
      {"a range that moves twice is told once", a_range_that_moves_twice_is_told_once},
      {"the cap holds for rows that are moved", the_cap_holds_for_rows_that_are_moved},
      {"refuses what makes no sense", refuses_what_makes_no_sense},
  });
}
