// Random operations on KvPool beside its model, in episodes: each has its own pool size, alignment,
// range cap, slack, compaction, copy budget, kind of hash and weights, and ends with the whole pool
// taken as one range. In a third of the episodes calls come in any order and nothing moves; in the
// others they come as a scheduler makes them, and a worker executes each step.
//
//   pool_fuzz [--ops N] [--seed S]
//
// A failure names the seed that replays the episode alone.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/check.hpp"
#include "tests/pool_model.hpp"

namespace {

using tagma::BlockId;
using tagma::Demand;
using tagma::PoolOptions;
using tagma::RangeList;
using tagma::RowHandle;
using tagma::UsageError;

constexpr int64_t kEpisode = 2000;

char g_replay[160];  // how to repeat the episode in progress; read by the signal handler

void say_how_to_replay(int) {
  std::fputs(g_replay, stderr);
  std::_Exit(EXIT_FAILURE);
}

struct Totals {
  int64_t ops = 0;
  int64_t admitted = 0;
  int64_t refused = 0;
  int64_t hit_blocks = 0;
  int64_t evictions = 0;
  int64_t cap_evictions = 0;
  int64_t cap_refusals = 0;
  int64_t withdrawn = 0;
  int64_t moved = 0;
  int64_t moved_live = 0;
  int64_t relocated = 0;
  int64_t steps = 0;
  int64_t latest_turn = 0;
};

class Episode {
 public:
  Episode(uint64_t seed, Totals& totals)
      : random_(seed),
        in_steps_(seed % 3 != 1),
        totals_(totals),
        options_(any_options()),
        longest_(1 + below(std::min(2 * options_.num_blocks, 60))),
        book_(12 * 60, any_key_bytes(), chance(50)),
        prompts_(any_prompts()),
        pair_(options_, book_),
        admit_weight_(2 + below(12)),
        free_weight_(1 + below(6)),
        check_every_(options_.num_blocks < 50 ? 7 : 60) {}

  void run(int64_t ops) {
    for (int64_t op = 0; op < ops; ++op) {
      step();
      if (op % check_every_ == 0) pair_.compare();
    }
    totals_.ops += ops;
    totals_.evictions += pair_.pool.num_evictions();
    totals_.cap_evictions += pair_.pool.num_cap_evictions();
    totals_.cap_refusals += pair_.pool.num_cap_refusals();
    totals_.moved += pair_.pool.num_moved();
    totals_.moved_live += pair_.pool.num_moved_live();
    totals_.latest_turn = std::max(totals_.latest_turn, pair_.latest_turn);
    if (in_steps_) end_step();
    pair_.drain();
  }

 private:
  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }

  PoolOptions any_options() {
    PoolOptions options;
    options.alignment = chance(85) ? 1 : 2 << below(2);
    const int32_t sizes[] = {2, 3, 5, 8, 13, 30, 64, 100, 300};
    options.num_blocks = sizes[below(9)] + below(4) + 2 * options.alignment - 2;
    options.max_ranges = chance(50) ? 1 + below(6) : 256;
    options.seed = random_();
    if (!in_steps_) return options;
    if (chance(10)) options.num_blocks = 1000 + below(2000);
    options.compaction = static_cast<tagma::Compaction>(below(3));
    const int32_t slacks[] = {0, 0, 1, 2, 5, 20, options.num_blocks};
    options.policy.slack = slacks[below(7)];
    const int32_t budgets[] = {0, 1, 2, 5, 20, 20, kUnlimited, kUnlimited};
    options.copy_budget = budgets[below(8)];
    if (options.policy.slack > 0 || options.compaction != tagma::Compaction::kOff)
      options.alignment = 1;
    return options;
  }

  size_t any_key_bytes() {
    const size_t sizes[] = {2, 4, 8, 16, 20, 32};
    return sizes[below(6)];
  }

  // Prompts that share prefixes: each continues a part of an earlier one with keys of its own.
  std::vector<Keys> any_prompts() {
    std::vector<Keys> prompts;
    int next = 0;
    for (int i = 0; i < 12; ++i) {
      Keys keys;
      if (i > 0 && chance(60)) {
        const Keys& parent = prompts[static_cast<size_t>(below(i))];
        keys.assign(parent.begin(), parent.begin() + below(longest_ + 1));
      }
      while (static_cast<int32_t>(keys.size()) < longest_) keys.push_back(next++ % book_.size());
      prompts.push_back(keys);
    }
    return prompts;
  }

  int32_t aligned(int32_t blocks) const {
    return (blocks + options_.alignment - 1) / options_.alignment * options_.alignment;
  }

  // Only inside a step are rows given blocks, or published, where a worker executes it.
  void ensure_step() {
    if (in_steps_ && !pair_.scheduling) pair_.begin_step();
  }

