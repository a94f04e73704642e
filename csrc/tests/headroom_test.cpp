// HeadroomEstimator against a sorted copy of the last 1024 lengths.
#include "tagma/headroom.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <limits>
#include <random>
#include <vector>

#include "tests/check.hpp"

namespace {

using tagma::HeadroomEstimator;

constexpr size_t kWindow = 1024;

// The smallest length that at least 80 % of the window do not exceed.
int32_t quantile(const std::deque<int32_t>& window) {
  std::vector<int32_t> sorted(window.begin(), window.end());
  const auto nth =
      sorted.begin() + static_cast<std::ptrdiff_t>((sorted.size() * 80 + 99) / 100) - 1;
  std::nth_element(sorted.begin(), nth, sorted.end());
  return *nth;
}

class Pair {
 public:
  void observe(int32_t length) {
    estimator.observe(length);
    window.push_back(std::clamp(length, 0, 4095));
    if (window.size() > kWindow) window.pop_front();
    if (window.size() > 50 && ++observed % 5 != 0) return;
    CHECK(estimator.blocks() == (window.size() < 16 ? 8 : quantile(window)));
  }

  HeadroomEstimator estimator;
  std::deque<int32_t> window;
  int observed = 0;
};

void nothing_is_known_at_first() {
  Pair pair;
  CHECK(pair.estimator.blocks() == 8);
  for (int i = 0; i < 16; ++i) pair.observe(i);  // 13 of 16 are 80 %
  CHECK(pair.estimator.blocks() == 12);
}

void random_lengths_of_every_kind() {
  std::mt19937_64 random(3);
  for (int kind = 0; kind < 6; ++kind) {
    Pair pair;
    for (int i = 0; i < 3000; ++i) {
      const auto any = static_cast<int32_t>(random() % 100000);
      const int32_t drifting = i / 3 + any % 50;
      const int32_t lengths[] = {any % 3,  any % 5000,      any % 10 == 0 ? any : any % 20,
                                 drifting, 1000 - drifting, i / 700 % 2 == 0 ? 0 : 4095};
      pair.observe(lengths[kind]);
    }
  }
}

void extremes_count_as_the_longest_and_the_shortest() {
  Pair pair;
  for (int i = 0; i < 2000; ++i) pair.observe(std::numeric_limits<int32_t>::max());
  CHECK(pair.estimator.blocks() == 4095);
  for (int i = 0; i < 2000; ++i) pair.observe(std::numeric_limits<int32_t>::min());
  CHECK(pair.estimator.blocks() == 0);
}

}  // namespace

int main() {
  return run_tests({
      {"nothing is known at first", nothing_is_known_at_first},
      {"random lengths of every kind", random_lengths_of_every_kind},
      {"extremes count as the longest and the shortest",
       extremes_count_as_the_longest_and_the_shortest},
  });
}
