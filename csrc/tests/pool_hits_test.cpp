// KvPool with several KV-cache groups: what is found of a prompt, for each kind of group, and what
// is withdrawn. Every call goes to the obvious pool of pool_model.hpp as well.
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
using tagma::GroupSpec;
using tagma::RangeList;

using Groups = std::vector<GroupSpec>;

// Each choice of what is cached of a prompt of seven blocks, for each kind, window and alignment:
// PoolPair compares with vLLM's own loops.
void every_pattern_of_cached_blocks_is_looked_up_as_vllm_does() {
  constexpr int32_t kBlocks = 7;
  const Keys keys = keys_from(0, kBlocks);
  Groups specs;
  for (int32_t align = 1; align <= 3; ++align) {
    specs.push_back(full_group(align));
    specs.push_back(state_group(align));
    for (int32_t window = 1; window <= 4; ++window) specs.push_back(window_group(window, align));
  }
  for (int32_t chunk = 1; chunk <= 4; ++chunk) specs.push_back(chunk_group(chunk));
  int32_t longest = 0;
  for (int mask = 0; mask < 1 << kBlocks; ++mask) {
    PoolPair pair(options_of(kBlocks * static_cast<int32_t>(specs.size()) + 1, specs, 1000),
                  small_book());
    const auto groups = static_cast<int32_t>(specs.size());
    CHECK(admit_groups(pair, keys, std::vector<int32_t>(specs.size(), kBlocks)) == 0);
    std::vector<BlockId> missing;
    for (int32_t g = 0; g < groups; ++g) {
      pair.publish(0, kBlocks, g);
      for (int32_t i = 0; i < kBlocks; ++i) {
        if ((mask >> i & 1) == 0)
          missing.push_back(pair.rows[0].blocks(static_cast<size_t>(g)).at(i));
      }
    }
    pair.evict(missing);
    for (int32_t g = 0; g < groups; ++g) {
      for (int32_t most = 0; most <= kBlocks; ++most) {
        const RangeList hit = pair.lookup(g, keys, most);
        CHECK(hit.num_blocks() % specs[static_cast<size_t>(g)].align_blocks == 0);
        longest = std::max(longest, hit.num_blocks());
      }
    }
  }
  CHECK(longest == kBlocks);
}

// Named for what was wrong: a prefix group ignored the alignment.
void prefix_hits_end_where_another_groups_block_ends() {
  PoolPair pair(options_of(40, {full_group(3), window_group(2, 3)}), small_book());
  const Keys keys = keys_from(0, 8);
  CHECK(admit_groups(pair, keys, {8, 8}) == 0);
  pair.publish(0, 8, 0);
  pair.publish(0, 8, 1);
  for (int32_t most = 0; most <= 8; ++most) {
    CHECK(pair.lookup(0, keys, most).num_blocks() == most / 3 * 3);
    CHECK(pair.lookup(1, keys, most).num_blocks() == most / 3 * 3);
  }
  pair.drain();
}

// A window or state is found behind null blocks; they are no part of the pool.
void hits_of_windows_and_states_begin_with_null_blocks() {
  PoolPair pair(options_of(40, {full_group(), window_group(2), state_group()}), small_book());
  const Keys keys = keys_from(0, 9);
  CHECK(admit_groups(pair, keys, {6, 6, 6}) == 0);
  for (int32_t g = 0; g < 3; ++g) pair.publish(0, 6, g);
  pair.free(0);
  const std::vector<RangeList> hits = pair.common_hit(keys, 9);
  for (const RangeList& hit : hits) CHECK(hit.num_blocks() == 6);
  CHECK(hits[0].num_leading_nulls() == 0 && hits[1].num_leading_nulls() == 4 &&
        hits[2].num_leading_nulls() == 5);
  CHECK(pair.admit(keys, hits, needs_of({8, 8, 8}), {}) == 0);
  CHECK(pair.blocks.num_live() == 6 + 2 + 1 + 3 * 2);
  CHECK(pair.pool.row_ranges().total == 3 + (pair.rows[0].blocks(0).num_ranges() - 1) +
                                            (pair.rows[0].blocks(1).num_ranges() - 2) +
                                            (pair.rows[0].blocks(2).num_ranges() - 2));
  for (int32_t g = 0; g < 3; ++g) CHECK(pair.pool.num_published(pair.rows[0].handle, g) == 6);
  pair.compare();
  pair.drain();
}