  void end_step() {
    if (!pair_.scheduling) return;
    pair_.execute(random_);
    ++totals_.steps;
  }

  void step() {
    const int kind = below(admit_weight_ + free_weight_ + 26);
    if (kind < admit_weight_) return admit();
    if (kind < admit_weight_ + free_weight_) return free();
    switch (kind - admit_weight_ - free_weight_) {
      case 0:
      case 1:
        if (in_steps_) end_step();
        return pair_.begin_step();
      case 2:
      case 3:
        return in_steps_ ? end_step() : pair_.end_scheduling();
      case 4:
        return evict();
      case 5:
        if (chance(10)) {
          if (in_steps_) end_step();
          while (!pair_.rows.empty()) free();
        }
        pair_.reset();
        return;
      case 6:
        return misuse();
      case 7:
      case 8:
      case 9: {
        const Keys& keys = any_prompt();
        stale_ = pair_.lookup(keys, below(longest_ + 1));
        return;
      }
      case 10:
      case 11:
      case 12:
      case 13:
        return publish();
      default:
        return in_steps_ && chance(15) ? relocate() : grow();
    }
  }

  const Keys& any_prompt() { return prompts_[static_cast<size_t>(below(12))]; }
  size_t any_row() { return random_() % pair_.rows.size(); }

  // Now and then demands that no pool can meet, and free blocks that are promised away.
  Demand any_demand(int32_t blocks) {
    Demand demand;
    demand.blocks = aligned(blocks);
    if (chance(50)) demand.gate = aligned(blocks + below(6));
    if (chance(20)) demand.watermark = below(5);
    if (chance(20)) demand.reserved = below(8);
    if (chance(2)) demand.reserved = std::numeric_limits<int32_t>::max();
    if (chance(2)) demand.watermark = std::numeric_limits<int32_t>::max();
    demand.prompt = aligned(blocks + below(6));
    demand.limit = chance(5) ? std::numeric_limits<int32_t>::max() : demand.prompt + below(40);
    return demand;
  }

  void admit() {
    ensure_step();
    const Keys& keys = any_prompt();
    RangeList hit;
    if (options_.alignment == 1 && chance(80)) {
      hit = pair_.lookup(keys, below(longest_ + 1));
      if (chance(20)) hit.truncate(below(hit.num_blocks() + 1));
    }
    int32_t blocks = std::min(hit.num_blocks() + 1 + below(8), longest_);
    if (chance(5)) blocks = std::min(pair_.blocks.num_free(), longest_);
    if (chance(10)) blocks = longest_;
    const int row = pair_.admit(keys, hit, any_demand(blocks));
    (row < 0 ? totals_.refused : totals_.admitted) += 1;
    if (row < 0) return;
    totals_.hit_blocks += hit.num_blocks();
    if (options_.alignment == 1 && chance(60)) {
      const Row& made = pair_.rows.back();
      pair_.publish(pair_.rows.size() - 1, std::min(made.blocks().num_blocks(), longest_));
    }
  }

  void grow() {
    if (pair_.rows.empty()) return;
    ensure_step();
    const size_t row = any_row();
    const int32_t held = pair_.rows[row].blocks().num_blocks();
    int32_t blocks = held + (chance(70) ? below(3) : below(12));
    if (chance(3)) blocks = held + pair_.blocks.num_free();
    if (chance(3)) blocks = below(held + 1);
    Demand demand = any_demand(blocks);
    if (chance(70)) demand.watermark = demand.reserved = demand.gate = 0;
    pair_.grow(row, demand);
  }

  void publish() {
    if (pair_.rows.empty() || options_.alignment != 1) return;
    ensure_step();
    const size_t row = any_row();
    pair_.publish(row, below(std::min(pair_.rows[row].blocks().num_blocks(), longest_) + 1));
  }

  // A part of a row, or of one of its ranges so that it can succeed.
  void relocate() {
    if (pair_.rows.empty()) return;
    ensure_step();
    const size_t row = any_row();
    const RangeList& blocks = pair_.rows[row].blocks();
    int32_t first = below(blocks.num_blocks() + 1);
    int32_t last = first + below(blocks.num_blocks() - first + 1);
    if (chance(70) && !blocks.empty()) {
      const int32_t range = below(blocks.num_ranges());
      first = blocks.index_of(blocks.ranges()[static_cast<size_t>(range)].start);
      last = first + blocks.ranges()[static_cast<size_t>(range)].count;
      first += chance(50) ? below(last - first) : 0;
    }
    totals_.relocated += pair_.relocate(row, first, last) ? 1 : 0;
  }

  void free() {
    if (pair_.rows.empty()) return;
    const size_t row = any_row();
    if (in_steps_ && pair_.scheduling && !pair_.may_be_preempted(row)) return;
    const int32_t cached = pair_.blocks.num_cached();
    stale_row_ = pair_.rows[row].handle;
    pair_.free(row);
    totals_.withdrawn += cached - pair_.blocks.num_cached();
  }

