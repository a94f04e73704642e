// The numbers that decide where blocks go and what may move: one value, set when a pool is made.
//
// Each was measured on the traces of docs/compaction.md.
#pragma once

#include <cstdint>

#include "tagma/errors.hpp"

namespace tagma {

struct Policy {
  // Idle blocks, from the oldest, that are cold: they may be evicted before their turn where that
  // completes a range.
  int32_t slack = 0;
  // The slack grows up to this as long as nobody hits cold blocks; at most the slack: it is fixed.
  int32_t most_slack = 0;
  // Rooms that a placement looks at before it gives up politeness; bounds its cost.
  int32_t candidates = 16;
  // As long as holes are fewer than one in so many blocks, and than the slack, moved blocks may
  // have cold ones evicted for the sake of their new place.
  int32_t spare_holes_share = 400;
  // The percentile of what recent requests grew by that a row hopes for.
  int32_t headroom_percent = 80;
  // The longest end of a row, in blocks, that moves to where the row can grow.
  int32_t longest_tail = 2048;
  // Ranges of a prefix hit from which on it is gathered into one.
  int32_t gather_from = 4;

  bool has_slack() const { return slack > 0 || most_slack > 0; }

  // Throws UsageError if a number makes no sense.
  void check() const {
    if (slack < 0) throw UsageError(message("slack=", slack, " is negative"));
    if (most_slack < 0) throw UsageError(message("most_slack=", most_slack, " is negative"));
    if (candidates < 1) throw UsageError(message("candidates=", candidates, " is below 1"));
    if (spare_holes_share < 1) {
      throw UsageError(message("spare_holes_share=", spare_holes_share, " is below 1"));
    }
    if (headroom_percent < 0 || headroom_percent > 100) {
      throw UsageError(message("headroom_percent=", headroom_percent, " is outside 0 to 100"));
    }
    if (longest_tail < 0) throw UsageError(message("longest_tail=", longest_tail, " is negative"));
    if (gather_from < 2) throw UsageError(message("gather_from=", gather_from, " is below 2"));
  }
};

}  // namespace tagma
