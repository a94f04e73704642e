// KvPool: the range cap, and the progress it must not cost. Every call goes to the obvious pool of
// pool_model.hpp as well.
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
using tagma::KvPool;
using tagma::RangeList;
using tagma::RowHandle;
using tagma::UsageError;

void no_row_ever_exceeds_the_cap() {
  for (int32_t cap = 1; cap <= 6; ++cap) {
    for (int32_t num_blocks = 4; num_blocks <= 24; num_blocks += 5) {
      for (int32_t blocks = 1; blocks < num_blocks; ++blocks) {
        PoolPair pair(options_of(num_blocks, cap), book());
        std::vector<Keys> keys;
        shatter(pair, keys);
        const Keys prompt = keys_from(0, num_blocks);
        // Nothing is live: whatever the cache holds, every count up to the pool's size is given.
        CHECK(pair.admit(prompt, {}, demand_of(blocks)) == 0);
        CHECK(pair.rows[0].blocks().num_ranges() <= cap);
        pair.compare();
        pair.drain();
      }
    }
  }
}

void recency_yields_at_half_the_cap_and_only_then() {
  PoolPair pair(options_of(41, 4), book());
  std::vector<Keys> keys;
  shatter(pair, keys);  // 20 idle, 20 holes of one block
  const Keys prompt = keys_from(0, 40);
  CHECK(pair.admit(prompt, {}, demand_of(2)) == 0);  // two holes: two ranges
  CHECK(pair.pool.num_cap_evictions() == 0 && pair.pool.num_evictions() == 0);
  CHECK(pair.admit(prompt, {}, demand_of(3)) == 1);
  CHECK(pair.pool.num_cap_evictions() == 1 && pair.pool.num_evictions() > 0);
  CHECK(pair.rows[1].blocks().num_ranges() == 1);
  pair.compare();
  pair.drain();
}

void the_cap_refuses_only_what_no_eviction_can_help() {
  // Live single blocks at every second place leave nothing but gaps of one.
  PoolPair pair(options_of(20, 3), book());
  const Keys single = keys_from(0, 1);
  for (int i = 0; i < 19; ++i) CHECK(pair.admit(single, {}, demand_of(1)) >= 0);
  for (size_t row = 0; row < pair.rows.size();) {
    if (pair.rows[row].blocks().at(0) % 2 == 0) {
      pair.free(row);
    } else {
      ++row;
    }
  }
  const Keys prompt = keys_from(10, 20);
  CHECK(pair.admit(prompt, {}, demand_of(4)) == -1);
  CHECK(pair.pool.num_cap_refusals() == 1);
  CHECK(pair.pool.allocator().num_free() == 9);  // capacity was there
  const int row = pair.admit(prompt, {}, demand_of(3));
  CHECK(row >= 0 && pair.rows.back().blocks().num_ranges() == 3);
  CHECK(!pair.grow(pair.rows.size() - 1, demand_of(4)));
  CHECK(pair.pool.num_cap_refusals() == 2);
  pair.compare();
  // One neighbour less, and it grows.
  const BlockId tail = pair.rows.back().blocks().tail();
  for (size_t i = 0; i < pair.rows.size(); ++i) {
    if (pair.rows[i].blocks().at(0) == tail + 1 && pair.rows[i].blocks().num_blocks() == 1) {
      pair.free(i);
      break;
    }
  }
  CHECK(pair.grow(pair.rows.size() - 1, demand_of(4)));
  pair.compare();
  pair.drain();
}

