// Work on several threads: those of the OpenMP runtime that the process has loaded, if any.
//
// A CPU worker binds its OpenMP threads to cores of their own and the thread that calls us to the
// first of them, so threads that we started would inherit that one core. The runtime is found by
// the name of its entry point and never linked: torch brings its own, and two of them would not
// share threads. Without one, threads are started for the call.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace tagma {

// Calls body(item) for each of `items`, on at most `threads` threads, fewer where no more can be
// started. `body` must not throw.
template <typename Body>
void for_each_item(size_t items, int threads, const Body& body) {
  struct Work {
    const Body& body;
    size_t items;
    std::atomic<size_t> next{0};

    static void run(void* self) {
      Work& work = *static_cast<Work*>(self);
      for (size_t i = work.next++; i < work.items; i = work.next++) work.body(i);
    }
  } work{body, items};

  if (threads <= 1 || items <= 1) return Work::run(&work);
  // GNU's entry point, which LLVM's and Intel's runtimes have as well.
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (parallel != nullptr) {
    // The whole team, even where items are fewer: libgomp ends the threads that a smaller team
    // leaves over, and torch would have to start them anew in its next operation.
    parallel(Work::run, &work, static_cast<unsigned>(threads), 0);
    return;
  }
  std::vector<std::thread> others;
  try {
    const size_t wanted = std::min(items, static_cast<size_t>(threads)) - 1;
    while (others.size() < wanted) others.emplace_back(Work::run, &work);
  } catch (const std::exception&) {
    // No more threads or memory to be had: those that run do the work.
  }
  Work::run(&work);
  for (std::thread& other : others) other.join();
}

}  // namespace tagma
