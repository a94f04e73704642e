// KvPool: pinned blocks stay where they are, with what is in them, whoever lets go of them. Every
// call goes to the obvious pool of pool_model.hpp as well.
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
using tagma::PinHandle;
using tagma::RangeList;
using tagma::UsageError;

PoolOptions moving(int32_t num_blocks, Compaction mode) {
  PoolOptions options = options_of(num_blocks);
  options.compaction = mode;
  options.copy_budget = 1000;
  return options;
}

bool is_free(PoolPair& pair, BlockId block) {
  return pair.pool.allocator().request_refs(block) == 0;
}

// Freed, preempted or evicted by id: a pinned block is not given to others until it is unpinned.
void whoever_lets_go_a_pinned_block_stays() {
  const Keys keys = keys_from(0, 8);
  const Keys other = keys_from(50, 8);
  for (const int way : {0, 1, 2}) {
    PoolPair pair(options_of(9), small_book());
    pair.begin_step();
    const size_t row = cached_row(pair, keys, 4);
    pair.pin(row, 0, 1, 3);
    if (way == 0) {
      pair.end_scheduling();  // finished
    } else if (way == 2) {
      pair.evict({1, 2, 3, 4});
    }
    pair.free(row);  // way 1: preempted
    pair.compare();
    CHECK(pair.lookup(keys, 4).num_blocks() == (way == 0 ? 4 : 0));
    // Six blocks are left of eight.
    CHECK(pair.admit(other, {}, demand_of(7)) == -1);
    CHECK(pair.admit(other, {}, demand_of(6)) == 0);
    for (const BlockId b : BlockModel::ids(pair.rows[0].blocks())) CHECK(b != 2 && b != 3);
    CHECK(!pair.grow(0, demand_of(7)));
    pair.compare();
    pair.unpin(0);
    CHECK(pair.grow(0, demand_of(8)));
    pair.compare();
    pair.drain();
  }
}

void pins_on_one_block_count() {
  PoolPair pair(options_of(9), small_book());
  const Keys keys = keys_from(0, 8);
  const size_t row = cached_row(pair, keys, 4);
  const size_t first = pair.pin(row, 0, 0, 4);
  pair.pin(row, 0, 2, 3);
  pair.free(row);
  pair.pin(pair.lookup(keys, 4));
  CHECK(pair.pins.size() == 3 && pair.pool.pins().num_blocks() == 4);
  CHECK(pair.pool.allocator().request_refs(3) == 3);
  pair.unpin(first);
  pair.compare();
  CHECK(!is_free(pair, 1));
  pair.unpin(1);
  pair.compare();
  CHECK(is_free(pair, 1) && !is_free(pair, 3) && pair.pool.pins().num_blocks() == 1);
  pair.unpin(0);
  CHECK(is_free(pair, 3));
  CHECK(pair.lookup(keys, 4).num_blocks() == 4);  // hittable all the time
  pair.drain();
}

// Unpinned, a cached chain is evicted from its end, after what was idle before.
void unpinned_blocks_are_the_newest_idle_ones() {
  PoolPair pair(options_of(9), small_book());
  const Keys keys = keys_from(0, 8);
  const Keys other = keys_from(50, 8);
  pair.free(cached_row(pair, keys, 3));
  pair.pin(pair.lookup(keys, 3));
  pair.free(cached_row(pair, other, 2));
  pair.unpin(0);
  CHECK((pair.blocks.lru() == std::vector<BlockId>{5, 4, 3, 2, 1}));
  pair.compare();
  pair.drain();
}

// Whoever unpins the tail of a row leaves its wish for room to grow.
void a_wish_for_room_outlives_a_pin() {
  PoolPair pair(options_of(30), small_book());
  const Keys keys = keys_from(0, 8);
  tagma::Demand hopeful = demand_of(4);
  hopeful.limit = 10;
  const int row = pair.admit(keys, {}, hopeful);
  CHECK(pair.pool.allocator().headroom_behind(4) > 0);
  const int32_t wish = pair.pool.allocator().headroom_behind(4);
  pair.unpin(pair.pin(static_cast<size_t>(row), 0, 2, 4));
  CHECK(pair.pool.allocator().headroom_behind(4) == wish);
  pair.drain();
}

void a_pinned_block_can_be_hit() {
  PoolPair pair(options_of(9), small_book());
  const Keys keys = keys_from(0, 8);
  pair.free(cached_row(pair, keys, 3));
  pair.pin(pair.lookup(keys, 2));
  // The hit takes one block from the free ones, not three.
  CHECK(pair.admit(keys, pair.lookup(keys, 3), demand_of(8)) == 0);
  pair.unpin(0);
  pair.compare();
  pair.free(0);
  pair.drain();
}

void nothing_is_reset_while_a_pin_is_held() {
  PoolPair pair(options_of(9), small_book());
  const Keys keys = keys_from(0, 8);
  pair.free(cached_row(pair, keys, 3));
  pair.pin(pair.lookup(keys, 1));
  CHECK(!pair.reset());
  CHECK(pair.lookup(keys, 3).num_blocks() == 3);
  // Even if it is not cached any more.
  pair.evict({1});
  CHECK(!pair.reset());
  pair.unpin(0);
  CHECK(pair.reset());
  pair.compare();
  pair.drain();
}

