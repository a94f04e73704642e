// An order in which block copies can be made one after the other, as if all sources were read
// first.
//
// A step's copies are meant simultaneously: 1->2 and 2->1 exchange two blocks. Destinations are
// distinct, so each block has at most one writer, and a copy has to wait only for those that read
// its destination. Copies that wait for each other in a circle are cycles of blocks, nothing more
// tangled, and one block's worth of scratch breaks a cycle of any length.
//
//     copies 3->5 5->7 1->2 2->1      blocks 7 <- 5 <- 3 in this order; 1 and 2 rotate
//
// For memory where a run of blocks is one stretch, copies are joined into runs (plan_runs). For a
// GPU, where whoever copies the same bytes of every block needs no order with anyone else, they are
// cut into segments that do not touch each other's blocks (plan_segments).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tagma/block_range.hpp"
#include "tagma/errors.hpp"
#include "tagma/move_log.hpp"

namespace tagma {

// One step of a plan: nodes[0] takes the content of nodes[1], that takes nodes[2]'s, and so on,
// for `count` consecutive blocks from each node on. `closed`: the last takes what nodes[0] held.
// An open step has two nodes, and its two runs may overlap: it means memmove.
struct MoveStep {
  int32_t first_node = 0;
  int32_t num_nodes = 0;
  int32_t count = 0;
  bool closed = false;
};

struct MovePlan {
  std::vector<MoveStep> steps;
  std::vector<BlockId> nodes;
};

// Copies that wait for nobody outside the segment. `kFree`: they may run in any order. `kOrdered`:
// one after the other, or several at once if they read before they write. A block id: likewise,
// and the last copy takes what that block held before the segment began.
struct MoveSegment {
  static constexpr int32_t kFree = -2;
  static constexpr int32_t kOrdered = -1;

  int32_t first = 0;
  int32_t end = 0;
  int32_t kind = kFree;
};

struct SegmentPlan {
  std::vector<MoveSegment> segments;  // longest chains first
  std::vector<BlockCopy> copies;      // by segment
};

// Plans for a pool of blocks. Keeps an array over the blocks between calls, so that a plan costs
// O(copies log copies). Throws UsageError, changing nothing, for ids outside the pool and for a
// destination that is named twice.
class MovePlanner {
 public:
  explicit MovePlanner(int32_t num_blocks)
      : writer_(static_cast<size_t>(checked_size(num_blocks)), kNone),
        readers_(static_cast<size_t>(num_blocks), 0) {}

  int32_t num_blocks() const { return static_cast<int32_t>(writer_.size()); }

  MovePlan plan_runs(const std::vector<BlockCopy>& copies) {
    const std::vector<BlockCopy> sorted = checked(copies);
    MovePlan plan;
    const std::vector<BlockCopy> tangled = untangled_runs(sorted, &plan);
    if (tangled.empty()) return plan;
    const Order order = order_of(tangled);
    size_t at = 0;
    for (; at < order.num_acyclic; ++at) append(tangled[order.copies[at]], &plan);
    rotate_cycles(tangled, order, &plan);
    return plan;
  }

  // Free copies come `batch` to a segment.
  SegmentPlan plan_segments(const std::vector<BlockCopy>& copies, int32_t batch) {
    if (batch < 1) throw UsageError(message("segments of ", batch, " copies"));
    const std::vector<BlockCopy> sorted = checked(copies);
    std::vector<BlockCopy> free;
    std::vector<BlockCopy> bound;
    mark(sorted);
    for (const BlockCopy& copy : sorted) {
      const bool waits = readers_[copy.to] > 0 || writer_[copy.from] != kNone;
      (waits ? bound : free).push_back(copy);
    }
    unmark(sorted);
    SegmentPlan plan;
    plan.copies.reserve(sorted.size());
    append_bound(bound, &plan);
    for (size_t i = 0; i < free.size(); ++i) {
      if (i % static_cast<size_t>(batch) == 0) open_segment(MoveSegment::kFree, &plan);
      plan.copies.push_back(free[i]);
      ++plan.segments.back().end;
    }
    return plan;
  }

 private:
  static constexpr int32_t kNone = -1;

  struct Run {
    BlockId from;
    BlockId to;
    int32_t count;
  };

  // Indices of copies: first those that can be made one after the other, then cycles, each whole
  // and in order of its writes. `cycle_first` holds where each cycle begins.
  struct Order {
    std::vector<size_t> copies;
    size_t num_acyclic = 0;
    std::vector<size_t> cycle_first;
  };

  static int32_t checked_size(int32_t num_blocks) {
    if (num_blocks < 1) throw UsageError(message("a pool of ", num_blocks, " blocks"));
    return num_blocks;
  }

