// A test harness in one header: a failed check prints where and what, and fails the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <initializer_list>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

// Passes if the expression throws exactly the given kind of exception (or one derived from it).
#define CHECK_THROWS(expression, Exception)                                                 \
  do {                                                                                      \
    bool thrown_ = false;                                                                   \
    try {                                                                                   \
      static_cast<void>(expression);                                                        \
    } catch (const Exception&) {                                                            \
      thrown_ = true;                                                                       \
    }                                                                                       \
    if (!thrown_) {                                                                         \
      std::fprintf(stderr, "%s:%d: %s did not throw %s\n", __FILE__, __LINE__, #expression, \
                   #Exception);                                                             \
      std::abort();                                                                         \
    }                                                                                       \
  } while (false)

struct TestCase {
  const char* name;
  void (*run)();
};

// Runs the cases in order, naming each; an exception that escapes one fails the program.
inline int run_tests(std::initializer_list<TestCase> cases) {
  for (const TestCase& test : cases) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    try {
      test.run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: unexpected exception: %s\n", test.name, error.what());
      return EXIT_FAILURE;
    }
  }
  return EXIT_SUCCESS;
}
