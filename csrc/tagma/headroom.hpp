// How many blocks a request is expected to grow by: a quantile of what recent requests grew by.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace tagma {

class HeadroomEstimator {
 public:
  explicit HeadroomEstimator(int32_t percent = 80) : percent_(percent) {}

  // A request that was given `grown_blocks` after its admission has ended. O(1) amortised: the
  // quantile moves by as many lengths as the window's content changes it.
  void observe(int32_t grown_blocks) {
    const int32_t length = std::clamp(grown_blocks, 0, kLongest);
    if (num_seen_ == kWindow) forget(window_[at_]);
    window_[at_] = length;
    at_ = (at_ + 1) % kWindow;
    num_seen_ = std::min(num_seen_ + 1, kWindow);
    ++count_[length];
    if (length < quantile_) ++below_;
    settle();
  }

  int32_t blocks() const { return num_seen_ < kFewest ? kAtFirst : quantile_; }

 private:
  static constexpr int32_t kWindow = 1024;   // requests remembered
  static constexpr int32_t kLongest = 4095;  // blocks; longer growth counts as this
  static constexpr int32_t kFewest = 16;     // requests before the quantile is believed
  // Until then: 8 blocks, the 128 tokens of a short chat answer at 16 a block.
  static constexpr int32_t kAtFirst = 8;

  void forget(int32_t length) {
    --count_[length];
    if (length < quantile_) --below_;
  }

  // Restores: below_ <= the share of requests that may be below < below_ + count_[quantile_].
  void settle() {
    const int32_t wanted = (num_seen_ * percent_ + 99) / 100;
    while (quantile_ > 0 && below_ >= wanted) below_ -= count_[--quantile_];
    while (quantile_ < kLongest && below_ + count_[quantile_] < wanted) {
      below_ += count_[quantile_++];
    }
  }

  int32_t percent_;  // of recent requests that grew by no more
  std::array<int32_t, kWindow> window_{};
  std::array<int32_t, kLongest + 1> count_{};  // [blocks] requests of the window that grew by these
  int32_t at_ = 0;
  int32_t num_seen_ = 0;
  int32_t quantile_ = 0;
  int32_t below_ = 0;  // requests of the window that grew by less than the quantile
};

}  // namespace tagma
