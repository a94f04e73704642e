// Every item is worked on once, whatever threads there are to be had. No OpenMP runtime is loaded
// here, so threads are started for each call; with torch's: tests/worker/test_block_mover.py.
#include "tagma/openmp_threads.hpp"

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <vector>

#include "tests/check.hpp"

namespace {

void all_once(size_t items, int threads) {
  std::vector<std::atomic<int>> seen(items);
  tagma::for_each_item(items, threads, [&](size_t i) { ++seen[i]; });
  for (const std::atomic<int>& count : seen) CHECK(count == 1);
}

void each_item_once() {
  for (size_t items : {0, 1, 2, 7, 1000}) {
    for (int threads : {0, 1, 2, 5, 20}) all_once(items, threads);
  }
}

#ifdef __GLIBC__
// A stack that no address space holds: the system refuses to start a thread.
void without_threads_the_caller_does_it() {
  pthread_attr_t usual, hopeless;
  CHECK(pthread_getattr_default_np(&usual) == 0);
  CHECK(pthread_attr_init(&hopeless) == 0);
  CHECK(pthread_attr_setstacksize(&hopeless, size_t{1} << 46) == 0);
  CHECK(pthread_setattr_default_np(&hopeless) == 0);
  all_once(100, 4);
  CHECK(pthread_setattr_default_np(&usual) == 0);
  all_once(100, 4);
}
#endif

}  // namespace

int main() {
  each_item_once();
#ifdef __GLIBC__
  without_threads_the_caller_does_it();
#endif
  std::puts("openmp_threads_test: ok");
  return 0;
}
