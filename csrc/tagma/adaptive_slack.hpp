// How much slack a pool can afford: it grows as long as nobody hits the blocks that it puts at
// risk.
//
// Slack saves moves (a cold block in the way is evicted, a warm one is copied) and may cost hits: a
// cold block can be evicted before it would have been hit. How likely that is shows in the cold
// blocks that are hit all the same. So many hits are tolerated as a share of all blocks that
// requests ask for: a budget, of which hits of one step of slack can be saved up, and a quarter of
// that overdrawn. As in TCP's congestion avoidance the slack grows by a step at a time, whenever
// its cold blocks have been replaced by others, and is halved by a hit that overdraws the budget.
// It does not grow until the debt is paid.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tagma/errors.hpp"

namespace tagma {

class AdaptiveSlack {
 public:
  // Between `least` and `most` blocks, `least` at first; constant if `most` is not above that.
  AdaptiveSlack(int32_t least, int32_t most, int32_t num_blocks)
      : least_(least),
        most_(std::max(least, most)),
        step_(std::max(num_blocks / kStepShare, 1)),
        most_budget_(int64_t{step_} * kAdmittedForHit),
        wanted_(least),
        slack_(least) {}

  bool adapts() const { return most_ > least_; }

  // The slack from now on. Totals since the pool was made: blocks of admitted prompts, cold blocks
  // among their hits, evictions. To be called once a step: the slack changes by at most
  // kChangeInStep, which bounds the work. O(1).
  int32_t next(int64_t admitted, int64_t cold_hits, int64_t evictions) {
    const int64_t hits = cold_hits - cold_hits_;
    budget_ += admitted - admitted_ - hits * kAdmittedForHit;
    budget_ = std::clamp(budget_, -most_budget_ / 4, most_budget_);
    admitted_ = admitted;
    cold_hits_ = cold_hits;
    if (budget_ < 0) {
      if (hits > 0) wanted_ = std::max(wanted_ / 2, least_);
      evictions_ = evictions;
    } else if (evictions - evictions_ >= std::max(wanted_, step_)) {
      wanted_ = std::min(wanted_ + step_, most_);
      evictions_ = evictions;
    }
    slack_ += std::clamp(wanted_ - slack_, -kChangeInStep, kChangeInStep);
    return slack_;
  }

  int32_t slack() const { return slack_; }

 private:
  static constexpr int32_t kStepShare = 100;        // a step is one in so many blocks of the pool
  static constexpr int32_t kAdmittedForHit = 1000;  // one cold hit for so many blocks is tolerated
  static constexpr int32_t kChangeInStep = 128;

  int32_t least_;
  int32_t most_;
  int32_t step_;
  int64_t most_budget_;
  int32_t wanted_;
  int32_t slack_;
  int64_t budget_ = 0;  // in admitted blocks
  int64_t admitted_ = 0;
  int64_t cold_hits_ = 0;
  int64_t evictions_ = 0;  // when the slack wanted last changed
};

}  // namespace tagma