void what_cannot_be_pinned_is_refused_and_changes_nothing() {
  PoolPair pair(options_of(12, 256), book());
  const Keys keys = keys_from(0, 8);
  const size_t row = cached_row(pair, keys, 4);
  RangeList half_free({4, 2});
  RangeList twice({2, 1});
  twice.append({2, 1});
  for (const RangeList& bad : {half_free, twice, RangeList({5, 1}), RangeList({11, 2})}) {
    CHECK_THROWS(pair.pool.pin(bad), UsageError);
    pair.compare();
  }
  CHECK_THROWS(pair.pool.pin(pair.rows[row].handle, 0, -1, 2), UsageError);
  CHECK_THROWS(pair.pool.pin(pair.rows[row].handle, 0, 3, 2), UsageError);
  CHECK_THROWS(pair.pool.pin(pair.rows[row].handle, 0, 0, 5), UsageError);
  for (const PinHandle bad : {PinHandle{0}, PinHandle{-1}, PinHandle{1}}) {
    CHECK_THROWS(pair.pool.unpin(bad), UsageError);
  }
  // Nothing at all, and null blocks, can be: there is something to unpin.
  pair.pin(row, 0, 2, 2);
  pair.pin(RangeList({tagma::kNullBlock, 3}));
  CHECK(pair.pool.pins().size() == 2 && pair.pool.pins().num_blocks() == 0);
  pair.compare();
  // A handle is never used again.
  const PinHandle gone = pair.pins[0].handle;
  pair.unpin(0);
  pair.pin(row, 0, 0, 1);
  CHECK(pair.pins.back().handle != gone);
  CHECK_THROWS(pair.pool.unpin(gone), UsageError);
  while (!pair.pins.empty()) pair.unpin(0);
  pair.pin(row, 0, 0, 1);
  CHECK(pair.pins.back().handle != gone);
  pair.compare();
  pair.drain();
}

// Aligned pools pin what they give.
void aligned_pools_pin_whole_units() {
  PoolPair pair(options_of(26, 256, 4), book());
  const Keys keys = keys_from(0, 24);
  CHECK(pair.admit(keys, {}, demand_of(8)) == 0);
  CHECK_THROWS(pair.pool.pin(pair.rows[0].handle, 0, 1, 5), UsageError);
  pair.pin(0, 0, 4, 8);
  pair.free(0);
  pair.compare();
  CHECK(pair.admit(keys, {}, demand_of(20)) == -1);
  CHECK(pair.admit(keys, {}, demand_of(16)) == 0);
  pair.compare();
  pair.drain();
}

// Row [1, 9), and a neighbour [9, 13), idle or live, of which one block or none is pinned.
void pinned_blocks_do_not_move() {
  for (const Compaction mode : {Compaction::kIdle, Compaction::kLive}) {
    for (const bool idle : {false, true}) {
      for (int32_t pinned = -1; pinned < 4; ++pinned) {
        std::mt19937_64 random(1);
        PoolPair pair(moving(30, mode), small_book());
        const Keys keys = keys_from(0, 20);
        const Keys other = keys_from(50, 20);
        pair.begin_step();
        CHECK(pair.admit(keys, {}, demand_of(8)) == 0);
        const size_t second = cached_row(pair, other, 4);
        pair.execute(random);
        if (idle) pair.free(second);
        if (pinned >= 0) pair.pin(pair.lookup(other, 4).slice(pinned, pinned + 1));
        pair.begin_step();
        CHECK(pair.grow(0, demand_of(12)));
        const RangeList now = pair.lookup(other, 4);
        if (pinned >= 0) CHECK(now.at(pinned) == 9 + pinned);
        if (!idle && pinned >= 0) CHECK(now.num_ranges() == 1);
        // Live, the row could move as well; the shorter neighbour is cheaper.
        if (pinned < 0) CHECK((now.at(0) != 9) == (idle || mode == Compaction::kLive));
        if (!idle && pinned >= 0) CHECK(!pair.relocate(second, 0, 4));
        pair.execute(random);
        pair.compare();
        pair.drain();
      }
    }
  }
}

// A window over a pinned range is not made free by moving others: make_room() looks for another.
void room_is_made_around_pins() {
  for (BlockId pinned = 1; pinned < 21; ++pinned) {
    std::mt19937_64 random(1);
    PoolPair pair(moving(21, Compaction::kLive), book());
    std::vector<Keys> prompts;
    for (int i = 0; i < 11; ++i) prompts.push_back(keys_from(50 * i, 20));
    pair.begin_step();
    for (size_t i = 0; i < 10; ++i) CHECK(pair.admit(prompts[i], {}, demand_of(2)) >= 0);
    for (size_t i = 0; i < 10; ++i) pair.publish(i, 2);
    pair.execute(random);
    pair.pin(RangeList({pinned, 1}));
    for (size_t i = 9; i < 10; i -= 2) {
      pair.evict(BlockModel::ids(pair.rows[i].blocks()));
      pair.free(i);
    }
    pair.compare();
    pair.begin_step();
    CHECK(pair.admit(prompts[10], {}, demand_of(5)) >= 0);
    pair.execute(random);  // its worker watches the pinned block
    pair.compare();
    pair.begin_step();
    CHECK(pair.grow(pair.rows.size() - 1, demand_of(7)));
    pair.execute(random);
    pair.compare();
    pair.drain();
  }
}