  void evict() {
    std::vector<BlockId> ids;
    const BlockId first = options_.alignment;
    for (int i = below(4); i > 0; --i) ids.push_back(first + below(pair_.blocks.capacity()));
    pair_.evict(ids);
  }

  // None of this may be accepted, and none may leave a trace; the comparisons that follow see it.
  void misuse() {
    RangeList added;
    const auto keys = [&](int32_t) { return book_[0]; };
    for (const RowHandle bad : {RowHandle{0}, RowHandle{-1}, stale_row_, RowHandle{1} << 40}) {
      CHECK_THROWS(pair_.pool.free(bad), UsageError);
      CHECK_THROWS(pair_.pool.grow(bad, {}, added), UsageError);
      CHECK_THROWS(pair_.pool.publish(bad, 0, 1, keys), UsageError);
    }
    Demand negative;
    negative.reserved = -1;
    CHECK_THROWS(pair_.pool.admit({}, negative, added), UsageError);
    if (!pair_.rows.empty()) {
      const PoolPair::Row& row = pair_.rows[any_row()];
      CHECK_THROWS(pair_.pool.publish(row.handle, 0, row.blocks().num_blocks() + 1, keys),
                   UsageError);
      CHECK_THROWS(pair_.pool.grow(row.handle, negative, added), UsageError);
    }
    CHECK_THROWS(pair_.pool.evict({options_.alignment, 0}), UsageError);
    CHECK_THROWS(pair_.pool.evict({options_.num_blocks}), UsageError);
    for (const BlockId b : BlockModel::ids(stale_)) {
      if (pair_.blocks.cached(b)) continue;
      CHECK_THROWS(pair_.pool.admit(stale_, {}, added), UsageError);
      break;
    }
    CHECK(added.empty());
    CHECK(pair_.pool.take_evicted().empty());
  }

  using Row = PoolPair::Row;

  static constexpr int32_t kUnlimited = 1000000;

  std::mt19937_64 random_;
  bool in_steps_;  // a worker executes each step
  Totals& totals_;
  PoolOptions options_;
  int32_t longest_;
  KeyBook book_;
  std::vector<Keys> prompts_;
  PoolPair pair_;
  int admit_weight_;
  int free_weight_;
  int64_t check_every_;
  RangeList stale_;
  RowHandle stale_row_ = 0;
};

int64_t number(const char* text) {
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 0) {
    std::fprintf(stderr, "pool_fuzz: '%s' is not a number\n", text);
    std::exit(2);
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  int64_t ops = 300000;
  uint64_t seed = 1;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 < argc && std::strcmp(argv[i], "--ops") == 0) {
      ops = number(argv[i + 1]);
    } else if (i + 1 < argc && std::strcmp(argv[i], "--seed") == 0) {
      seed = static_cast<uint64_t>(number(argv[i + 1]));
    } else {
      std::fputs("usage: pool_fuzz [--ops N] [--seed S]\n", stderr);
      return 2;
    }
  }
  std::printf("pool_fuzz: %lld operations from seed %llu\n", static_cast<long long>(ops),
              static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::signal(SIGABRT, say_how_to_replay);
  Totals totals;
  try {
    for (uint64_t episode = seed; totals.ops < ops; ++episode) {
      const int64_t length = std::min(kEpisode, ops - totals.ops);
      std::snprintf(g_replay, sizeof(g_replay), "replay with: pool_fuzz --seed %llu --ops %lld\n",
                    static_cast<unsigned long long>(episode), static_cast<long long>(length));
      Episode(episode, totals).run(length);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "unexpected exception: %s\n%s", error.what(), g_replay);
    return EXIT_FAILURE;
  }
  std::printf(
      "%lld steps executed: %lld blocks moved (%lld live), %lld rows relocated on request, evicted "
      "%lld turns too early at most\n",
      static_cast<long long>(totals.steps), static_cast<long long>(totals.moved),
      static_cast<long long>(totals.moved_live), static_cast<long long>(totals.relocated),
      static_cast<long long>(totals.latest_turn));
  std::printf(
      "%lld operations: %lld rows admitted (%lld refused), %lld blocks hit, %lld evicted (%lld "
      "times "
      "for the cap), %lld cap refusals, %lld blocks withdrawn at preemption\n",
      static_cast<long long>(totals.ops), static_cast<long long>(totals.admitted),
      static_cast<long long>(totals.refused), static_cast<long long>(totals.hit_blocks),
      static_cast<long long>(totals.evictions), static_cast<long long>(totals.cap_evictions),
      static_cast<long long>(totals.cap_refusals), static_cast<long long>(totals.withdrawn));
  return EXIT_SUCCESS;
}
