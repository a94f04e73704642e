// bench_kv_engine: the native benchmarks by name.
#pragma once

#include <array>

#include "bench/allocator_bench.hpp"
#include "bench/churn_bench.hpp"
#include "bench/coord_map_bench.hpp"
#include "bench/slot_mapping_bench.hpp"

namespace tagma::bench {

struct Benchmark {
  const char* name;
  void (*run)(Round&);
};

inline const std::array<Benchmark, 17>& benchmarks() {
  static const std::array<Benchmark, 17> all = {{
      {"kv_coord_map/single_offset", coord_single_offset},
      {"kv_coord_map/decode_walk", coord_decode_walk},
      {"kv_coord_map/context_walk_4k", coord_context_walk},
      {"kv_allocator/allocate_release", allocator_allocate_release},
      {"kv_allocator/grow_in_place", allocator_grow},
      {"kv_allocator/prefix_acquire_release", allocator_prefix_acquire_release},
      {"kv_allocator/evict_cache_only", allocator_evict_cache_only},
      {"kv_allocator/churn_85/tree", churn_tree},
      {"kv_allocator/churn_85/holes", churn_holes},
      {"kv_allocator/churn_85/allocator", churn_allocator},
      {"kv_allocator/prompt_8192", churn_long_prompt},
      {"kv_slot_mapping/prefill_4k/paged", [](Round& r) { run_paged(r, prefill_batch()); }},
      {"kv_slot_mapping/prefill_4k/paged_shift",
       [](Round& r) { run_paged_shift(r, prefill_batch()); }},
      {"kv_slot_mapping/prefill_4k/range", [](Round& r) { run_range(r, prefill_batch()); }},
      {"kv_slot_mapping/decode_512/paged", [](Round& r) { run_paged(r, decode_batch()); }},
      {"kv_slot_mapping/decode_512/paged_shift",
       [](Round& r) { run_paged_shift(r, decode_batch()); }},
      {"kv_slot_mapping/decode_512/range", [](Round& r) { run_range(r, decode_batch()); }},
  }};
  return all;
}

}  // namespace tagma::bench
