// The scheduler step that is going on: its number, whether decisions are still made, and the moves
// that it may still make.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tagma {

class StepState {
 public:
  // At most `copy_budget` blocks move in one step; 0 if none may.
  explicit StepState(int32_t copy_budget) : copy_budget_(copy_budget) {}

  void begin() {
    ++number_;
    scheduling_ = true;
    num_moved_ = 0;
  }
  void end_scheduling() { scheduling_ = false; }

  int64_t number() const { return number_; }
  // Until end_scheduling() a row that is freed was preempted.
  bool scheduling() const { return scheduling_; }

  int32_t moves_left() const { return std::max(copy_budget_ - num_moved_, 0); }
  // Of these, for moves that could be left undone: a quarter of the budget is kept for those
  // without which a cached block would have to be evicted.
  int32_t optional_moves_left() const {
    return std::max(copy_budget_ - copy_budget_ / 4 - num_moved_, 0);
  }
  void count_move() { ++num_moved_; }

 private:
  int32_t copy_budget_;
  int32_t num_moved_ = 0;
  int64_t number_ = 0;
  bool scheduling_ = false;
};

}  // namespace tagma
