// Random operations on KvPool beside its model, in episodes; see pool_episode.hpp.
//
//   pool_fuzz [--ops N] [--seed S]
//
// A failure names the seed that replays the episode alone.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "tests/pool_episode.hpp"

namespace {

constexpr int64_t kEpisode = 2000;

char g_replay[160];  // how to repeat the episode in progress; read by the signal handler

void say_how_to_replay(int) {
  std::fputs(g_replay, stderr);
  std::_Exit(EXIT_FAILURE);
}

int64_t number(const char* text) {
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 0) {
    std::fprintf(stderr, "pool_fuzz: '%s' is not a number\n", text);
    std::exit(2);
  }
  return value;
}

void report(const EpisodeTotals& totals) {
  std::printf(
      "%lld steps executed: %lld blocks moved (%lld live), %lld rows relocated on request, evicted "
      "%lld turns too early at most\n",
      static_cast<long long>(totals.steps), static_cast<long long>(totals.moved),
      static_cast<long long>(totals.moved_live), static_cast<long long>(totals.relocated),
      static_cast<long long>(totals.latest_turn));
  std::printf(
      "%lld operations: %lld rows admitted (%lld refused), %lld blocks hit, %lld evicted (%lld "
      "times for the cap), %lld cap refusals, %lld blocks withdrawn at preemption\n",
      static_cast<long long>(totals.ops), static_cast<long long>(totals.admitted),
      static_cast<long long>(totals.refused), static_cast<long long>(totals.hit_blocks),
      static_cast<long long>(totals.evictions), static_cast<long long>(totals.cap_evictions),
      static_cast<long long>(totals.cap_refusals), static_cast<long long>(totals.withdrawn));
  std::printf("%lld blocks pinned, %lld fell out of windows, %lld passed over\n",
              static_cast<long long>(totals.pinned), static_cast<long long>(totals.skipped),
              static_cast<long long>(totals.passed));
}

}  // namespace

int main(int argc, char** argv) {
  int64_t ops = 300000;
  uint64_t seed = 1;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 < argc && std::strcmp(argv[i], "--ops") == 0) {
      ops = number(argv[i + 1]);
    } else if (i + 1 < argc && std::strcmp(argv[i], "--seed") == 0) {
      seed = static_cast<uint64_t>(number(argv[i + 1]));
    } else {
      std::fputs("usage: pool_fuzz [--ops N] [--seed S]\n", stderr);
      return 2;
    }
  }
  std::printf("pool_fuzz: %lld operations from seed %llu\n", static_cast<long long>(ops),
              static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::signal(SIGABRT, say_how_to_replay);
  EpisodeTotals totals;
  try {
    for (uint64_t episode = seed; totals.ops < ops; ++episode) {
      const int64_t length = std::min(kEpisode, ops - totals.ops);
      std::snprintf(g_replay, sizeof(g_replay), "replay with: pool_fuzz --seed %llu --ops %lld\n",
                    static_cast<unsigned long long>(episode), static_cast<long long>(length));
      Episode(episode, totals).run(length);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "unexpected exception: %s\n%s", error.what(), g_replay);
    return EXIT_FAILURE;
  }
  report(totals);
  return EXIT_SUCCESS;
}