// One prompt in all groups, and each finds its own blocks.
void groups_do_not_find_each_others_blocks() {
  PoolPair pair(options_of(40, {full_group(), full_group(), window_group(1)}), small_book());
  const Keys keys = keys_from(0, 8);
  CHECK(admit_groups(pair, keys, {4, 4, 4}) == 0);
  pair.publish(0, 3, 1);
  CHECK(pair.lookup(0, keys, 8).empty() && pair.lookup(2, keys, 8).empty());
  CHECK(pair.lookup(1, keys, 8).ranges() == pair.rows[0].blocks(1).slice(0, 3).ranges());
  pair.publish(0, 2, 0);
  CHECK(pair.lookup(0, keys, 8).ranges() == pair.rows[0].blocks(0).slice(0, 2).ranges());
  CHECK(pair.pool.index().num_keys() == 5);
  pair.compare();
  pair.evict({pair.rows[0].blocks(1).at(0)});
  CHECK(pair.lookup(1, keys, 8).empty() && pair.lookup(0, keys, 8).num_blocks() == 2);
  pair.compare();
  pair.drain();
}

void hits_are_cut_at_each_groups_share_of_the_cap() {
  // Blocks at every second address, one published from each row, in both groups.
  PoolPair pair(options_of(60, {full_group(), window_group(4)}, 12), book());
  std::vector<Keys> singles;
  for (int i = 0; i < 6; ++i) singles.push_back(keys_from(i, 1));
  const Keys spacer = keys_from(900, 1);
  for (size_t i = 0; i < 6; ++i) {
    CHECK(admit_groups(pair, singles[i], {1, 0}) >= 0);
    pair.publish(pair.rows.size() - 1, 1, 0);
    CHECK(admit_groups(pair, spacer, {1, 0}) >= 0);
    CHECK(admit_groups(pair, singles[i], {0, 1}) >= 0);
    pair.publish(pair.rows.size() - 1, 1, 1);
    CHECK(admit_groups(pair, spacer, {1, 0}) >= 0);
  }
  const Keys keys = keys_from(0, 6);
  CHECK(pair.lookup(0, keys, 6).num_ranges() == 2);  // (12 - 1) / 2 / 2
  CHECK(pair.lookup(1, keys, 6).empty());            // four blocks in four ranges, and nulls
  pair.compare();
  pair.drain();
}

// A preempted request withdraws what it published in that step, in every group by itself.
void a_preempted_request_withdraws_in_each_group() {
  PoolPair pair(options_of(40, {full_group(), window_group(2)}), small_book());
  const Keys keys = keys_from(0, 20);
  pair.begin_step();
  CHECK(admit_groups(pair, keys, {4, 4}) == 0);
  pair.publish(0, 2, 0);
  pair.publish(0, 4, 1);
  pair.end_scheduling();
  pair.begin_step();
  pair.publish(0, 4, 0);
  CHECK(grow_groups(pair, 0, {5, 6}));
  pair.publish(0, 6, 1);
  CHECK(pair.lookup(1, keys, 9).num_blocks() == 6);
  pair.free(0);
  CHECK(pair.lookup(0, keys, 9).num_blocks() == 2);
  CHECK(pair.lookup(1, keys, 9).num_blocks() == 4);
  pair.compare();
  pair.drain();
}

}  // namespace

int main() {
  return run_tests({
      {"every pattern of cached blocks is looked up as vLLM does",
       every_pattern_of_cached_blocks_is_looked_up_as_vllm_does},
      {"prefix hits end where another group's block ends",
       prefix_hits_end_where_another_groups_block_ends},
      {"hits of windows and states begin with null blocks",
       hits_of_windows_and_states_begin_with_null_blocks},
      {"groups do not find each other's blocks", groups_do_not_find_each_others_blocks},
      {"hits are cut at each group's share of the cap",
       hits_are_cut_at_each_groups_share_of_the_cap},
      {"a preempted request withdraws in each group", a_preempted_request_withdraws_in_each_group},
  });
}
