// Protocols that are values: whatever way a scope is left, everything is as it was, unless it was
// settled or kept.
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tagma/kv_allocator.hpp"
#include "tagma/rollback.hpp"
#include "tests/block_model.hpp"
#include "tests/check.hpp"

namespace {

using tagma::AllocatorOptions;
using tagma::BlockId;
using tagma::BlockRange;
using tagma::HoleIndex;
using tagma::KvAllocator;
using tagma::RangeList;
using tagma::Rollback;
using tagma::UsageError;

enum class Exit { kEnd, kReturn, kThrow };
constexpr Exit kExits[] = {Exit::kEnd, Exit::kReturn, Exit::kThrow};

// Runs work() in a scope of its own and leaves that in the given way.
template <typename Work>
void leave(Exit exit, Work&& work) {
  try {
    work(exit);
    CHECK(exit != Exit::kThrow);
  } catch (const std::runtime_error&) {
    CHECK(exit == Exit::kThrow);
  }
}

// Live [1, 3), idle [3, 6), a hole [6, 8), idle [8, 9), a hole [9, 20), live [20, 21): two idle
// blocks are cold.
class Layout {
 public:
  Layout() : allocator(options()), model(21) {
    allocator.allocate(20, 0, tagma::kNullBlock, blocks_);
    model.take(blocks_);
    for (const BlockId b : {1, 3, 4, 5, 8}) {
      allocator.cache(b);
      model.cache(b);
    }
    for (const BlockRange range : {BlockRange{3, 17}}) {
      allocator.release(RangeList(range));
      model.release(RangeList(range));
    }
    compare();
  }

  void compare() const { model.compare(allocator, kSlack); }

  std::vector<BlockRange> rooms() const {
    std::vector<BlockRange> out;
    allocator.rooms().visit_by_address([&](BlockRange room) { out.push_back(room); });
    return out;
  }

  KvAllocator allocator;
  BlockModel model;

 private:
  static constexpr int32_t kSlack = 2;

  static AllocatorOptions options() {
    AllocatorOptions out;
    out.num_blocks = 21;
    out.idle_can_move = true;
    out.policy.slack = kSlack;
    return out;
  }

  RangeList blocks_;
};

// Each window in the room, each number of its idle blocks moved away before the scope is left.
void a_reservation_that_is_not_settled_opens_its_window_again() {
  for (const Exit exit : kExits) {
    for (BlockId start = 3; start < 20; ++start) {
      for (int32_t count = 1; start + count <= 20; ++count) {
        for (int32_t moved = 0; moved <= 4; ++moved) {
          Layout layout;
          const BlockRange window{start, count};
          leave(exit, [&](Exit way) {
            KvAllocator::Reservation reservation(layout.allocator, window);
            // Nothing in the window can be placed into meanwhile.
            CHECK(layout.allocator.free_spaces().room_around(start).count == 0);
            int32_t left = moved;
            for (BlockId b = start; b < window.end() && left > 0; ++b) {
              BlockId to = 19;  // a block of the hole outside
              while (to >= 9 && (window.contains(to) || !layout.model.in_hole(to))) --to;
              if (!layout.model.cached(b) || to < 9) continue;
              reservation.relocate(b, to);
              layout.model.relocate(b, to);
              --left;
            }
            if (way == Exit::kReturn) return;
            if (way == Exit::kThrow) throw std::runtime_error("in the middle");
          });
          layout.compare();
          CHECK(layout.rooms() == (std::vector<BlockRange>{{3, 17}}));
        }
      }
    }
  }
}

void a_settled_reservation_is_live_and_the_rest_a_hole() {
  for (int32_t count = 0; count <= 11; ++count) {
    Layout layout;
    {
      KvAllocator::Reservation reservation(layout.allocator, {9, 11});
      reservation.settle(count);
    }
    if (count > 0) layout.model.take(RangeList({9, count}));
    layout.compare();
    CHECK(layout.allocator.num_free() == 17 - count);
  }
}

void a_reservation_of_a_foreign_window_is_refused() {
  for (const BlockRange bad : {BlockRange{0, 2}, BlockRange{20, 2}, BlockRange{-1, 3}}) {
    Layout layout;
    CHECK_THROWS(KvAllocator::Reservation(layout.allocator, bad), UsageError);
    layout.compare();
  }
}

void hidden_rooms_are_shown_again() {
  for (const Exit exit : kExits) {
    for (BlockId first = 3; first < 20; ++first) {
      for (BlockId second = first; second <= 20; ++second) {
        Layout layout;
        leave(exit, [&](Exit way) {
          KvAllocator::HiddenRooms hidden(layout.allocator);
          hidden.hide({3, first - 3});
          hidden.hide({second, 20 - second});
          hidden.hide({7, 0});  // nothing
          CHECK(layout.allocator.rooms().num_blocks() == second - first);
          CHECK(layout.allocator.num_free() == 17);  // they are free all the same
          if (way == Exit::kReturn) return;
          if (way == Exit::kThrow) throw std::runtime_error("in the middle");
        });
        layout.compare();
        CHECK(layout.rooms() == (std::vector<BlockRange>{{3, 17}}));
      }
    }
  }
}

void what_is_not_kept_is_undone() {
  for (const Exit exit : kExits) {
    for (const bool kept : {false, true}) {
      int undone = 0;
      leave(exit, [&](Exit way) {
        Rollback undo([&] { ++undone; });
        if (kept) undo.keep();
        CHECK(undone == 0);
        if (way == Exit::kReturn) return;
        if (way == Exit::kThrow) throw std::runtime_error("in the middle");
      });
      CHECK(undone == (kept ? 0 : 1));
    }
  }
}

void several_are_undone_in_reverse() {
  std::vector<int> order;
  {
    Rollback first([&] { order.push_back(1); });
    Rollback second([&] { order.push_back(2); });
    Rollback kept([&] { order.push_back(3); });
    kept.keep();
  }
  CHECK((order == std::vector<int>{2, 1}));
}

}  // namespace

int main() {
  return run_tests({
      {"a reservation that is not settled opens its window again",
       a_reservation_that_is_not_settled_opens_its_window_again},
      {"a settled reservation is live, and the rest a hole",
       a_settled_reservation_is_live_and_the_rest_a_hole},
      {"a reservation of a foreign window is refused",
       a_reservation_of_a_foreign_window_is_refused},
      {"hidden rooms are shown again", hidden_rooms_are_shown_again},
      {"what is not kept is undone", what_is_not_kept_is_undone},
      {"several are undone in reverse", several_are_undone_in_reverse},
  });
}
