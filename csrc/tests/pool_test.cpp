// KvPool: the capacity rule, preemption, reset and handles (the range cap: pool_cap_test.cpp).
// Every call goes to the obvious pool of pool_model.hpp as well.
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/check.hpp"
#include "tests/exhaustive.hpp"
#include "tests/pool_fixtures.hpp"
#include "tests/pool_model.hpp"

namespace {

using tagma::BlockId;
using tagma::Demand;
using tagma::KvPool;
using tagma::PoolOptions;
using tagma::RangeList;
using tagma::RowHandle;
using tagma::UsageError;

void capacity_gate_watermark_and_reserve_add_up() {
  const Keys keys = keys_from(0, 30);
  for (int32_t live = 0; live <= 4; ++live) {
    for (int32_t idle = 0; idle <= 4; ++idle) {
      for (int32_t hits = 0; hits <= idle; ++hits) {
        for (int32_t blocks = 0; blocks <= 10; ++blocks) {
          for (int32_t extra = 0; extra < 27; ++extra) {
            PoolPair pair(options_of(10), small_book());
            const Keys other = keys_from(100, 9);
            if (live > 0) CHECK(pair.admit(other, {}, demand_of(live)) == 0);
            if (idle > 0) pair.free(cached_row(pair, keys, idle));
            Demand demand = demand_of(blocks);
            demand.gate = extra % 3 == 0 ? 0 : blocks + 2 * (extra % 3) - 2;
            demand.watermark = extra / 3 % 3;
            demand.reserved = extra / 9;
            // PoolPair predicts the answer from the same rule; here it is spelt out once more.
            const int32_t free = 9 - live;
            const int32_t new_blocks = std::max(blocks - hits, 0);
            const int32_t new_gate = std::max(demand.gate - hits, 0);
            const bool fits = (demand.gate == 0 || new_gate + hits + demand.watermark <= free) &&
                              new_blocks + hits + demand.watermark + demand.reserved <= free;
            const RangeList hit = pair.lookup(keys, hits);
            CHECK(hit.num_blocks() == hits);
            const int row = pair.admit(keys, hit, demand);
            CHECK((row >= 0) == fits);
            if (fits) {
              CHECK(pair.rows.back().blocks().num_blocks() == std::max(blocks, hits));
            }
            pair.compare();
          }
        }
      }
    }
  }
}

void grow_keeps_to_the_same_rule_and_never_shrinks() {
  for (int32_t held = 1; held <= 5; ++held) {
    for (int32_t blocks = 0; blocks <= 12; ++blocks) {
      for (int32_t reserved = 0; reserved <= 3; ++reserved) {
        PoolPair pair(options_of(10), small_book());
        const Keys keys = keys_from(0, 12);
        CHECK(pair.admit(keys, {}, demand_of(held)) == 0);
        Demand demand = demand_of(blocks);
        demand.reserved = reserved;
        const bool fits = std::max(blocks - held, 0) + reserved <= 9 - held;
        CHECK(pair.grow(0, demand) == fits);
        CHECK(pair.rows[0].blocks().num_blocks() == (fits ? std::max(held, blocks) : held));
        pair.compare();
        pair.drain();
      }
    }
  }
}

void malformed_demands_are_refused_and_change_nothing() {
  PoolPair pair(options_of(10), book());
  const Keys keys = keys_from(0, 9);
  cached_row(pair, keys, 3);
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  RangeList added;
  for (int field = 0; field < 6; ++field) {
    Demand demand = demand_of(4);
    int32_t* const fields[] = {&demand.blocks,   &demand.gate,   &demand.watermark,
                               &demand.reserved, &demand.prompt, &demand.limit};
    for (const int32_t bad : {-1, std::numeric_limits<int32_t>::min()}) {
      *fields[field] = bad;
      CHECK_THROWS(pair.pool.admit({}, demand, added), UsageError);
      CHECK_THROWS(pair.pool.grow(pair.rows[0].handle, demand, added), UsageError);
    }
  }
  // The largest numbers are no error, only never met; their sums do not wrap around.
  for (int mask = 1; mask < 16; ++mask) {
    Demand demand = demand_of((mask & 1) != 0 ? kMax : 4);
    demand.gate = (mask & 2) != 0 ? kMax : 0;
    demand.watermark = (mask & 4) != 0 ? kMax : 0;
    demand.reserved = (mask & 8) != 0 ? kMax : 0;
    CHECK(pair.admit(keys, {}, demand) == -1);
    CHECK(!pair.grow(0, demand));
  }
  Demand hopeful = demand_of(4);
  hopeful.prompt = kMax;
  hopeful.limit = kMax;
  CHECK(pair.grow(0, hopeful));
  CHECK(pair.admit(keys, {}, hopeful) >= 0);
  pair.compare();
  pair.drain();
}

void stale_hits_are_refused_and_change_nothing() {
  PoolPair pair(options_of(10), book());
  const Keys keys = keys_from(0, 9);
  const size_t row = cached_row(pair, keys, 4);
  const RangeList hit = pair.lookup(keys, 4);
  RangeList added;
  // Evicted while its owner still runs: the block is live, and not the cache's any more.
  pair.evict({hit.at(2)});
  CHECK_THROWS(pair.pool.admit(hit, demand_of(5), added), UsageError);
  pair.compare();
  // Freed, evicted and given to somebody else.
  pair.free(row);
  const Keys other = keys_from(100, 9);
  CHECK(pair.admit(other, {}, demand_of(9)) == 0);
  CHECK_THROWS(pair.pool.admit(hit, demand_of(5), added), UsageError);
  pair.compare();
  pair.free(0);
  // In holes.
  CHECK_THROWS(pair.pool.admit(hit, demand_of(5), added), UsageError);
  // Forged: foreign, twice the same block, more ranges than a row may have.
  cached_row(pair, keys, 4);
  RangeList twice;
  twice.append({hit.at(0), 1});
  twice.append({hit.at(0), 1});
  RangeList foreign;
  foreign.append({9, 2});
  CHECK_THROWS(pair.pool.admit(twice, demand_of(5), added), UsageError);
  CHECK_THROWS(pair.pool.admit(foreign, demand_of(5), added), UsageError);
  CHECK(added.empty());
  pair.compare();
  pair.drain();
}

void what_a_preempted_request_published_in_that_step_is_not_hittable() {
  PoolPair pair(options_of(20), book());
  const Keys keys = keys_from(0, 19);
  pair.begin_step();
  const size_t row = cached_row(pair, keys, 3);
  pair.end_scheduling();
  pair.begin_step();
  CHECK(pair.grow(row, demand_of(6)));
  pair.publish(row, 5);
  CHECK(pair.grow(row, demand_of(8)));
  pair.publish(row, 7);  // twice in one step
  CHECK(pair.lookup(keys, 19).num_blocks() == 7);
  pair.free(row);
  CHECK(pair.lookup(keys, 19).num_blocks() == 3);  // written in the step before: stays
  pair.compare();
  // The same after the scheduler has decided: the step runs, the blocks are written.
  pair.end_scheduling();
  pair.begin_step();
  const RangeList hit = pair.lookup(keys, 3);
  CHECK(pair.admit(keys, hit, demand_of(6)) == 0);
  pair.publish(0, 6);
  pair.end_scheduling();
  pair.free(0);
  CHECK(pair.lookup(keys, 19).num_blocks() == 6);
  // A later step: what was published before it stays too.
  CHECK(pair.admit(keys, pair.lookup(keys, 6), demand_of(8)) == 0);
  pair.publish(0, 8);
  pair.begin_step();
  pair.free(0);
  CHECK(pair.lookup(keys, 19).num_blocks() == 8);
  pair.compare();
  pair.drain();
}

void lookup_has_no_side_effect() {
  PoolPair pair(options_of(12), book());
  const Keys keys = keys_from(0, 6);
  const Keys other = keys_from(100, 3);
  pair.free(cached_row(pair, keys, 4));
  pair.free(cached_row(pair, other, 3));
  const std::vector<BlockId> before = pair.blocks.lru();
  for (int i = 0; i < 5; ++i) CHECK(pair.lookup(keys, 6).num_blocks() == 4);
  pair.compare();
  CHECK(pair.pool.allocator().lru_victim() == before.front());
  pair.drain();  // evicts in the order that the model, which looked up nothing, expects
}

void reset_waits_for_the_last_request() {
  PoolPair pair(options_of(12), book());
  const Keys keys = keys_from(0, 6);
  CHECK(pair.reset());
  cached_row(pair, keys, 4);
  CHECK(!pair.reset());
  CHECK(pair.lookup(keys, 6).num_blocks() == 4);
  pair.free(0);
  CHECK(pair.reset());
  CHECK(pair.lookup(keys, 6).empty());
  pair.compare();
  // The pool works on, with the same length of hash.
  pair.free(cached_row(pair, keys, 4));
  CHECK(pair.lookup(keys, 6).num_blocks() == 4);
  CHECK_THROWS(pair.pool.set_key_bytes(16), UsageError);
  pair.drain();
}

void evict_withdraws_and_leaves_references() {
  PoolPair pair(options_of(12), book());
  const Keys keys = keys_from(0, 6);
  const size_t row = cached_row(pair, keys, 4);
  const BlockId second = pair.rows[row].blocks().at(1);
  pair.evict({second, second});
  CHECK(pair.lookup(keys, 6).num_blocks() == 1);
  CHECK(pair.pool.allocator().request_refs(second) == 1);
  CHECK_THROWS(pair.pool.evict({pair.rows[row].blocks().at(0), 12}), UsageError);
  CHECK_THROWS(pair.pool.evict({pair.rows[row].blocks().at(0), 0}), UsageError);
  CHECK(pair.lookup(keys, 6).num_blocks() == 1);  // nothing happened to the valid id either
  pair.compare();
  pair.drain();
}

void closed_handles_stay_closed_when_their_slot_is_used_again() {
  KvPool pool(options_of(10));
  RangeList added;
  std::vector<RowHandle> old;
  for (int i = 0; i < 50; ++i) {
    const RowHandle row = pool.admit({}, demand_of(2), added);
    CHECK(row > 0);
    for (const RowHandle stale : old) {
      CHECK(stale != row);
      CHECK_THROWS(pool.free(stale), UsageError);
      CHECK_THROWS(pool.row_blocks(stale), UsageError);
    }
    // Neighbouring bits are no alias.
    for (int bit = 0; bit < 63; ++bit) {
      CHECK_THROWS(pool.row_blocks(row ^ (RowHandle{1} << bit)), UsageError);
    }
    CHECK(pool.row_blocks(row).num_blocks() == 2);
    pool.free(row);
    CHECK_THROWS(pool.free(row), UsageError);
    old.push_back(row);
  }
  for (const RowHandle bad : {RowHandle{0}, RowHandle{-1}, std::numeric_limits<RowHandle>::min(),
                              std::numeric_limits<RowHandle>::max()}) {
    CHECK_THROWS(pool.free(bad), UsageError);
  }
  CHECK(pool.num_rows() == 0);
  pool.check_invariants();
}

void aligned_pools_keep_the_contract_and_cache_nothing() {
  PoolPair pair(options_of(26, 256, 4), book());
  const Keys keys = keys_from(0, 24);
  RangeList added;
  CHECK(pair.blocks.capacity() == 20);
  for (const int32_t bad : {1, 2, 3, 5}) {
    CHECK_THROWS(pair.pool.admit({}, demand_of(bad), added), UsageError);
  }
  CHECK(pair.admit(keys, {}, demand_of(8)) == 0);
  CHECK_THROWS(pair.pool.grow(pair.rows[0].handle, demand_of(9), added), UsageError);
  const auto key_at = [](int32_t i) { return book()[i]; };
  CHECK_THROWS(pair.pool.publish(pair.rows[0].handle, 0, 4, key_at), UsageError);
  CHECK(pair.pool.index().size() == 0);
  pair.compare();
  CHECK(pair.grow(0, demand_of(20)));
  CHECK(!pair.grow(0, demand_of(24)));
  pair.drain();
}

void headroom_learns_and_never_goes_below_zero() {
  KvPool pool(options_of(1000));
  const int32_t initial = pool.headroom_blocks();
  RangeList added;
  for (int i = 0; i < 300; ++i) {
    const RowHandle row = pool.admit({}, demand_of(4), added);
    CHECK(pool.grow(row, demand_of(44), added));
    pool.free(row);
  }
  CHECK(pool.headroom_blocks() >= 40 && pool.headroom_blocks() <= 60);
  CHECK(pool.headroom_blocks() > initial);
  // Aborted inside a prompt that comes in chunks: grown by nothing, not by less than nothing. So
  // many that they outvote the others.
  for (int i = 0; i < 1300; ++i) {
    Demand demand = demand_of(1);
    demand.prompt = 500;
    pool.free(pool.admit({}, demand, added));
    CHECK(pool.headroom_blocks() >= 0);
  }
  CHECK(pool.headroom_blocks() == 0);
}

// Every short sequence of calls on tiny pools under tiny caps.
void every_short_sequence_on_tiny_pools() {
  struct Size {
    int32_t num_blocks;
    int32_t cap;
    int depth;
  };
  const Keys prompts[] = {keys_from(0, 8), keys_from(100, 8)};
  for (const Size size :
       {Size{3, 1, 5}, Size{4, 2, 5}, Size{5, 3, 4}, Size{7, 3, 4}, Size{8, 2, 4}}) {
    Choices choices;
    int64_t sequences = 0;
    do {
      PoolPair pair(options_of(size.num_blocks, size.cap), small_book());
      for (int step = 0; step < size.depth; ++step) {
        const int rows = static_cast<int>(pair.rows.size());
        const int choice = choices.choose(4 + 4 * rows + 2);
        if (choice < 4) {  // the longest hit and one or three blocks more, of either prompt
          const Keys& keys = prompts[choice % 2];
          const RangeList hit = pair.lookup(keys, 7);
          pair.admit(keys, hit, demand_of(hit.num_blocks() + (choice < 2 ? 1 : 3)));
        } else if (choice < 4 + 4 * rows) {
          const auto row = static_cast<size_t>((choice - 4) / 4);
          const int32_t held = pair.rows[row].blocks().num_blocks();
          switch ((choice - 4) % 4) {
            case 0:
              pair.grow(row, demand_of(held + 1));
              break;
            case 1:
              pair.grow(row, demand_of(held + 2));
              break;
            case 2:
              pair.publish(row, std::min(held, 8));
              break;
            default:
              pair.free(row);
          }
        } else if (choice == 4 + 4 * rows) {
          pair.scheduling ? pair.end_scheduling() : pair.begin_step();
        } else {
          pair.evict({1});
        }
        if (choices.fresh()) pair.compare();
      }
      pair.drain();
      ++sequences;
    } while (choices.next());
    std::printf("  %d blocks, cap %d, %d steps: %lld sequences\n", size.num_blocks, size.cap,
                size.depth, static_cast<long long>(sequences));
  }
}

}  // namespace

int main() {
  return run_tests({
      {"capacity, gate, watermark and reserve add up", capacity_gate_watermark_and_reserve_add_up},
      {"grow keeps to the same rule and never shrinks",
       grow_keeps_to_the_same_rule_and_never_shrinks},
      {"malformed demands are refused and change nothing",
       malformed_demands_are_refused_and_change_nothing},
      {"stale hits are refused and change nothing", stale_hits_are_refused_and_change_nothing},
      {"what a preempted request published in that step is not hittable",
       what_a_preempted_request_published_in_that_step_is_not_hittable},
      {"lookup has no side effect", lookup_has_no_side_effect},
      {"reset waits for the last request", reset_waits_for_the_last_request},
      {"evict withdraws and leaves references", evict_withdraws_and_leaves_references},
      {"closed handles stay closed when their slot is used again",
       closed_handles_stay_closed_when_their_slot_is_used_again},
      {"aligned pools keep the contract and cache nothing",
       aligned_pools_keep_the_contract_and_cache_nothing},
      {"headroom learns and never goes below zero", headroom_learns_and_never_goes_below_zero},
      {"every short sequence on tiny pools", every_short_sequence_on_tiny_pools},
  });
}
