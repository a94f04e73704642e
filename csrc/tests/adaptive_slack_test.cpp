// AdaptiveSlack against its rule written down step by step, and inside a pool.
#include "tagma/adaptive_slack.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "tests/check.hpp"
#include "tests/pool_fixtures.hpp"

namespace {

using tagma::AdaptiveSlack;
using tagma::RangeList;

// What is added in a step.
struct Step {
  int64_t admitted;
  int64_t cold_hits;
  int64_t evictions;
};

// The slack and the rule beside it, in hits instead of admitted blocks.
class Pair {
 public:
  Pair(int32_t least, int32_t most, int32_t num_blocks)
      : slack(least, most, num_blocks),
        least_(least),
        most_(most),
        step_(std::max(num_blocks / 100, 1)),
        wanted_(least),
        now_(least) {}

  void next(Step step) {
    total_.admitted += step.admitted;
    total_.cold_hits += step.cold_hits;
    total_.evictions += step.evictions;
    saved_ += static_cast<double>(step.admitted) / 1000 - static_cast<double>(step.cold_hits);
    saved_ = std::max(std::min(saved_, static_cast<double>(step_)), -step_ / 4.0);
    since_ += step.evictions;
    const bool in_debt = saved_ < -1e-9;
    if (in_debt) {
      since_ = 0;
      if (step.cold_hits > 0) wanted_ = std::max(wanted_ / 2, least_);
    } else if (since_ >= std::max(wanted_, step_)) {
      since_ = 0;
      wanted_ = std::min(wanted_ + step_, most_);
    }
    now_ = now_ < wanted_ ? std::min(now_ + 128, wanted_) : std::max(now_ - 128, wanted_);
    CHECK(slack.next(total_.admitted, total_.cold_hits, total_.evictions) == now_);
    CHECK(slack.slack() == now_);
    CHECK(now_ >= least_ && now_ <= most_);
  }

  AdaptiveSlack slack;

 private:
  int32_t least_;
  int32_t most_;
  int32_t step_;
  int32_t wanted_;
  int32_t now_;
  int64_t since_ = 0;
  double saved_ = 0;
  Step total_{0, 0, 0};
};

void it_is_constant_without_a_range() {
  CHECK(!AdaptiveSlack(7, 7, 1000).adapts());
  CHECK(!AdaptiveSlack(7, 0, 1000).adapts());
  CHECK(AdaptiveSlack(7, 8, 1000).adapts());
  CHECK(AdaptiveSlack(7, 0, 1000).slack() == 7);
}

void it_grows_as_cold_blocks_are_replaced() {
  Pair pair(10, 50, 1000);
  for (int i = 0; i < 9; ++i) pair.next({1, 0, 1});
  CHECK(pair.slack.slack() == 10);
  pair.next({1, 0, 1});  // the tenth eviction
  CHECK(pair.slack.slack() == 20);
  for (int i = 0; i < 19; ++i) pair.next({1, 0, 1});
  CHECK(pair.slack.slack() == 20);
  pair.next({1, 0, 1});
  CHECK(pair.slack.slack() == 30);
  for (int i = 0; i < 200; ++i) pair.next({1, 0, 1});
  CHECK(pair.slack.slack() == 50);
}

void hits_halve_it_and_debts_keep_it() {
  Pair pair(10, 400, 1000);
  for (int i = 0; i < 40; ++i) pair.next({50, 0, 1000});
  CHECK(pair.slack.slack() == 400);
  pair.next({0, 2, 0});  // 2,000 blocks were admitted so far: paid for
  CHECK(pair.slack.slack() == 400);
  pair.next({0, 1, 0});  // on credit
  pair.next({0, 0, 0});
  CHECK(pair.slack.slack() == 200);
  for (int i = 0; i < 9; ++i) pair.next({100, 0, 1000});
  CHECK(pair.slack.slack() == 200);  // not paid yet
  pair.next({100, 0, 1000});
  CHECK(pair.slack.slack() == 210);
  for (int i = 0; i < 10; ++i) pair.next({0, 100, 0});
  CHECK(pair.slack.slack() == 10);
  for (int i = 0; i < 3; ++i) pair.next({500, 0, 1000});  // at most a quarter of 10 hits was owed
  CHECK(pair.slack.slack() == 10);
  for (int i = 0; i < 2; ++i) pair.next({500, 0, 1000});
  CHECK(pair.slack.slack() == 20);
}

void it_changes_little_by_little() {
  Pair pair(0, 100000, 1000000);
  int32_t last = 0;
  for (int i = 0; i < 300; ++i) {
    pair.next({1000, i > 200 ? 1000 : 0, 100000});
    CHECK(std::abs(pair.slack.slack() - last) <= 128);
    last = pair.slack.slack();
  }
}

void random_steps_agree() {
  std::mt19937_64 random(5);
  for (int kind = 0; kind < 40; ++kind) {
    const auto below = [&](int32_t n) {
      return static_cast<int32_t>(random() % static_cast<uint64_t>(n));
    };
    const int32_t least = below(20);
    Pair pair(least, least + 1 + below(3000), 1 + below(10000));
    const int32_t hits_in = 1 + below(30);
    for (int i = 0; i < 3000; ++i) {
      pair.next({250 * below(20), below(hits_in) == 0 ? below(5) : 0, below(300)});
    }
  }
}

// Nobody hits anything: the slack grows. Then somebody hits what is oldest. PoolPair compares which
// blocks are cold after each step.
void a_pool_follows() {
  tagma::PoolOptions options = options_of(101);
  options.compaction = tagma::Compaction::kLive;
  options.copy_budget = 1000;
  options.policy.slack = 1;
  options.policy.most_slack = 30;
  PoolPair pair(options, book());
  std::vector<Keys> prompts;
  int32_t admitted = 0;
  const auto one_row = [&](const Keys& keys) {
    pair.begin_step();
    const RangeList hit = pair.lookup(0, keys, 10);
    const int row = pair.admit(keys, {hit}, {demand_of(10)}, {});
    CHECK(row == 0);
    admitted += 10;
    pair.publish(0, 10);
    pair.end_scheduling();
    pair.free(0);
    pair.compare();
    return hit.num_blocks();
  };
  for (int i = 0; i < 90; ++i) {
    prompts.push_back(keys_from(10 * i, 10));
    CHECK(one_row(prompts.back()) == 0);
  }
  CHECK(pair.pool.allocator().slack() == 30);
  CHECK(pair.pool.allocator().num_cold_hits() == 0);
  // The newest is warm: its hits are harmless.
  CHECK(one_row(prompts.back()) == 10);
  CHECK(pair.pool.allocator().num_cold_hits() == 0);
  size_t oldest = 0;
  while (pair.lookup(0, prompts[oldest], 10).num_blocks() < 2) ++oldest;
  one_row(prompts[oldest]);
  CHECK(pair.pool.allocator().num_cold_hits() > 1);
  pair.begin_step();
  CHECK(pair.pool.allocator().slack() == 15);
  pair.compare();
  pair.end_scheduling();
}

}  // namespace

int main() {
  return run_tests({
      {"it is constant without a range", it_is_constant_without_a_range},
      {"it grows as cold blocks are replaced", it_grows_as_cold_blocks_are_replaced},
      {"hits halve it and debts keep it", hits_halve_it_and_debts_keep_it},
      {"it changes little by little", it_changes_little_by_little},
      {"random steps agree", random_steps_agree},
      {"a pool follows", a_pool_follows},
  });
}
