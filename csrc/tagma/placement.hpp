// Where new blocks go: the policy seam and the policy in use.
//
// A policy only chooses; it changes nothing. It sees the holes and, for each block, how many blocks
// its owner hopes to grow into behind it (the headroom). Headroom is a wish, not a reservation: the
// blocks stay free, count as free, and are taken when nothing else fits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tagma/hole_index.hpp"

namespace tagma {

struct PlacementRequest {
  int32_t count;     // blocks still to place
  int32_t headroom;  // blocks the request hopes to grow into behind them
  BlockId tail;      // its last block so far, or the null block
};

struct Placement {
  BlockId hole_start;  // the hole to carve
  BlockRange range;    // inside that hole, at most `count` blocks
};

class PlacementPolicy {
 public:
  virtual ~PlacementPolicy() = default;

  // Called until all blocks are placed. At least one hole exists. `headroom` holds, per block, the
  // growth its owner hopes for behind it.
  virtual Placement place(const HoleIndex& holes, const std::vector<int32_t>& headroom,
                          int32_t alignment, const PlacementRequest& request) const = 0;
};

// Grow in place; else the best-fitting hole that leaves everybody's headroom alone; else the best
// fit at the far end of somebody's headroom; else the largest hole, whole.
class BestFitPlacement final : public PlacementPolicy {
 public:
  Placement place(const HoleIndex& holes, const std::vector<int32_t>& headroom, int32_t alignment,
                  const PlacementRequest& request) const override {
    if (request.tail != kNullBlock) {
      const BlockRange behind = holes.hole_at(request.tail + 1);
      if (behind.count > 0) {
        return {behind.start, {behind.start, std::min(request.count, behind.count)}};
      }
    }
    for (const int32_t room : {request.count + request.headroom, request.count}) {
      const Placement polite = behind_headroom(holes, headroom, alignment, room, request.count);
      if (polite.range.count > 0) return polite;
      if (request.headroom == 0) break;
    }
    const BlockRange fit = holes.best_fit(request.count);
    if (fit.count > 0) return {fit.start, {fit.end() - request.count, request.count}};
    const BlockRange largest = holes.largest();
    return {largest.start, largest};
  }

 private:
  // Candidates looked at before giving up politeness; bounds the cost of a placement.
  static constexpr int kCandidates = 16;

  // The hole that is shortest after the headroom in front of it is left free, of `room` or more.
  static Placement behind_headroom(const HoleIndex& holes, const std::vector<int32_t>& headroom,
                                   int32_t alignment, int32_t room, int32_t count) {
    Placement best{0, {0, 0}};
    int32_t best_left = 0;
    int candidates = 0;
    holes.visit_at_least(room, [&](BlockRange hole, bool) {
      const int32_t wish = headroom[static_cast<size_t>(hole.start) - 1];
      const int32_t gap = (wish + alignment - 1) / alignment * alignment;
      const int32_t left = hole.count - gap;
      if (left >= room && (best.range.count == 0 || left < best_left)) {
        best = {hole.start, {hole.start + gap, count}};
        best_left = left;
      }
      return ++candidates < kCandidates && best_left != room;
    });
    return best;
  }
};

}  // namespace tagma
