// Finds new blocks for a row, and makes room for them by moving others where that is allowed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tagma/block_store.hpp"
#include "tagma/pin_table.hpp"
#include "tagma/policy.hpp"
#include "tagma/row_table.hpp"

namespace tagma {

// What may move: nothing; idle cached blocks; these and the blocks of running requests.
enum class Compaction { kOff, kIdle, kLive };

class Compactor {
 public:
  // Pinned blocks stay where they are: `pins` says which. All arguments must outlive the compactor.
  Compactor(BlockStore& store, RowTable& rows, const PinTable& pins, Compaction mode,
            const Policy& policy, int32_t max_ranges)
      : store_(store),
        rows_(rows),
        pins_(pins),
        mode_(mode),
        policy_(policy),
        max_ranges_(max_ranges) {}

  // Makes `count` blocks live that continue `row`, in as few ranges as can be had, and appends them
  // to `placed`. `certain` more will follow, and `headroom` (these included) are hoped for. May
  // move the row's own tail; of a row that is being admitted (`fresh`) also a scattered prefix hit.
  // The caller knows that enough blocks are free.
  void place(Row& row, bool fresh, int32_t count, int32_t certain, int32_t headroom,
             RangeList& placed) {
    KvAllocator& allocator = store_.allocator();
    const BlockId tail = row.blocks.tail();
    if (!allocator.has_rooms()) {
      store_.evict_until(count);
      allocator.allocate(count, headroom, tail, placed);
      return;
    }
    if (fresh) gather(row, count + headroom);
    allocator.set_headroom(row.blocks.tail(), 0);
    while (placed.num_blocks() < count) {
      const int32_t left = count - placed.num_blocks();
      while (allocator.rooms().num_blocks() < left) store_.evict(allocator.lru_victim());
      place_one(row, fresh, left, certain, headroom, placed);
    }
    allocator.set_headroom(placed.tail(), headroom);
  }

  // Moves logical blocks of a row elsewhere, if they are its own and one range.
  bool relocate(Row& row, int32_t first, int32_t last) {
    KvAllocator& allocator = store_.allocator();
    const RangeList part = row.blocks.slice(first, last);
    if (mode_ != Compaction::kLive || !allocator.idle_can_move() || part.num_ranges() != 1 ||
        part.ranges().front().is_null() || grown_in_step(row) ||
        !allocator.is_private(part.ranges().front()) || !may_leave(row, part.ranges().front())) {
      return false;
    }
    const int32_t count = part.num_blocks();
    if (allocator.rooms().num_blocks() < count) return false;
    const Placement to = allocator.free_spaces().choose_room(count, 0, 0, kNullBlock);
    if (to.range.count < count ||
        count + allocator.free_spaces().num_warm(to.range) > store_.step().moves_left()) {
      return false;
    }
    store_.occupy(to.range, count, count);
    move_range(row, part.ranges().front(), to.range.start);
    return true;
  }

 private:
  bool grown_in_step(const Row& row) const { return row.grown_step == store_.step().number(); }

  void place_one(Row& row, bool fresh, int32_t left, int32_t certain, int32_t headroom,
                 RangeList& placed) {
    KvAllocator& allocator = store_.allocator();
    BlockId tail = placed.empty() ? row.blocks.tail() : placed.tail();
    Placement at = allocator.free_spaces().choose_room(left, certain, headroom, tail);
    bool in_place = tail != kNullBlock && at.range.start == tail + 1;
    if (!in_place && mode_ == Compaction::kLive) {
      if (placed.empty() && !fresh && move_tail(row, left, headroom)) {
        tail = row.blocks.tail();
        at = allocator.free_spaces().choose_room(left, certain, headroom, tail);
        in_place = true;
      } else if (room_behind(at) < left + certain) {
        make_room(row, placed, left + headroom);
        at = allocator.free_spaces().choose_room(left, certain, headroom, tail);
        in_place = tail != kNullBlock && at.range.start == tail + 1;
      }
    }
    store_.occupy(at.range, at.range.count);
    placed.append(at.range);
  }

  // A new row whose prefix hit lies in many ranges: moves the last of them, as far as no other
  // request holds them, together to where `more` blocks fit behind.
  void gather(Row& row, int32_t more) {
    KvAllocator& allocator = store_.allocator();
    const std::vector<BlockRange>& ranges = row.blocks.ranges();
    const int32_t limit = std::min(store_.step().optional_moves_left(), allocator.num_free());
    int32_t own = 0;
    int32_t pieces = 0;
    for (size_t i = ranges.size(); i-- > 0;) {
      if (ranges[i].is_null() || own + ranges[i].count > limit ||
          !allocator.is_private(ranges[i])) {
        break;
      }
      own += ranges[i].count;
      ++pieces;
    }
    if (pieces < policy_.gather_from) return;
    const Placement to = allocator.free_spaces().choose_room(own, more, more, kNullBlock);
    if (!affordable(to.range, own, own)) return;
    store_.occupy(to.range, own, own);
    const RangeList old = row.blocks.slice(row.blocks.num_blocks() - own, row.blocks.num_blocks());
    BlockId at = to.range.start;
    for (const BlockRange& range : old.ranges()) {
      store_.move_live(range, at, true);
      at += range.count;
    }
    rows_.replace(row, row.blocks.num_blocks() - own, RangeList({to.range.start, own}));
  }

