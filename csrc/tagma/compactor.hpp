// Finds new blocks for a row, and makes room for them by moving others where that is allowed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tagma/block_store.hpp"
#include "tagma/row_table.hpp"

namespace tagma {

// What may move: nothing; idle cached blocks; these and the blocks of running requests.
enum class Compaction { kOff, kIdle, kLive };

// The leading `blocks` of a row are no longer where they were when the step began.
struct RowMove {
  RowHandle row;
  RangeList blocks;
};

class Compactor {
 public:
  Compactor(BlockStore& store, RowTable& rows, Compaction mode, int32_t max_ranges)
      : store_(store), rows_(rows), mode_(mode), max_ranges_(max_ranges) {}

  // Makes `count` blocks live that continue `row`, in as few ranges as can be had, and appends them
  // to `placed`. `certain` more will follow, and `headroom` (these included) are hoped for. May
  // move the row's own tail. The caller knows that enough blocks are free.
  void place(Row& row, int32_t count, int32_t certain, int32_t headroom, int64_t step,
             RangeList& placed) {
    KvAllocator& allocator = store_.allocator();
    const BlockId tail = row.blocks.tail();
    if (!allocator.has_rooms()) {
      store_.evict_until(count);
      allocator.allocate(count, headroom, tail, placed);
      return;
    }
    if (!row.open) gather(row, count + headroom);
    allocator.set_headroom(row.blocks.tail(), 0);
    while (placed.num_blocks() < count) {
      const int32_t left = count - placed.num_blocks();
      while (allocator.rooms().num_blocks() < left) store_.evict(allocator.lru_victim());
      place_one(row, left, certain, headroom, step, placed);
    }
    allocator.set_headroom(placed.tail(), headroom);
  }

  // Moves logical blocks of a row elsewhere, if they are its own and one range.
  bool relocate(Row& row, int32_t first, int32_t last, int64_t step) {
    KvAllocator& allocator = store_.allocator();
    const RangeList part = row.blocks.slice(first, last);
    if (mode_ != Compaction::kLive || !allocator.idle_can_move() || part.num_ranges() != 1 ||
        row.grown_step == step || !allocator.is_private(part.ranges().front()) ||
        !may_leave(row, part.ranges().front())) {
      return false;
    }
    const int32_t count = part.num_blocks();
    if (allocator.rooms().num_blocks() < count) return false;
    const Placement to = allocator.choose_room(count, 0, 0, kNullBlock);
    if (to.range.count < count || count + allocator.num_warm(to.range) > store_.moves_left()) {
      return false;
    }
    store_.occupy(to.range, count, count);
    move_range(row, part.ranges().front(), to.range.start);
    return true;
  }

  // Rows whose blocks moved since the last call and that are still open. O(rows moved).
  std::vector<RowMove> take_row_moves() {
    std::vector<RowMove> out;
    for (const auto& [handle, known] : moved_) {
      if (!rows_.is_open(handle)) continue;
      Row& row = rows_.at(handle);
      row.moved = false;
      out.push_back({handle, row.blocks.slice(0, known)});
    }
    moved_.clear();
    return out;
  }

 private:
  // Blocks freed in front of a growing row at once, so that a chain is not moved block by block.
  static constexpr int32_t kClearAhead = 8;
  static constexpr int32_t kMaxTail = 2048;
  static constexpr int32_t kGatherFrom = 4;  // ranges

  struct Moved {
    RowHandle row;
    int32_t known;  // blocks of the row when the step began
  };

  void place_one(Row& row, int32_t left, int32_t certain, int32_t headroom, int64_t step,
                 RangeList& placed) {
    KvAllocator& allocator = store_.allocator();
    BlockId tail = placed.empty() ? row.blocks.tail() : placed.tail();
    if (allocator.room_around(tail + 1).count == 0 || tail == kNullBlock) {
      const BlockRange hole = allocator.choose_open(left, headroom);
      if (hole.count > 0 && (mode_ != Compaction::kLive || tail == kNullBlock)) {
        store_.occupy(hole, hole.count);
        placed.append(hole);
        return;
      }
    }
    Placement at = allocator.choose_room(left, certain, headroom, tail);
    bool in_place = tail != kNullBlock && at.range.start == tail + 1;
    if (!in_place && mode_ == Compaction::kLive) {
      if (placed.empty() && row.open && move_tail(row, left, headroom, step)) {
        tail = row.blocks.tail();
        at = allocator.choose_room(left, certain, headroom, tail);
        in_place = true;
      } else if (room_behind(at) < left + certain) {
        make_room(row, placed, left + headroom, step);
        at = allocator.choose_room(left, certain, headroom, tail);
        in_place = tail != kNullBlock && at.range.start == tail + 1;
      }
    }
    BlockRange window = at.range;
    if (in_place && allocator.num_warm(window) > 0) {
      const int32_t ahead = std::min({headroom, kClearAhead, room_behind(at) - window.count,
                                      allocator.holes().num_blocks() - window.count});
      if (ahead > 0) window.count += ahead;
    }
    store_.occupy(window, at.range.count);
    placed.append(at.range);
  }

