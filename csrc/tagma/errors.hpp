// Errors of the core.
//
// The core throws before it changes anything, so a caller that catches can go on with the pool it
// had. Exceptions rather than status codes: every operation has exactly one success path, and the
// bindings translate the three kinds once, at the boundary.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace tagma {

// The caller broke a precondition: a foreign block id, a double free, a stale handle, an unaligned
// count. Checked in release builds.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A request would need more ranges than a range table row holds.
class CapError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A law of docs/invariants.md does not hold: a bug of this core.
class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace detail {
inline void append_all(std::string&) {}
template <typename Head, typename... Tail>
void append_all(std::string& out, const Head& head, const Tail&... tail) {
  if constexpr (std::is_arithmetic_v<Head>) {
    out += std::to_string(head);
  } else {
    out += head;
  }
  append_all(out, tail...);
}
}  // namespace detail

// Builds a message from text and numbers; only ever called on the way to a throw.
template <typename... Parts>
std::string message(const Parts&... parts) {
  std::string out;
  detail::append_all(out, parts...);
  return out;
}

// A law of docs/invariants.md, named with the part that checks it: "A6 (allocator)". Throws
// InvariantError with the law and the number that broke it.
inline void require(bool holds, const char* law, const char* what, int64_t value) {
  if (!holds) throw InvariantError(message("law ", law, ": ", what, " ", value));
}

}  // namespace tagma