// A scattered hit is gathered only as far as nobody pinned it.
void a_pinned_hit_is_not_gathered() {
  for (const bool pinned : {false, true}) {
    std::mt19937_64 random(1);
    PoolPair pair(moving(41, Compaction::kIdle), small_book());
    const Keys keys = keys_from(0, 20);
    const Keys spacer = keys_from(90, 1);
    std::vector<Keys> singles;
    for (int i = 0; i < 6; ++i) singles.push_back(keys_from(i, 1));
    pair.begin_step();
    for (const Keys& single : singles) {
      cached_row(pair, single, 1);
      CHECK(pair.admit(spacer, {}, demand_of(1)) >= 0);
    }
    pair.execute(random);
    while (!pair.rows.empty()) pair.free(0);
    if (pinned) pair.pin(pair.lookup(keys, 6));
    pair.begin_step();
    CHECK(pair.admit(keys, pair.lookup(keys, 6), demand_of(8)) == 0);
    CHECK((pair.rows[0].blocks().num_ranges() == 1) == !pinned);
    pair.execute(random);
    pair.compare();
    pair.drain();
  }
}

// Every short sequence of calls, with pins among them, on tiny pools; moving ones execute steps.
void every_short_sequence_with_pins(int32_t num_blocks, Compaction mode, int depth) {
  const Keys prompts[] = {keys_from(0, 8), keys_from(100, 8)};
  Choices choices;
  int64_t sequences = 0;
  do {
    std::mt19937_64 random(1);
    PoolPair pair(mode == Compaction::kOff ? options_of(num_blocks) : moving(num_blocks, mode),
                  small_book());
    pair.begin_step();
    for (int step = 0; step < depth; ++step) {
      const int rows = static_cast<int>(pair.rows.size());
      const int pins = static_cast<int>(pair.pins.size());
      const int choice = choices.choose(4 + 3 * rows + pins);
      if (!pair.scheduling && choice >= 1) pair.begin_step();
      if (choice == 0) {
        pair.scheduling ? pair.execute(random) : pair.begin_step();
      } else if (choice < 3) {  // the longest hit and two blocks more, all published
        const Keys& keys = prompts[choice - 1];
        const RangeList hit = pair.lookup(keys, 7);
        const int row = pair.admit(keys, hit, demand_of(std::min(hit.num_blocks() + 2, 8)));
        if (row >= 0)
          pair.publish(static_cast<size_t>(row), pair.rows.back().blocks().num_blocks());
      } else if (choice == 3) {
        pair.pin(pair.lookup(prompts[0], 2));
      } else if (choice < 4 + 3 * rows) {
        const auto row = static_cast<size_t>((choice - 4) / 3);
        const int32_t held = pair.rows[row].blocks().num_blocks();
        switch ((choice - 4) % 3) {
          case 0:
            pair.grow(row, demand_of(held + 1));
            break;
          case 1:
            pair.pin(row, 0, held / 2, held);
            break;
          default:
            if (pair.may_be_preempted(row)) pair.free(row);
        }
      } else {
        pair.unpin(static_cast<size_t>(choice - 4 - 3 * rows));
      }
      if (choices.fresh()) pair.compare();
    }
    pair.execute(random);
    pair.drain();
    ++sequences;
  } while (choices.next());
  std::printf("  %d blocks, %d steps: %lld sequences\n", num_blocks, depth,
              static_cast<long long>(sequences));
}

void every_short_sequence() {
  for (const Compaction mode : {Compaction::kOff, Compaction::kIdle, Compaction::kLive}) {
    every_short_sequence_with_pins(5, mode, 5);
    every_short_sequence_with_pins(8, mode, 5);
  }
}

}  // namespace

int main() {
  return run_tests({
      {"whoever lets go, a pinned block stays", whoever_lets_go_a_pinned_block_stays},
      {"pins on one block count", pins_on_one_block_count},
      {"unpinned blocks are the newest idle ones", unpinned_blocks_are_the_newest_idle_ones},
      {"a wish for room outlives a pin", a_wish_for_room_outlives_a_pin},
      {"a pinned block can be hit", a_pinned_block_can_be_hit},
      {"nothing is reset while a pin is held", nothing_is_reset_while_a_pin_is_held},
      {"what cannot be pinned is refused and changes nothing",
       what_cannot_be_pinned_is_refused_and_changes_nothing},
      {"aligned pools pin whole units", aligned_pools_pin_whole_units},
      {"pinned blocks do not move", pinned_blocks_do_not_move},
      {"room is made around pins", room_is_made_around_pins},
      {"a pinned hit is not gathered", a_pinned_hit_is_not_gathered},
      {"every short sequence", every_short_sequence},
  });
}