  // A new row whose prefix hit lies in many ranges: moves the last of them, as far as no other
  // request holds them, together to where `more` blocks fit behind.
  void gather(Row& row, int32_t more) {
    KvAllocator& allocator = store_.allocator();
    const std::vector<BlockRange>& ranges = row.blocks.ranges();
    const int32_t limit = std::min(store_.optional_moves_left(), allocator.num_free());
    int32_t own = 0;
    int32_t pieces = 0;
    for (size_t i = ranges.size(); i-- > 0;) {
      if (own + ranges[i].count > limit || !allocator.is_private(ranges[i])) break;
      own += ranges[i].count;
      ++pieces;
    }
    if (pieces < kGatherFrom) return;
    const Placement to = allocator.choose_room(own, more, more, kNullBlock);
    if (!affordable(to.range, own, own)) return;
    store_.occupy(to.range, own, own);
    const RangeList old = row.blocks.slice(row.blocks.num_blocks() - own, row.blocks.num_blocks());
    row.blocks.truncate(row.blocks.num_blocks() - own);
    BlockId at = to.range.start;
    for (const BlockRange& range : old.ranges()) {
      store_.move_live(range, at, true);
      at += range.count;
    }
    row.blocks.append({to.range.start, own});
  }

  // True if `live` blocks may move into `window`, which should have `wanted` blocks. The place that
  // they leave becomes free only afterwards, so blocks may have to be evicted ahead of need: not in
  // a pool without slack, which evicts exactly by age and demand.
  bool affordable(BlockRange window, int32_t live, int32_t wanted) const {
    const KvAllocator& allocator = store_.allocator();
    return window.count >= wanted &&
           live + allocator.num_warm(window) <= store_.optional_moves_left() &&
           (allocator.slack() > 0 || allocator.holes().num_blocks() >= window.count);
  }

  // Blocks from the start of a placement to the end of its room.
  int32_t room_behind(const Placement& at) const {
    return store_.allocator().room_around(at.range.start).end() - at.range.start;
  }

  // The private end of the row's last range goes where `left` more blocks and the headroom fit
  // behind it.
  bool move_tail(Row& row, int32_t left, int32_t headroom, int64_t step) {
    KvAllocator& allocator = store_.allocator();
    if (row.blocks.empty() || row.grown_step == step) return false;
    const BlockRange last = row.blocks.ranges().back();
    const int32_t limit = std::min(store_.optional_moves_left(), kMaxTail);
    int32_t own = 0;
    while (own < last.count && own <= limit && allocator.request_refs(last.end() - 1 - own) == 1) {
      ++own;
    }
    if (move_neighbour(row, std::min(own, limit), step)) return true;
    if (own == 0 || own > limit || !may_leave(row, {last.end() - own, own})) return false;
    const Placement to = allocator.choose_room(own + left, 0, headroom, kNullBlock);
    if (!affordable(to.range, own, own + left)) return false;
    store_.occupy(to.range, own, own);
    move_range(row, {last.end() - own, own}, to.range.start);
    return true;
  }

  // The live range right behind the row's tail goes elsewhere, if it is one row's own and shorter
  // than `limit`.
  bool move_neighbour(const Row& row, int32_t limit, int64_t step) {
    KvAllocator& allocator = store_.allocator();
    const BlockId behind = row.blocks.tail() + 1;
    for (size_t slot = 0; slot < rows_.num_slots(); ++slot) {
      Row& other = rows_.slot(slot);
      if (!other.open || &other == &row) continue;
      for (const BlockRange range : other.blocks.ranges()) {
        if (range.start != behind) continue;
        if (range.count >= limit || other.grown_step == step || !allocator.is_private(range)) {
          return false;
        }
        const int32_t wish = allocator.headroom_behind(range.end() - 1);
        const Placement to = allocator.choose_room(range.count, 0, wish, kNullBlock);
        if (!affordable(to.range, range.count, range.count)) return false;
        store_.occupy(to.range, range.count, range.count);
        move_range(other, range, to.range.start);
        return true;
      }
    }
    return false;
  }

  // A part that leaves the middle of a range adds one or two: not beyond half of the cap, up to
  // which a row always finds its blocks (see KvPool::extend()).
  bool may_leave(const Row& row, BlockRange part) const {
    for (const BlockRange& range : row.blocks.ranges()) {
      if (part.start < range.start || part.end() > range.end()) continue;
      const int32_t more = (part.start > range.start ? 1 : 0) + (part.end() < range.end() ? 1 : 0);
      return row.blocks.num_ranges() + more <= std::max(max_ranges_ / 2, 1);
    }
    return false;
  }

  void move_range(Row& row, BlockRange from, BlockId to) {
    if (!row.moved) {
      row.moved = true;
      moved_.push_back({rows_.handle_of(static_cast<size_t>(row.slot)), row.blocks.num_blocks()});
    }
    store_.move_live(from, to);
    const int32_t first = row.blocks.index_of(from.start);
    row.blocks.replace(first, RangeList({to, from.count}));
    rows_.note_change(row, first);
  }

  // --- live compaction --------------------------------------------------------------------------