  // Without copies of a block to itself, by destination.
  std::vector<BlockCopy> checked(const std::vector<BlockCopy>& copies) const {
    std::vector<BlockCopy> out;
    out.reserve(copies.size());
    for (const BlockCopy& copy : copies) {
      for (const BlockId block : {copy.from, copy.to}) {
        if (block < 0 || block >= num_blocks()) {
          throw UsageError(
              message("block ", block, " is outside the pool of ", num_blocks(), " blocks"));
        }
      }
      out.push_back(copy);
    }
    const auto by_destination = [](BlockCopy a, BlockCopy b) { return a.to < b.to; };
    std::sort(out.begin(), out.end(), by_destination);
    for (size_t i = 1; i < out.size(); ++i) {
      if (out[i].to == out[i - 1].to) {
        throw UsageError(message("block ", out[i].to, " is the destination of two copies"));
      }
    }
    const auto still = [](BlockCopy copy) { return copy.from == copy.to; };
    out.erase(std::remove_if(out.begin(), out.end(), still), out.end());
    return out;
  }

  // While copies are marked, writer_ has the index of the copy that ends in a block, and readers_
  // the number of copies that begin there.
  void mark(const std::vector<BlockCopy>& copies) {
    for (size_t i = 0; i < copies.size(); ++i) {
      writer_[copies[i].to] = static_cast<int32_t>(i);
      ++readers_[copies[i].from];
    }
  }
  void unmark(const std::vector<BlockCopy>& copies) {
    for (const BlockCopy& copy : copies) {
      writer_[copy.to] = kNone;
      readers_[copy.from] = 0;
    }
  }

  // Plans the runs that wait for each other in no circle, whole; returns the copies of the others.
  std::vector<BlockCopy> untangled_runs(const std::vector<BlockCopy>& sorted, MovePlan* plan) {
    std::vector<Run> runs;
    for (const BlockCopy& copy : sorted) {
      const bool joins_last = !runs.empty() && runs.back().from + runs.back().count == copy.from &&
                              runs.back().to + runs.back().count == copy.to;
      if (joins_last) {
        ++runs.back().count;
      } else {
        runs.push_back({copy.from, copy.to, 1});
      }
    }
    for (size_t r = 0; r < runs.size(); ++r) {
      for (int32_t i = 0; i < runs[r].count; ++i) {
        writer_[runs[r].to + i] = static_cast<int32_t>(r);
      }
    }
    // How many blocks that a run writes are still to be read by others.
    std::vector<int32_t> waits(runs.size(), 0);
    const auto each_overwritten = [&](size_t r, const auto& body) {
      for (int32_t i = 0; i < runs[r].count; ++i) {
        const int32_t writer = writer_[runs[r].from + i];
        if (writer != kNone && static_cast<size_t>(writer) != r) body(static_cast<size_t>(writer));
      }
    };
    for (size_t r = 0; r < runs.size(); ++r) each_overwritten(r, [&](size_t w) { ++waits[w]; });
    std::vector<size_t> ready;
    for (size_t r = 0; r < runs.size(); ++r) {
      if (waits[r] == 0) ready.push_back(r);
    }
    for (size_t at = 0; at < ready.size(); ++at) {
      each_overwritten(ready[at], [&](size_t w) {
        if (--waits[w] == 0) ready.push_back(w);
      });
    }
    for (const BlockCopy& copy : sorted) writer_[copy.to] = kNone;
    for (const size_t r : ready) append(runs[r], plan);
    std::vector<BlockCopy> tangled;
    for (size_t r = 0; r < runs.size(); ++r) {
      if (waits[r] == 0) continue;
      for (int32_t i = 0; i < runs[r].count; ++i) {
        tangled.push_back({runs[r].from + i, runs[r].to + i});
      }
    }
    return tangled;
  }

  // O(copies).
  Order order_of(const std::vector<BlockCopy>& copies) {
    Order order;
    order.copies.reserve(copies.size());
    std::vector<char> done(copies.size(), 0);
    mark(copies);
    for (size_t i = 0; i < copies.size(); ++i) {
      if (readers_[copies[i].to] == 0) order.copies.push_back(i);
    }
    for (size_t at = 0; at < order.copies.size(); ++at) {
      const BlockCopy copy = copies[order.copies[at]];
      done[order.copies[at]] = 1;
      const int32_t writer = writer_[copy.from];
      if (--readers_[copy.from] == 0 && writer != kNone) {
        order.copies.push_back(static_cast<size_t>(writer));
      }
    }
    order.num_acyclic = order.copies.size();
    for (size_t i = 0; i < copies.size(); ++i) {
      if (done[i]) continue;
      order.cycle_first.push_back(order.copies.size());
      for (size_t next = i; !done[next]; next = static_cast<size_t>(writer_[copies[next].from])) {
        done[next] = 1;
        order.copies.push_back(next);
      }
    }
    unmark(copies);
    return order;
  }

