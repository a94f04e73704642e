// Undoes a half-done change on every way out of a scope, exceptions included, unless it is kept.
#pragma once

#include <utility>

namespace tagma {

template <typename Undo>
class Rollback {
 public:
  explicit Rollback(Undo undo) : undo_(std::move(undo)) {}
  ~Rollback() {
    if (!kept_) undo_();
  }
  Rollback(const Rollback&) = delete;
  Rollback& operator=(const Rollback&) = delete;

  void keep() { kept_ = true; }

 private:
  Undo undo_;
  bool kept_ = false;
};

}  // namespace tagma
