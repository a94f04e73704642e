// How many blocks a request is expected to grow by: mean plus two mean deviations of past requests,
// smoothed exponentially (the estimator of Jacobson, SIGCOMM 1988, made for round-trip times).
#pragma once

#include <cmath>
#include <cstdint>

namespace tagma {

class HeadroomEstimator {
 public:
  // A request that was given `grown_blocks` after its admission has ended.
  void observe(int32_t grown_blocks) {
    const double error = static_cast<double>(grown_blocks) - mean_;
    mean_ += kGain * error;
    deviation_ += kGain * (std::abs(error) - deviation_);
  }

  int32_t blocks() const { return static_cast<int32_t>(mean_ + 2.0 * deviation_ + 0.5); }

 private:
  static constexpr double kGain = 1.0 / 32;
  // Before anything is known: 8 blocks, the 128 tokens of a short chat answer at 16 a block.
  double mean_ = 8.0;
  double deviation_ = 0.0;
};

}  // namespace tagma