  // A copy or run behind the last step; joined with it if both are parts of one longer run.
  static void append(Run run, MovePlan* plan) {
    if (!plan->steps.empty() && !plan->steps.back().closed) {
      MoveStep& last = plan->steps.back();
      BlockId* nodes = &plan->nodes[static_cast<size_t>(last.first_node)];
      if (nodes[0] + last.count == run.to && nodes[1] + last.count == run.from) {
        last.count += run.count;
        return;
      }
      if (run.to + run.count == nodes[0] && run.from + run.count == nodes[1]) {
        nodes[0] = run.to;
        nodes[1] = run.from;
        last.count += run.count;
        return;
      }
    }
    plan->steps.push_back({static_cast<int32_t>(plan->nodes.size()), 2, run.count, false});
    plan->nodes.push_back(run.to);
    plan->nodes.push_back(run.from);
  }
  static void append(BlockCopy copy, MovePlan* plan) { append(Run{copy.from, copy.to, 1}, plan); }

  // Cycles; those that run side by side, block by block, as one.
  void rotate_cycles(const std::vector<BlockCopy>& copies, const Order& order, MovePlan* plan) {
    // source[b]: what b takes, of blocks on cycles that are not planned yet.
    for (size_t at = order.num_acyclic; at < order.copies.size(); ++at) {
      const BlockCopy copy = copies[order.copies[at]];
      writer_[copy.to] = copy.from;
    }
    for (const size_t first : order.cycle_first) {
      const BlockId start = copies[order.copies[first]].to;
      if (writer_[start] == kNone) continue;
      MoveStep step{static_cast<int32_t>(plan->nodes.size()), 0, 1, true};
      for (BlockId block = start; writer_[block] != kNone; ++step.num_nodes) {
        plan->nodes.push_back(block);
        const BlockId source = writer_[block];
        writer_[block] = kNone;
        block = source;
      }
      const BlockId* nodes = &plan->nodes[static_cast<size_t>(step.first_node)];
      const auto goes_on = [&] {
        for (int32_t i = 0; i < step.num_nodes; ++i) {
          const int64_t block = int64_t{nodes[i]} + step.count;
          if (block >= num_blocks()) return false;
          const int64_t source = int64_t{nodes[(i + 1) % step.num_nodes]} + step.count;
          if (writer_[static_cast<size_t>(block)] != source) return false;
        }
        return true;
      };
      while (goes_on()) {
        for (int32_t i = 0; i < step.num_nodes; ++i) writer_[nodes[i] + step.count] = kNone;
        ++step.count;
      }
      plan->steps.push_back(step);
    }
  }

  static void open_segment(int32_t kind, SegmentPlan* plan) {
    const int32_t at = static_cast<int32_t>(plan->copies.size());
    plan->segments.push_back({at, at, kind});
  }

  // Copies that must be ordered: a segment for each block that is read and never written, with
  // all that comes from it, and for each cycle, with what hangs on it.
  void append_bound(const std::vector<BlockCopy>& copies, SegmentPlan* plan) {
    if (copies.empty()) return;
    const Order order = order_of(copies);
    std::vector<int32_t> segment_of(copies.size(), kNone);
    std::vector<int32_t> kinds;
    for (const size_t first : order.cycle_first) {
      for (size_t at = first; at < order.copies.size(); ++at) {
        if (at > first && at_cycle_start(order, at)) break;
        segment_of[order.copies[at]] = static_cast<int32_t>(kinds.size());
      }
      kinds.push_back(copies[order.copies[first]].to);
    }
    // Backwards, whoever writes a source comes before whoever reads it.
    mark(copies);
    for (size_t at = order.num_acyclic; at-- > 0;) {
      const size_t copy = order.copies[at];
      const int32_t writer = writer_[copies[copy].from];
      if (writer == kNone) kinds.push_back(MoveSegment::kOrdered);
      segment_of[copy] = writer == kNone ? static_cast<int32_t>(kinds.size()) - 1
                                         : segment_of[static_cast<size_t>(writer)];
    }
    unmark(copies);
    std::vector<std::vector<BlockCopy>> members(kinds.size());
    for (const size_t copy : order.copies) {
      members[static_cast<size_t>(segment_of[copy])].push_back(copies[copy]);
    }
    std::vector<size_t> by_length(kinds.size());
    for (size_t i = 0; i < by_length.size(); ++i) by_length[i] = i;
    std::stable_sort(by_length.begin(), by_length.end(),
                     [&](size_t a, size_t b) { return members[a].size() > members[b].size(); });
    for (const size_t i : by_length) {
      open_segment(kinds[i], plan);
      plan->copies.insert(plan->copies.end(), members[i].begin(), members[i].end());
      plan->segments.back().end = static_cast<int32_t>(plan->copies.size());
    }
  }
  static bool at_cycle_start(const Order& order, size_t at) {
    return std::binary_search(order.cycle_first.begin(), order.cycle_first.end(), at);
  }

  std::vector<int32_t> writer_;   // [block], kNone between calls
  std::vector<int32_t> readers_;  // [block], 0 between calls
};

}  // namespace tagma
