// kv_slot_mapping: slots from a table of block ids against slots from a table of ranges, both plain
// C++ loops compiled with the same flags.
//
// The paged loop is the one of vLLM's CPU kernel: a division, a load and a multiplication a token.
// `paged_shift` is what it could be if the block size were known to be a power of two.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "bench/round.hpp"
#include "tagma/block_range.hpp"
#include "tagma/range_table.hpp"

namespace tagma::bench {

constexpr int32_t kSlotBlock = 16;
constexpr int32_t kMaxRowBlocks = 1'024;

// A batch and its block tables, both ways.
struct Batch {
  int32_t num_reqs = 0;
  std::vector<int32_t> query_start_loc{0};
  std::vector<int64_t> positions;
  std::vector<BlockId> block_table;  // [num_reqs, kMaxRowBlocks]
  RangeTable ranges;
  std::vector<int64_t> slots;

  explicit Batch(int32_t reqs)
      : num_reqs(reqs), block_table(static_cast<size_t>(reqs) * kMaxRowBlocks, 0), ranges(reqs) {}

  // Row `row` holds `blocks` blocks in `pieces` ranges and computes [first, last).
  void add(int32_t row, int32_t blocks, int32_t pieces, int64_t first, int64_t last,
           Random& random) {
    BlockId* ids = &block_table[static_cast<size_t>(row) * kMaxRowBlocks];
    for (int32_t piece = 0, done = 0; piece < pieces; ++piece) {
      const int32_t upto = blocks * (piece + 1) / pieces;
      const BlockId start = 1 + random.below(1 << 20);
      for (; done < upto; ++done) ids[done] = start + done;
    }
    ranges.append(row, ids, blocks);
    for (int64_t p = first; p < last; ++p) positions.push_back(p);
    query_start_loc.push_back(static_cast<int32_t>(positions.size()));
    slots.resize(positions.size());
  }
};

// One prompt of 4,096 tokens in 4 ranges.
inline Batch prefill_batch() {
  Random random(4'096);
  Batch batch(1);
  batch.add(0, 4'096 / kSlotBlock, 4, 0, 4'096, random);
  return batch;
}

// 512 requests of 1,000 to 9,000 tokens in 1 to 3 ranges, each computing its last token.
inline Batch decode_batch() {
  Random random(512);
  Batch batch(512);
  for (int32_t row = 0; row < 512; ++row) {
    const int64_t tokens = 1'000 + random.below(8'000);
    const auto blocks = static_cast<int32_t>((tokens + kSlotBlock - 1) / kSlotBlock);
    batch.add(row, blocks, 1 + random.below(3), tokens - 1, tokens, random);
  }
  return batch;
}

// Not inlined: the block size must stay a run-time value, as it is for vLLM's kernel.
[[gnu::noinline]] inline void paged_slots(const Batch& batch, int64_t block_size, int64_t* out) {
  for (int32_t row = 0; row < batch.num_reqs; ++row) {
    const BlockId* ids = &batch.block_table[static_cast<size_t>(row) * kMaxRowBlocks];
    for (int32_t t = batch.query_start_loc[row]; t < batch.query_start_loc[row + 1]; ++t) {
      const int64_t position = batch.positions[t];
      out[t] = ids[position / block_size] * block_size + position % block_size;
    }
  }
}

[[gnu::noinline]] inline void paged_shift_slots(const Batch& batch, int shift, int64_t* out) {
  const int64_t mask = (int64_t{1} << shift) - 1;
  for (int32_t row = 0; row < batch.num_reqs; ++row) {
    const BlockId* ids = &batch.block_table[static_cast<size_t>(row) * kMaxRowBlocks];
    for (int32_t t = batch.query_start_loc[row]; t < batch.query_start_loc[row + 1]; ++t) {
      const int64_t position = batch.positions[t];
      out[t] = (int64_t{ids[position >> shift]} << shift) + (position & mask);
    }
  }
}

[[gnu::noinline]] inline int64_t range_slots(const Batch& batch, int32_t block_size, int64_t* out) {
  const auto tokens = static_cast<int64_t>(batch.positions.size());
  return batch.ranges.compute_slots(batch.num_reqs, batch.query_start_loc.data(),
                                    batch.positions.data(), tokens, out, tokens, block_size);
}

inline void check_equal(Batch& batch) {
  std::vector<int64_t> paged(batch.slots.size());
  paged_slots(batch, kSlotBlock, paged.data());
  range_slots(batch, kSlotBlock, batch.slots.data());
  if (paged != batch.slots) throw InvariantError("paged and range slots differ in the benchmark");
}

inline void run_paged(Round& round, Batch batch) {
  check_equal(batch);
  const auto call = [&] {
    paged_slots(batch, kSlotBlock, batch.slots.data());
    keep(batch.slots[0]);
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("positions", static_cast<int64_t>(batch.positions.size()));
  round.count("loads", static_cast<int64_t>(batch.positions.size()));
}

inline void run_paged_shift(Round& round, Batch batch) {
  const auto call = [&] {
    paged_shift_slots(batch, 4, batch.slots.data());
    keep(batch.slots[0]);
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("positions", static_cast<int64_t>(batch.positions.size()));
  round.count("loads", static_cast<int64_t>(batch.positions.size()));
}

inline void run_range(Round& round, Batch batch) {
  check_equal(batch);
  int64_t loads = 0;
  const auto call = [&] {
    loads = range_slots(batch, kSlotBlock, batch.slots.data());
    keep(batch.slots[0]);
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("positions", static_cast<int64_t>(batch.positions.size()));
  round.count("loads", loads);
}

}  // namespace tagma::bench
