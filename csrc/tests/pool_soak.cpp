// A long run of KvPool in the closed loop of a scheduler: does anything drift, leak or break?
//
//   pool_soak [--requests N] [--mode off|idle|live] [--blocks N] [--running N] [--budget N]
//             [--slack N] [--seed S] [--tolerance PERCENT] [--check-every STEPS] [--groups 1|2]
//             [--pins N]
//
// A step stands for 16 tokens of each running request: one block of output, or a chunk of its
// prompt. Requests are aborted, preempted when the pool is full and now and then besides, and in
// the middle of each tenth of the run all are finished and the cache is reset. With two groups each
// request has a row with a sliding window as well; with pins parts of rows stay pinned for a while,
// whatever becomes of the request. Fails if ranges per
// request grow from the second tenth to the last by more than the tolerance, if the drained pool is
// not one hole, if a step moves more than its budget, or if a law of docs/invariants.md breaks.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/check.hpp"
#include "tests/soak_load.hpp"
#include "tests/soak_options.hpp"

namespace {

using tagma::Compaction;
using tagma::GroupKind;
using tagma::KvPool;
using tagma::Need;
using tagma::PinHandle;
using tagma::PoolOptions;
using tagma::RangeList;
using tagma::RowHandle;
using tagma::Spare;

// What happened during a tenth of the run.
struct Tenth {
  std::vector<int32_t> ranges;  // [request] ranges of its own, without those of its prefix hit
  int64_t hit_blocks = 0;
  int64_t prompt_blocks = 0;
  int64_t preemptions = 0;
  int64_t aborts = 0;
  int64_t moved = 0;
  int64_t moved_live = 0;
  int64_t evicted = 0;
  int64_t steps = 0;
  int64_t live_blocks = 0;  // summed over steps

  double mean() const {
    double sum = 0;
    for (const int32_t r : ranges) sum += r;
    return ranges.empty() ? 0 : sum / static_cast<double>(ranges.size());
  }
  int32_t p99() {
    if (ranges.empty()) return 0;
    const auto at = ranges.begin() + static_cast<std::ptrdiff_t>(ranges.size() * 99 / 100);
    std::nth_element(ranges.begin(), at, ranges.end());
    return *at;
  }
};

class Soak {
 public:
  explicit Soak(const SoakOptions& options)
      : options_(options),
        pool_(pool_options(options)),
        load_(options.seed),
        added_(static_cast<size_t>(options.groups)),
        pin_random_(options.seed) {
    pool_.set_key_bytes(32);
  }

