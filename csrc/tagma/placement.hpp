// Where new blocks go.
//
// A placement only chooses; it changes nothing. It sees the free space and, for each block, how
// many blocks its owner hopes to grow into behind it (the headroom). Headroom is a wish, not a
// reservation: the blocks stay free, count as free, and are taken when nothing else fits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tagma/block_bitmap.hpp"
#include "tagma/hole_index.hpp"

namespace tagma {

struct PlacementRequest {
  int32_t count;     // blocks still to place
  int32_t certain;   // blocks that will follow them for sure: the rest of a prompt
  int32_t headroom;  // blocks the request hopes to grow into behind them, certain ones included
  BlockId tail;      // its last block so far, or the null block
};

struct Placement {
  BlockId space_start;  // the hole or room to take it from
  BlockRange range;     // inside it, at most `count` blocks
};

// What is chosen from: holes, or rooms whose idle blocks must be moved away first.
struct Choices {
  const HoleIndex& spaces;
  const std::vector<int32_t>& headroom;  // [block] growth hoped for behind it
  int32_t alignment;
  const BlockBitmap* warm;  // blocks that cost a move; null for holes
  const BlockBitmap* used;  // idle blocks in a room, warm or cold; null for holes
  int32_t evictable;        // cold blocks that are to be evicted anyway
};

// Grow in place; else among the best-fitting spaces that leave everybody's headroom alone the one
// with the fewest blocks to move; else the best fit at the far end of somebody's headroom; else the
// largest space, whole.
class BestFitPlacement {
 public:
  // Looks at `candidates` spaces before it gives up politeness.
  explicit BestFitPlacement(int32_t candidates) : candidates_(candidates) {}

  // (A part of) the blocks; to be called until all are placed. At least one space exists.
  Placement place(const Choices& free, const PlacementRequest& request) const {
    if (request.tail != kNullBlock) {
      const BlockRange behind = free.spaces.hole_at(request.tail + 1);
      if (behind.count > 0) {
        return {behind.start, {behind.start, std::min(request.count, behind.count)}};
      }
    }
    Placement polite = behind_headroom(free, request.count + request.headroom, request.count);
    if (polite.range.count == 0 && request.certain < request.headroom) {
      polite = behind_headroom(free, request.count + request.certain, request.count);
    }
    if (polite.range.count > 0) return polite;
    if (request.certain == 0) return at_the_end(free, request.count);
    const BlockRange largest = free.spaces.largest();
    return {largest.start, {largest.start, std::min(request.count, largest.count)}};
  }

  // A place for all blocks with their headroom that leaves others' alone, or of count 0.
  Placement place_politely(const Choices& free, const PlacementRequest& request) const {
    return behind_headroom(free, request.count + request.headroom, request.count);
  }

  // Where to put (some of) `count` idle blocks that make room for others.
  Placement place_idle(const Choices& free, int32_t count) const {
    // Idle blocks do not grow: a hole that fits exactly is theirs, and the far end of any other.
    return at_the_end(free, count);
  }

 private:
  static Placement at_the_end(const Choices& free, int32_t count) {
    const BlockRange fit = free.spaces.best_fit(count);
    if (fit.count > 0) return {fit.start, {fit.end() - count, count}};
    const BlockRange largest = free.spaces.largest();
    return {largest.start, largest};
  }

  // The space that is shortest after the headroom in front of it is left free, of `room` or more.
  Placement behind_headroom(const Choices& free, int32_t room, int32_t count) const {
    if (free.used == nullptr) {  // nothing to weigh but the length
      const BlockRange fit = free.spaces.best_fit(room);
      if (fit.count == 0) return {0, {0, 0}};
      if (free.headroom[static_cast<size_t>(fit.start) - 1] == 0) {
        return {fit.start, {fit.start, count}};
      }
    }
    Placement best{0, {0, 0}};
    int64_t best_score = 0;
    int32_t seen = 0;
    free.spaces.visit_at_least(room, [&](BlockRange space, bool) {
      const int32_t wish = free.headroom[static_cast<size_t>(space.start) - 1];
      const int32_t gap = (wish + free.alignment - 1) / free.alignment * free.alignment;
      const int32_t left = space.count - gap;
      if (left >= room) {
        BlockId start = space.start + gap;
        int64_t score = left;
        if (free.used != nullptr) {
          int32_t warm = 0;
          start = free.warm->emptiest_window({start, left}, room, warm);
          const int32_t cold = free.used->count({start, room}) - warm;
          score = warm + std::max(cold - free.evictable, 0);
        }
        if (best.range.count == 0 || score < best_score) {
          best = {space.start, {start, count}};
          best_score = score;
        }
      }
      return ++seen < candidates_ &&
             (best.range.count == 0 || best_score != (free.used == nullptr ? room : 0));
    });
    return best;
  }

  int32_t candidates_;
};

}  // namespace tagma