  // True if `live` blocks may move into `window`, which should have `wanted` blocks. The place that
  // they leave becomes free only afterwards, so blocks may have to be evicted ahead of need: not in
  // a pool without slack, which evicts exactly by age and demand.
  bool affordable(BlockRange window, int32_t live, int32_t wanted) const {
    const KvAllocator& allocator = store_.allocator();
    return window.count >= wanted &&
           live + allocator.free_spaces().num_warm(window) <= store_.step().optional_moves_left() &&
           (allocator.slack() > 0 || allocator.holes().num_blocks() >= window.count);
  }

  // Blocks from the start of a placement to the end of its room.
  int32_t room_behind(const Placement& at) const {
    return store_.allocator().free_spaces().room_around(at.range.start).end() - at.range.start;
  }

  // The private end of the row's last range goes where `left` more blocks and the headroom fit
  // behind it.
  bool move_tail(Row& row, int32_t left, int32_t headroom) {
    KvAllocator& allocator = store_.allocator();
    if (row.blocks.tail() == kNullBlock || grown_in_step(row)) return false;
    const BlockRange last = row.blocks.ranges().back();
    const int32_t limit = std::min(store_.step().optional_moves_left(), policy_.longest_tail);
    int32_t own = 0;
    while (own < last.count && own <= limit && allocator.request_refs(last.end() - 1 - own) == 1) {
      ++own;
    }
    if (move_neighbour(row, std::min(own, limit))) return true;
    if (own == 0 || own > limit || !may_leave(row, {last.end() - own, own})) return false;
    const Placement to = allocator.free_spaces().choose_room(own + left, 0, headroom, kNullBlock);
    if (!affordable(to.range, own, own + left)) return false;
    store_.occupy(to.range, own, own);
    move_range(row, {last.end() - own, own}, to.range.start);
    return true;
  }

  // The live range right behind the row's tail goes elsewhere, if it is one row's own and shorter
  // than `limit`.
  bool move_neighbour(const Row& row, int32_t limit) {
    KvAllocator& allocator = store_.allocator();
    const BlockId behind = row.blocks.tail() + 1;
    if (!allocator.bounds().contains(behind) || allocator.request_refs(behind) != 1) return false;
    Row* other = rows_.sole_owner(behind);
    if (other == nullptr || other == &row || grown_in_step(*other)) return false;
    const std::vector<BlockRange>& ranges = other->blocks.ranges();
    const BlockRange range = *std::find_if(ranges.begin(), ranges.end(),
                                           [behind](BlockRange r) { return r.start == behind; });
    if (range.count >= limit || !allocator.is_private(range)) return false;
    const int32_t wish = allocator.headroom_behind(range.end() - 1);
    const Placement to = allocator.free_spaces().choose_room(range.count, 0, wish, kNullBlock);
    if (!affordable(to.range, range.count, range.count)) return false;
    store_.occupy(to.range, range.count, range.count);
    move_range(*other, range, to.range.start);
    return true;
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
    store_.move_live(from, to);
    rows_.replace(row, row.blocks.index_of(from.start), RangeList({to, from.count}));
  }

  // --- live compaction --------------------------------------------------------------------------

  // A maximal range of live blocks of one row alone, or (row < 0) of several or immovable ones.
  struct Piece {
    BlockRange range;
    int32_t row;
  };

  // Pieces in address order.
  std::vector<Piece> pieces(const Row& growing, const RangeList& placed) const {
    struct Edge {
      BlockId at;
      int32_t cover;  // +1 where a range begins, -1 behind its end
      int32_t row;
    };
    std::vector<Edge> edges;
    auto add = [&edges](const RangeList& blocks, int32_t row) {
      for (const BlockRange& range : blocks.ranges()) {
        if (range.is_null()) continue;
        edges.push_back({range.start, 1, row});
        edges.push_back({range.end(), -1, row});
      }
    };
    for (size_t slot = 0; slot < rows_.num_slots(); ++slot) {
      const Row& row = rows_.slot(slot);
      if (row.open) add(row.blocks, static_cast<int32_t>(slot));
    }
    const auto immovable = static_cast<int32_t>(rows_.num_slots());
    add(placed, immovable);
    pins_.visit([&](const RangeList& blocks) { add(blocks, immovable); });
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
        if (&owner != &growing && !grown_in_step(owner)) row = static_cast<int32_t>(rows);
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
  bool make_room(const Row& growing, const RangeList& placed, int32_t want) {
    KvAllocator& allocator = store_.allocator();
    const std::vector<Piece> live = pieces(growing, placed);
    const BlockId begin = allocator.alignment();
    const BlockId end = begin + allocator.capacity();
    const int32_t limit = std::min(store_.step().optional_moves_left(), want);
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
    KvAllocator::HiddenRooms hidden(allocator);
    BlockId at = window.start;
    for (size_t k = i; k <= j; ++k) {
      const BlockId next = k == j ? window.end() : live[k].range.start;
      hidden.hide({at, next - at});
      if (k < j) at = live[k].range.end();
    }
    for (size_t k = i; k < j; ++k) {
      const BlockRange from = live[k].range;
      Row& row = rows_.slot(static_cast<size_t>(live[k].row));
      const int32_t wish = allocator.headroom_behind(from.end() - 1);
      if (!may_leave(row, from)) return false;
      if (allocator.rooms().num_blocks() < from.count) return false;
      const Placement to = allocator.free_spaces().choose_room(from.count, 0, wish, kNullBlock);
      if (!affordable(to.range, from.count, from.count)) return false;
      store_.occupy(to.range, from.count, from.count);
      move_range(row, from, to.range.start);
      hidden.hide(from);
    }
    return true;
  }

  BlockStore& store_;
  RowTable& rows_;
  const PinTable& pins_;
  Compaction mode_;
  Policy policy_;
  int32_t max_ranges_;
};

}  // namespace tagma
