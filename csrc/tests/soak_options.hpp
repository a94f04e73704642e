// What a run of pool_soak is asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

struct SoakOptions {
  int64_t requests = 1000000;
  std::string mode = "live";
  int32_t blocks = 8000;
  int32_t running = 64;
  int32_t budget = 512;
  int32_t slack = -1;  // 1/200 of the pool
  uint64_t seed = 1;
  int32_t tolerance = 10;  // percent
  int64_t check_every = 500;
  int32_t groups = 1;  // 2: a sliding window beside full attention
  int32_t pins = 0;    // held at a time, at most
};

constexpr const char* kSoakUsage =
    "usage: pool_soak [--requests N (1000 or more)] [--mode off|idle|live] [--blocks N (1000 or "
    "more)]\n                 [--running N] [--budget N] [--slack N] [--seed S] [--tolerance "
    "PERCENT]\n                 [--check-every STEPS] [--groups 1|2] [--pins N]\n";

// False if the arguments make no sense.
inline bool parse(int argc, char** argv, SoakOptions& options) {
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) return false;
    const std::string flag = argv[i];
    if (flag == "--mode") {
      options.mode = argv[i + 1];
      if (options.mode != "off" && options.mode != "idle" && options.mode != "live") return false;
      continue;
    }
    char* end = nullptr;
    const int64_t value = std::strtoll(argv[i + 1], &end, 10);
    if (*argv[i + 1] == '\0' || *end != '\0' || value < 0) return false;
    if (flag == "--requests") {
      options.requests = value;
    } else if (flag == "--blocks") {
      options.blocks = static_cast<int32_t>(value);
    } else if (flag == "--running") {
      options.running = static_cast<int32_t>(value);
    } else if (flag == "--budget") {
      options.budget = static_cast<int32_t>(value);
    } else if (flag == "--slack") {
      options.slack = static_cast<int32_t>(value);
    } else if (flag == "--seed") {
      options.seed = static_cast<uint64_t>(value);
    } else if (flag == "--tolerance") {
      options.tolerance = static_cast<int32_t>(value);
    } else if (flag == "--check-every") {
      options.check_every = std::max<int64_t>(value, 1);
    } else if (flag == "--groups") {
      options.groups = static_cast<int32_t>(value);
    } else if (flag == "--pins") {
      options.pins = static_cast<int32_t>(value);
    } else {
      return false;
    }
  }
  return options.requests >= 1000 && options.blocks >= 1000 && options.running >= 1 &&
         (options.groups == 1 || options.groups == 2);
}
