// How a pool is made, and what requests ask of it.
#pragma once

#include <cstdint>
#include <vector>

#include "tagma/block_range.hpp"
#include "tagma/compactor.hpp"
#include "tagma/group_spec.hpp"
#include "tagma/policy.hpp"

namespace tagma {

struct PoolOptions {
  int32_t num_blocks = 0;
  int32_t alignment = 1;
  int32_t max_ranges = kMaxRanges;  // ranges that a range table row of the worker holds
  bool record_evictions = false;    // keep evicted blocks for take_evicted(): KV events, metrics
  Compaction compaction = Compaction::kOff;
  int32_t copy_budget = 0;  // blocks that may move in one step
  Policy policy;
  uint64_t seed = 1;
  std::vector<GroupSpec> groups = {GroupSpec{}};

  bool moves() const { return compaction != Compaction::kOff && copy_budget > 0; }

  // Blocks that may move in one step. Throws UsageError for a negative budget.
  int32_t moves_in_step() const {
    if (copy_budget < 0) throw UsageError(message("copy_budget=", copy_budget, " is negative"));
    return moves() ? copy_budget : 0;
  }
};

// What a request needs in one group, in blocks counted from its first position.
struct Need {
  int32_t blocks = 0;  // to hold after this call
  int32_t gate = 0;    // to be able to hold for the whole prompt; 0 = no gate
  int32_t prompt = 0;  // of the whole prompt: placed as one range even when it comes in chunks
  int32_t limit = 0;   // that the request can ever need; bounds its headroom
  int32_t skip = 0;    // leading ones without content: null in the row, as far as it has them
};

// Free blocks that a call must leave.
struct Spare {
  int32_t watermark = 0;  // by admission
  int32_t reserved = 0;   // promised to others
};

// All that a request of one group needs.
struct Demand : Need, Spare {};

}  // namespace tagma
