// Enumerates every sequence of choices that a test makes (after TigerBeetle's exhaustigen): the
// test runs again and again, and choose() counts up like an odometer whose wheels it discovers.
#pragma once

#include <cstddef>
#include <vector>

class Choices {
 public:
  // One of 0 .. count - 1; every one of them in some run.
  int choose(int count) {
    if (at_ == path_.size()) path_.push_back({0, count - 1});
    return path_[at_++].value;
  }

  // Whether the last choice leads to a state that no earlier run has seen.
  bool fresh() const { return at_ > changed_; }

  // Begins the next run; false after the last.
  bool next() {
    at_ = 0;
    while (!path_.empty() && path_.back().value == path_.back().last) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().value;
    changed_ = path_.size() - 1;
    return true;
  }

 private:
  struct Choice {
    int value;
    int last;
  };
  std::vector<Choice> path_;
  size_t at_ = 0;
  size_t changed_ = 0;
};