// The scheduler's way with a request alone in the pool: admit it with what the cache has of it,
// grow it, publish as it goes; when a step is refused, preempt it and admit it again. It must reach
// the size of the pool, whatever the cap and whatever the cache holds.
void a_request_alone_always_makes_progress() {
  for (int32_t cap = 1; cap <= 6; ++cap) {
    for (const int32_t num_blocks : {3, 6, 11, 24}) {
      for (uint64_t seed = 0; seed < 12; ++seed) {
        PoolPair pair(options_of(num_blocks, cap), small_book());
        std::mt19937_64 random(seed);
        const int32_t goal = num_blocks - 1;
        const Keys keys = keys_from(0, goal);
        const Keys other = keys_from(60, goal);
        // A past that tears its blocks apart: rows of both prompts, grown by turns, freed by
        // chance.
        for (int step = 0; step < 60; ++step) {
          const Keys& prompt = random() % 2 == 0 ? keys : other;
          const size_t row = pair.rows.empty() ? 0 : random() % pair.rows.size();
          if (random() % 3 == 0) {
            const RangeList hit = pair.lookup(prompt, static_cast<int32_t>(random() % goal));
            const int32_t blocks = std::min<int32_t>(hit.num_blocks() + 1 + random() % 2, goal);
            pair.admit(prompt, hit, demand_of(blocks));
          } else if (!pair.rows.empty() && random() % 3 != 0) {
            const int32_t held = pair.rows[row].blocks().num_blocks();
            if (held < goal) pair.grow(row, demand_of(held + 1));
            pair.publish(row, pair.rows[row].blocks().num_blocks());
          } else if (!pair.rows.empty()) {
            pair.free(row);
          }
        }
        // Now alone: all others finish. Of its blocks it needs as many as it ever had and one more,
        // `chunk` of them in a step.
        while (pair.rows.size() > 1) pair.free(pair.rows.size() - 1);
        const int32_t chunk = 1 + static_cast<int32_t>(seed % 3);
        int32_t reached = 0;
        int preemptions = 0;
        for (int step = 0; reached < goal; ++step) {
          CHECK(step < 10 * goal);
          pair.begin_step();
          int32_t held = 0;
          if (pair.rows.empty()) {
            const RangeList hit = pair.lookup(keys, std::max(reached - 1, 0));
            Demand demand = demand_of(std::min(hit.num_blocks() + chunk, goal));
            demand.prompt = std::min(reached + 1, goal);
            CHECK(pair.admit(keys, hit, demand) == 0);
          } else {
            held = pair.rows[0].blocks().num_blocks();
            if (!pair.grow(0, demand_of(std::min(held + chunk, goal)))) {
              pair.free(0);
              // Admitted while alone, it is never refused again.
              CHECK(++preemptions == 1);
            }
          }
          pair.end_scheduling();
          if (pair.rows.empty()) continue;
          held = pair.rows[0].blocks().num_blocks();
          reached = std::max(reached, held);
          pair.publish(0, held);
          pair.compare();
        }
        pair.drain();
      }
    }
  }
}

void a_hit_is_cut_where_the_rest_might_not_fit_under_the_cap() {
  PoolPair pair(options_of(40, 5), book());
  const Keys keys = keys_from(0, 30);
  // Publishes one block of the prompt per row, at every second address.
  std::vector<Keys> singles;
  for (int i = 0; i < 30; ++i) singles.push_back(keys_from(i, 1));
  const Keys spacer = keys_from(900, 1);
  for (int i = 0; i < 10; ++i) {
    cached_row(pair, singles[static_cast<size_t>(i)], 1);
    CHECK(pair.admit(spacer, {}, demand_of(1)) >= 0);
  }
  const RangeList hit = pair.lookup(keys, 30);
  CHECK(hit.num_ranges() <= 2);
  pair.compare();
  pair.drain();
}

void refuses_a_cap_below_one() {
  CHECK_THROWS(KvPool(options_of(10, 0)), UsageError);
  CHECK_THROWS(KvPool(options_of(10, -1)), UsageError);
  CHECK_THROWS(KvPool(options_of(1)), UsageError);
}

}  // namespace

int main() {
  return run_tests({
      {"no row ever exceeds the cap", no_row_ever_exceeds_the_cap},
      {"recency yields at half the cap, and only then",
       recency_yields_at_half_the_cap_and_only_then},
      {"the cap refuses only what no eviction can help",
       the_cap_refuses_only_what_no_eviction_can_help},
      {"a request alone always makes progress", a_request_alone_always_makes_progress},
      {"a hit is cut where the rest might not fit under the cap",
       a_hit_is_cut_where_the_rest_might_not_fit_under_the_cap},
      {"refuses a cap below one", refuses_a_cap_below_one},
  });
}
