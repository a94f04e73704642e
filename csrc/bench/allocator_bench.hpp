// kv_allocator: ranges taken, grown, shared and given back in a pool of 65,536 blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "bench/round.hpp"
#include "tagma/kv_allocator.hpp"

namespace tagma::bench {

constexpr int32_t kPoolBlocks = 65'536;

// A prompt of 64 blocks (1,024 tokens at 16 a block) arrives and leaves.
inline void allocator_allocate_release(Round& round) {
  KvAllocator allocator(kPoolBlocks);
  RangeList blocks;
  const auto call = [&] {
    blocks.clear();
    allocator.allocate(64, 8, kNullBlock, blocks);
    allocator.release(blocks);
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("blocks_per_call", 64);
}

// A request grows by one block a call; after 32 it ends and the next begins.
inline void allocator_grow(Round& round) {
  KvAllocator allocator(kPoolBlocks);
  RangeList blocks;
  const auto call = [&] {
    const int32_t held = blocks.num_blocks();
    if (held == 32) {
      allocator.release(blocks);
      blocks.clear();
    }
    allocator.allocate(1, 31 - held % 32, blocks.tail(), blocks);
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("ranges_at_end", blocks.num_ranges());
}

// A cached prefix of 64 blocks is taken by one more request and let go.
inline void allocator_prefix_acquire_release(Round& round) {
  KvAllocator allocator(kPoolBlocks);
  RangeList prefix;
  allocator.allocate(64, 0, kNullBlock, prefix);
  for (const BlockRange& range : prefix.ranges()) {
    for (BlockId b = range.start; b < range.end(); ++b) allocator.cache(b);
  }
  allocator.release(prefix);
  const auto call = [&] {
    allocator.acquire(prefix);
    allocator.release(prefix);
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("blocks_per_call", 64);
}

// The least recently used block that only the cache references is evicted.
inline void allocator_evict_cache_only(Round& round) {
  KvAllocator allocator(kPoolBlocks);
  const auto call = [&] { allocator.uncache(allocator.lru_victim()); };
  bool warm = false;
  while (round.left() > 0) {
    RangeList blocks;
    allocator.allocate(kPoolBlocks - 2, 0, kNullBlock, blocks);
    for (const BlockRange& range : blocks.ranges()) {
      for (BlockId b = range.start; b < range.end(); ++b) allocator.cache(b);
    }
    allocator.release(blocks);
    if (!warm) round.warm_up(call);
    warm = true;
    round.time(std::min<int64_t>(round.left(), allocator.num_idle()), call);
    while (allocator.num_idle() > 0) call();
  }
}

}  // namespace tagma::bench
