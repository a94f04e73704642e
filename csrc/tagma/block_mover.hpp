// Copies blocks in host memory by a plan: runs of blocks, no temporary beyond a fixed scratch.
//
// KV memory is regions that the same block ids address (layers, keys and values, parts of a group).
// Regions do not touch each other, so a thread that makes all of a plan's steps in one region, or
// in the same bytes of its blocks, waits for nobody. Where blocks lie back to back a run is one
// stretch of memory. Large copies bypass the cache: a store that first reads the line it overwrites
// would move half as much again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "tagma/errors.hpp"
#include "tagma/move_plan.hpp"
#include "tagma/openmp_threads.hpp"

namespace tagma {

// Block b of a region is the `bytes` bytes at address + b * stride.
struct MoverRegion {
  int64_t address = 0;
  int64_t stride = 0;
  int64_t bytes = 0;
};

class BlockMover {
 public:
  // Bytes of scratch that a thread takes to rotate a cycle; nothing else is allocated that grows
  // with the size of a block.
  static constexpr int64_t kScratch = 32 << 10;

  // The caller vouches for the memory, and that no two regions share any. Throws UsageError for
  // regions that cannot be such.
  BlockMover(int32_t num_blocks, std::vector<MoverRegion> regions)
      : planner_(num_blocks), regions_(std::move(regions)) {
    for (const MoverRegion& region : regions_) {
      if (region.address <= 0 || region.bytes < 1 || region.stride < region.bytes) {
        throw UsageError(message("a region at ", region.address, " with blocks of ", region.bytes,
                                 " bytes every ", region.stride));
      }
    }
  }

  int32_t num_blocks() const { return planner_.num_blocks(); }
  int64_t block_bytes() const {
    int64_t sum = 0;
    for (const MoverRegion& region : regions_) sum += region.bytes;
    return sum;
  }

  MovePlan plan(const std::vector<BlockCopy>& copies) { return planner_.plan_runs(copies); }

  // Makes the copies of a plan on at most `threads` threads. May be called without Python's lock.
  void run(const MovePlan& plan, int threads) const {
    if (plan.steps.empty()) return;
    int64_t moved = 0;
    for (const MoveStep& step : plan.steps) moved += step.count * block_bytes();
    const bool streams = moved >= kStreamFrom;
    const std::vector<MoverRegion> parts = split(threads);
    for_each_item(parts.size(), threads, [&](size_t i) {
      alignas(64) char scratch[kScratch];
      for (const MoveStep& step : plan.steps) {
        const BlockId* nodes = &plan.nodes[static_cast<size_t>(step.first_node)];
        if (step.closed) {
          rotate(parts[i], nodes, step, scratch);
        } else {
          copy(parts[i], nodes[1], nodes[0], step.count, streams);
        }
      }
    });
  }

 private:
  static constexpr int64_t kStreamFrom = 4 << 20;  // what fits a cache is better left there
  static constexpr int64_t kSmallestPart = 16 << 10;
  static constexpr int64_t kPartsPerThread = 4;  // so that a slow thread holds up the others less

  // The regions, cut by the bytes of a block if there are too few of them for the threads.
  std::vector<MoverRegion> split(int threads) const {
    const int64_t wanted = threads > 1 ? threads * kPartsPerThread : 1;
    const int64_t regions = static_cast<int64_t>(regions_.size());
    if (regions >= wanted) return regions_;
    std::vector<MoverRegion> parts;
    for (const MoverRegion& region : regions_) {
      const int64_t most = std::max<int64_t>(1, region.bytes / kSmallestPart);
      const int64_t pieces = std::min((wanted + regions - 1) / regions, most);
      const int64_t size = ((region.bytes + pieces - 1) / pieces + 63) / 64 * 64;
      for (int64_t at = 0; at < region.bytes; at += size) {
        parts.push_back({region.address + at, region.stride, std::min(size, region.bytes - at)});
      }
    }
    return parts;
  }

  static char* block(const MoverRegion& region, BlockId id) {
    return reinterpret_cast<char*>(region.address + id * region.stride);
  }

  static void copy(const MoverRegion& region, BlockId from, BlockId to, int32_t count,
                   bool streams) {
    if (region.stride == region.bytes) {
      copy_bytes(block(region, to), block(region, from), count * region.bytes, streams);
      return;
    }
    const bool downwards = to < from;  // the first block's place is not read by later ones
    for (int32_t i = 0; i < count; ++i) {
      const int32_t at = downwards ? i : count - 1 - i;
      copy_bytes(block(region, to + at), block(region, from + at), region.bytes, streams);
    }
  }

  static void copy_bytes(char* to, const char* from, int64_t bytes, bool streams) {
    const bool overlap = to < from + bytes && from < to + bytes;
    if (overlap) {
      std::memmove(to, from, static_cast<size_t>(bytes));
    } else if (streams) {
      stream(to, from, bytes);
    } else {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    }
  }

#if defined(__SSE2__)
  static void stream(char* to, const char* from, int64_t bytes) {
    const int64_t head = std::min<int64_t>(bytes, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
    std::memcpy(to, from, static_cast<size_t>(head));
    int64_t at = head;
    for (; at + 64 <= bytes; at += 64) {
      const auto* source = reinterpret_cast<const __m128i*>(from + at);
      auto* line = reinterpret_cast<__m128i*>(to + at);
      const __m128i a = _mm_loadu_si128(source);
      const __m128i b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2);
      const __m128i d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(line, a);
      _mm_stream_si128(line + 1, b);
      _mm_stream_si128(line + 2, c);
      _mm_stream_si128(line + 3, d);
    }
    std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
    _mm_sfence();
  }
#else
  static void stream(char* to, const char* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
#endif

  // A strip of the first node waits in the scratch while the other strips move up.
  static void rotate(const MoverRegion& region, const BlockId* nodes, const MoveStep& step,
                     char* scratch) {
    const bool dense = region.stride == region.bytes;
    const int64_t stretch = dense ? step.count * region.bytes : region.bytes;
    for (int32_t i = 0; i < (dense ? 1 : step.count); ++i) {
      for (int64_t at = 0; at < stretch; at += kScratch) {
        const auto bytes = static_cast<size_t>(std::min(kScratch, stretch - at));
        const auto strip = [&](int32_t node) { return block(region, nodes[node] + i) + at; };
        std::memcpy(scratch, strip(0), bytes);
        for (int32_t n = 1; n < step.num_nodes; ++n) std::memcpy(strip(n - 1), strip(n), bytes);
        std::memcpy(strip(step.num_nodes - 1), scratch, bytes);
      }
    }
  }

  MovePlanner planner_;
  std::vector<MoverRegion> regions_;
};

}  // namespace tagma
