// One round of a native benchmark: a warm-up call, then timed calls back to back.
//
// Preparation happens outside the clock, so a scenario that consumes its state (idle blocks, free
// blocks) times several batches and sets up between them.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tagma::bench {

// Makes the compiler believe that `value` is used.
template <typename T>
inline void keep(const T& value) {
  asm volatile("" : : "g"(&value) : "memory");
}

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // Uniform in [0, limit); the bias of the modulo is below 2^-32 for the limits used here.
  int32_t below(int32_t limit) {
    return static_cast<int32_t>(next() % static_cast<uint64_t>(limit));
  }
  // Uniform in [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

class Round {
 public:
  // `calls` timed calls are wanted. Throws nothing.
  explicit Round(int64_t calls) : wanted_(calls) {}

  int64_t wanted() const { return wanted_; }
  int64_t left() const { return wanted_ - timed_; }
  int64_t ns() const { return ns_; }

  // Calls call() once, untimed, before the first batch.
  template <typename Call>
  void warm_up(Call&& call) {
    call();
  }

  // Times `calls` calls of call().
  template <typename Call>
  void time(int64_t calls, Call&& call) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    const auto end = std::chrono::steady_clock::now();
    ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
    timed_ += calls;
  }

  // A number beside the time: table loads, failures, ranges.
  void count(const char* name, int64_t value) { counters_.emplace_back(name, value); }
  const std::vector<std::pair<std::string, int64_t>>& counters() const { return counters_; }

 private:
  int64_t wanted_;
  int64_t timed_ = 0;
  int64_t ns_ = 0;
  std::vector<std::pair<std::string, int64_t>> counters_;
};

}  // namespace tagma::bench