  // A maximal range of live blocks of one row alone, or (row < 0) of several or immovable ones.
  struct Piece {
    BlockRange range;
    int32_t row;
  };

  // Pieces in address order.
  std::vector<Piece> pieces(const Row& growing, const RangeList& placed, int64_t step) const {
    struct Edge {
      BlockId at;
      int32_t cover;  // +1 where a range begins, -1 behind its end
      int32_t row;
    };
    std::vector<Edge> edges;
    auto add = [&edges](const RangeList& blocks, int32_t row) {
      for (const BlockRange& range : blocks.ranges()) {
        edges.push_back({range.start, 1, row});
        edges.push_back({range.end(), -1, row});
      }
    };
    for (size_t slot = 0; slot < rows_.num_slots(); ++slot) {
      const Row& row = rows_.slot(slot);
      if (row.open) add(row.blocks, static_cast<int32_t>(slot));
    }
    const auto immovable = static_cast<int32_t>(rows_.num_slots());
    if (!growing.open) add(growing.blocks, immovable);
    add(placed, immovable);
    std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.at < b.at; });
    std::vector<Piece> out;
    int64_t rows = 0;  // sum of the rows that cover the current place
    int32_t cover = 0;
    for (size_t i = 0; i < edges.size();) {
      const BlockId at = edges[i].at;
      for (; i < edges.size() && edges[i].at == at; ++i) {
        cover += edges[i].cover;
        rows += int64_t{edges[i].cover} * edges[i].row;
      }
      if (cover == 0 || i == edges.size()) continue;
      int32_t row = -1;
      if (cover == 1 && rows < static_cast<int64_t>(rows_.num_slots())) {
        const Row& owner = rows_.slot(static_cast<size_t>(rows));
        if (&owner != &growing && owner.grown_step != step) row = static_cast<int32_t>(rows);
      }
      const BlockRange range{at, edges[i].at - at};
      if (row < 0 && !out.empty() && out.back().range.end() == at && out.back().row < 0) {
        out.back().range.count += range.count;
      } else {
        out.push_back({range, row});
      }
    }
    return out;
  }

  // Moves live ranges away until a room of `want` blocks exists, the cheapest first.
  bool make_room(const Row& growing, const RangeList& placed, int32_t want, int64_t step) {
    KvAllocator& allocator = store_.allocator();
    const std::vector<Piece> live = pieces(growing, placed, step);
    const BlockId begin = allocator.alignment();
    const BlockId end = begin + allocator.capacity();
    const int32_t limit = std::min(store_.optional_moves_left(), want);
    // The window from behind piece i - 1 to before piece j holds the pieces [i, j).
    size_t best_i = 0;
    size_t best_j = 0;
    int32_t best_cost = limit + 1;
    int32_t cost = 0;
    size_t j = 0;
    auto window = [&](size_t from, size_t to) {
      const BlockId start = from == 0 ? begin : live[from - 1].range.end();
      const BlockId stop = to == live.size() ? end : live[to].range.start;
      return BlockRange{start, stop - start};
    };
    for (size_t i = 0; i < live.size(); ++i) {
      if (j < i) {
        j = i;
        cost = 0;
      }
      while (j < live.size() && live[j].row >= 0 && window(i, j).count < want &&
             cost + live[j].range.count <= limit) {
        cost += live[j++].range.count;
      }
      if (j > i && window(i, j).count >= want && cost < best_cost) {
        best_i = i;
        best_j = j;
        best_cost = cost;
      }
      if (j > i) cost -= live[i].range.count;
    }
    if (best_cost > limit) return false;
    return move_away(live, best_i, best_j, window(best_i, best_j));
  }

  // Moves the pieces [i, j) out of a window that holds nothing else live.
  bool move_away(const std::vector<Piece>& live, size_t i, size_t j, BlockRange window) {
    KvAllocator& allocator = store_.allocator();
    std::vector<BlockRange> hidden;
    auto hide = [&](BlockRange range) {
      allocator.hide_room(range);
      hidden.push_back(range);
    };
    BlockId at = window.start;
    for (size_t k = i; k <= j; ++k) {
      const BlockId next = k == j ? window.end() : live[k].range.start;
      if (next > at) hide({at, next - at});
      if (k < j) at = live[k].range.end();
    }
    bool done = true;
    for (size_t k = i; k < j && done; ++k) {
      const BlockRange from = live[k].range;
      Row& row = rows_.slot(static_cast<size_t>(live[k].row));
      const int32_t wish = allocator.headroom_behind(from.end() - 1);
      done = false;
      if (!may_leave(row, from)) break;
      if (allocator.rooms().num_blocks() < from.count) break;
      const Placement to = allocator.choose_room(from.count, 0, wish, kNullBlock);
      if (!affordable(to.range, from.count, from.count)) break;
      store_.occupy(to.range, from.count, from.count);
      move_range(row, from, to.range.start);
      hide(from);
      done = true;
    }
    for (const BlockRange range : hidden) allocator.show_room(range);
    return done;
  }

  BlockStore& store_;
  RowTable& rows_;
  Compaction mode_;
  int32_t max_ranges_;
  std::vector<Moved> moved_;
};

}  // namespace tagma