  void run() {
    std::printf(
        "tenth  mean   p99  hits %%  live %%  moved/req  live/req  evicted/req  preempted  "
        "seconds\n");
    for (int i = 0; i < 10; ++i) {
      const auto start = std::chrono::steady_clock::now();
      tenths_.emplace_back();
      const int64_t first = options_.requests * i / 10;
      const int64_t last = options_.requests * (i + 1) / 10;
      until((first + last) / 2);
      drain_and_reset();
      until(last);
      report(i, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    drain_and_reset();
  }

  // False, and says why, if ranges drifted.
  bool is_steady() {
    const double allowed = tenths_[1].mean() * (1 + options_.tolerance / 100.0) + 0.02;
    const double worst = tenths_[1].p99() * (1 + options_.tolerance / 100.0) + 1;
    std::printf(
        "ranges per request: mean %.3f in the second tenth, %.3f in the last (allowed "
        "%.3f); p99 %d, %d (allowed %.0f)\n",
        tenths_[1].mean(), tenths_[9].mean(), allowed, tenths_[1].p99(), tenths_[9].p99(), worst);
    return tenths_[9].mean() <= allowed && tenths_[9].p99() <= worst;
  }

 private:
  struct Running {
    SoakRequest request;
    RowHandle row;
    int32_t computed;  // blocks
    int32_t target;    // blocks to compute before the next is output: the prompt, then more
    int32_t hit;
    int32_t age = 0;  // steps
  };
  struct Pin {
    PinHandle handle;
    int64_t until;  // step
  };
  struct Waiting {
    SoakRequest request;
    int32_t output_before = 0;  // blocks, before it was preempted
  };

  static constexpr int32_t kStepBlocks = 512;   // prompt blocks computed in a step
  static constexpr int64_t kPreemptEvery = 10;  // steps
  static constexpr int32_t kWindow = 16;        // blocks
  static constexpr int32_t kLongestPin = 64;    // blocks, and steps

  static PoolOptions pool_options(const SoakOptions& options) {
    PoolOptions out;
    out.num_blocks = options.blocks;
    out.compaction = options.mode == "off"    ? Compaction::kOff
                     : options.mode == "idle" ? Compaction::kIdle
                                              : Compaction::kLive;
    out.copy_budget = options.budget;
    out.policy.slack = options.slack >= 0 ? options.slack : options.blocks / 200;
    out.seed = options.seed;
    if (options.groups == 2) out.groups.push_back({GroupKind::kWindow, kWindow, 1});
    return out;
  }

  Tenth& now() { return tenths_.back(); }

  void until(int64_t requests) {
    while (finished_ < requests) {
      while (static_cast<int32_t>(running_.size() + waiting_.size()) < options_.running) {
        waiting_.push_back({load_.next()});
      }
      step();
    }
  }

  void drain_and_reset() {
    while (!running_.empty()) step();
    if (!pins_.empty()) CHECK(!pool_.reset());
    unpin_before(std::numeric_limits<int64_t>::max());
    CHECK(pool_.num_rows() == 0 && pool_.allocator().num_live() == 0);
    CHECK(pool_.reset());
    pool_.check_invariants();
    CHECK(pool_.index().size() == 0);
    CHECK(pool_.allocator().num_free() == pool_.allocator().capacity());
    CHECK(pool_.allocator().holes().num_holes() == 1);
    CHECK(pool_.allocator().holes().num_blocks() == pool_.allocator().capacity());
    CHECK(pool_.take_copies().empty());
    for (Waiting& waiting : waiting_) load_.finished(waiting.request, false);
    waiting_.clear();
  }

  void step() {
    const int64_t moved = pool_.num_moved();
    const int64_t moved_live = pool_.num_moved_live();
    const int64_t evicted = pool_.num_evictions();
    pool_.begin_step();
    int32_t budget = kStepBlocks;
    const int64_t preempted = now().preemptions;
    for (size_t i = 0; i < running_.size() && budget > 0; ++i) advance(i, budget);
    // Now and then for a reason of its own, as a scheduler with priorities does.
    if (steps_ % kPreemptEvery == 0 && running_.size() > 1) preempt_youngest();
    if (now().preemptions == preempted) {
      while (!waiting_.empty() && budget > 0 && admit(budget)) waiting_.pop_front();
    }
    pin_and_unpin();
    pool_.end_scheduling();
    const int64_t moved_now = pool_.num_moved() - moved;
    CHECK(moved_now <= (options_.mode == "off" ? 0 : options_.budget));
    CHECK(static_cast<int64_t>(pool_.take_copies().size()) <= moved_now);
    for (const tagma::RowChange& change : pool_.take_row_changes()) {
      CHECK(change.first_block + change.blocks.num_blocks() ==
            pool_.row_blocks(change.row, change.group).num_blocks());
    }
    now().moved += moved_now;
    now().moved_live += pool_.num_moved_live() - moved_live;
    now().evicted += pool_.num_evictions() - evicted;
    now().steps += 1;
    now().live_blocks += pool_.allocator().num_live();
    finish();
    if (++steps_ % options_.check_every == 0) pool_.check_invariants();
  }

  // A chunk of the prompt, or a block of output; preempts the youngest while there is no room.
  void advance(size_t i, int32_t& budget) {
    const int32_t chunk = std::min(running_[i].target - running_[i].computed, budget);
    const int32_t blocks = running_[i].computed + chunk;
    if (options_.groups == 2) {
      pool_.skip(running_[i].row, 1, std::max(running_[i].computed - kWindow, 0));
    }
    const std::vector<Need> needs = needs_of(running_[i].request, blocks);
    while (!pool_.grow(running_[i].row, needs.data(), {}, added_.data())) {
      const bool self = i + 1 == running_.size();
      preempt_youngest();
      if (self) return;
    }
    budget -= chunk;
    compute(running_[i], blocks);
  }

  void preempt_youngest() {
    const Running& youngest = running_.back();
    pool_.free(youngest.row);
    waiting_.push_front(
        {youngest.request, std::max(youngest.computed - youngest.request.prompt, 0)});
    running_.pop_back();
    now().preemptions += 1;
  }

  bool admit(int32_t& budget) {
    const Waiting& waiting = waiting_.front();
    const SoakRequest& request = waiting.request;
    const int32_t known = request.prompt + waiting.output_before;
    const std::vector<RangeList> hits = common_hit(request, known - 1);
    const int32_t hit = hits[0].num_blocks();
    Running running{request, 0, 0, known, hit};
    const int32_t chunk = std::min(known - hit, budget);
    std::vector<Need> needs = needs_of(request, hit + chunk);
    for (Need& need : needs) need.gate = need.prompt = known;
    Spare spare;
    spare.watermark = running_.empty() ? 0 : options_.blocks / 1000;
    running.row = pool_.admit(hits.data(), needs.data(), spare, added_.data());
    if (running.row == 0) {
      CHECK(!running_.empty());  // a request alone always fits
      return false;
    }
    if (waiting.output_before == 0) {
      now().hit_blocks += hit;
      now().prompt_blocks += request.prompt;
    }
    budget -= chunk;
    compute(running, hit + chunk);
    running_.push_back(running);
    return true;
  }

  // What all groups have: a window may have less of it than full attention.
  std::vector<RangeList> common_hit(const SoakRequest& request, int32_t most) const {
    std::vector<RangeList> hits = {pool_.lookup(0, KeyAt{request}, most)};
    if (options_.groups == 1) return hits;
    hits.push_back(pool_.lookup(1, KeyAt{request}, hits[0].num_blocks()));
    hits[0].truncate(hits[1].num_blocks());
    return hits;
  }

  std::vector<Need> needs_of(const SoakRequest& request, int32_t blocks) const {
    Need need;
    need.blocks = blocks;
    need.prompt = request.prompt;
    need.limit = request.prompt + 64;
    return std::vector<Need>(static_cast<size_t>(options_.groups), need);
  }

  // Parts of rows, for some steps: longer than many of the requests live.
  void pin_and_unpin() {
    unpin_before(steps_);
    if (static_cast<int32_t>(pins_.size()) >= options_.pins || running_.empty()) return;
    const RowHandle row = running_[pin_random_() % running_.size()].row;
    const auto group = static_cast<int32_t>(pin_random_() % uint64_t(options_.groups));
    const int32_t held = pool_.row_blocks(row, group).num_blocks();
    const auto first = static_cast<int32_t>(pin_random_() % uint64_t(held));
    const auto count = static_cast<int32_t>(pin_random_() % uint64_t(kLongestPin));
    const PinHandle pin = pool_.pin(row, group, first, std::min(first + count, held));
    pins_.push_back({pin, steps_ + static_cast<int64_t>(pin_random_() % kLongestPin)});
  }

  void unpin_before(int64_t step) {
    for (size_t i = pins_.size(); i-- > 0;) {
      if (pins_[i].until >= step) continue;
      pool_.unpin(pins_[i].handle);
      pins_.erase(pins_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  struct KeyAt {
    const SoakRequest& request;
    mutable std::array<uint8_t, 32> key{};
    const uint8_t* operator()(int32_t i) const {
      key = request.key(i);
      return key.data();
    }
  };

  void compute(Running& running, int32_t blocks) {
    for (int32_t g = 0; g < options_.groups; ++g) {
      pool_.publish(running.row, g, blocks, KeyAt{running.request});
    }
    running.computed = blocks;
    if (blocks == running.target) ++running.target;
  }

  // After the step: requests that are done or aborted leave.
  void finish() {
    size_t kept = 0;
    for (size_t i = 0; i < running_.size(); ++i) {
      Running& running = running_[i];
      const SoakRequest& request = running.request;
      const bool done = running.computed >= request.prompt + request.output;
      const bool aborted = !done && running.age++ == request.abort_after;
      if (!done && !aborted) {
        running_[kept++] = running;
        continue;
      }
      if (done) now().ranges.push_back(own_ranges(running));
      now().aborts += aborted ? 1 : 0;
      load_.finished(request, done);
      pool_.free(running.row);
      ++finished_;
    }
    running_.resize(kept);
  }

  int32_t own_ranges(const Running& running) const {
    int32_t own = 0;
    int32_t cum = 0;
    for (const tagma::BlockRange& range : pool_.row_blocks(running.row).ranges()) {
      cum += range.count;
      own += cum > running.hit ? 1 : 0;
    }
    return own;
  }

  void report(int i, double seconds) {
    Tenth& tenth = now();
    const auto requests = static_cast<double>(options_.requests) / 10;
    std::printf(
        "%5d %5.3f %5d %7.2f %7.1f %10.2f %9.2f %12.2f %10lld %8.1f\n", i + 1, tenth.mean(),
        tenth.p99(),
        100.0 * static_cast<double>(tenth.hit_blocks) / static_cast<double>(tenth.prompt_blocks),
        100.0 * static_cast<double>(tenth.live_blocks) /
            (static_cast<double>(tenth.steps) * options_.blocks),
        static_cast<double>(tenth.moved) / requests,
        static_cast<double>(tenth.moved_live) / requests,
        static_cast<double>(tenth.evicted) / requests, static_cast<long long>(tenth.preemptions),
        seconds);
    std::fflush(stdout);
  }

  SoakOptions options_;
  KvPool pool_;
  SoakLoad load_;
  std::vector<Running> running_;
  std::deque<Waiting> waiting_;
  std::vector<Tenth> tenths_;
  std::vector<RangeList> added_;  // [group]
  std::vector<Pin> pins_;
  std::mt19937_64 pin_random_;
  int64_t finished_ = 0;
  int64_t steps_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  SoakOptions options;
  if (!parse(argc, argv, options)) {
    std::fputs(kSoakUsage, stderr);
    return 2;
  }
  std::printf(
      "pool_soak: %lld requests, compaction %s, %d blocks, %d running, %d groups, %d pins, seed "
      "%llu\n",
      static_cast<long long>(options.requests), options.mode.c_str(), options.blocks,
      options.running, options.groups, options.pins, static_cast<unsigned long long>(options.seed));
  try {
    Soak soak(options);
    soak.run();
    if (!soak.is_steady()) {
      std::fputs("pool_soak: ranges per request drifted upward\n", stderr);
      return EXIT_FAILURE;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "unexpected exception: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
