// RowTable against std::map: handles name one request's rows for ever, and closed ones nothing;
// what is told of changes suffices; whose a range is, is known.
#include "tagma/row_table.hpp"

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "tests/block_model.hpp"
#include "tests/check.hpp"

namespace {

using tagma::BlockId;
using tagma::BlockRange;
using tagma::kNullBlock;
using tagma::RangeList;
using tagma::Row;
using tagma::RowChange;
using tagma::RowHandle;
using tagma::RowTable;
using tagma::UsageError;

RowHandle open_row(RowTable& table, int32_t start) {
  const RowHandle handle = table.open();
  table.append(table.at(handle), tagma::RangeList({start, 2}));
  table.at(handle).num_prompt = start;
  return handle;
}

void random_rows_agree_with_a_map() {
  RowTable table;
  std::map<RowHandle, int32_t> open;
  std::vector<RowHandle> closed;
  std::mt19937_64 random(1);
  for (int step = 0; step < 5000; ++step) {
    const bool filling = step / 300 % 2 == 0;
    if (open.empty() || random() % 4 < (filling ? 3U : 1U)) {
      const auto start = static_cast<int32_t>(1 + random() % 100000);
      const RowHandle handle = open_row(table, start);
      CHECK(handle > 0);
      CHECK(open.emplace(handle, start).second);
    } else {
      auto at = open.begin();
      std::advance(at, static_cast<int64_t>(random() % open.size()));
      table.close(at->first);
      closed.push_back(at->first);
      open.erase(at);
    }
    CHECK(table.size() == static_cast<int32_t>(open.size()));
    if (step % 20 != 0) continue;
    size_t seen = 0;
    for (size_t slot = 0; slot < table.num_slots(); ++slot) {
      if (!table.slot(slot).open) {
        CHECK(table.slot(slot).blocks.empty());
        continue;
      }
      ++seen;
      const RowHandle handle = table.handle_of(slot);
      CHECK(open.count(handle) == 1 && table.is_open(handle));
      CHECK(table.slot_of(table.at(handle)) == slot);
      CHECK(table.at(handle).num_prompt == open.at(handle));
      CHECK(table.at(handle).blocks.at(1) == open.at(handle) + 1);
    }
    CHECK(seen == open.size());
  }
  for (const RowHandle stale : closed) {
    CHECK(open.count(stale) == 0 && !table.is_open(stale));
    CHECK_THROWS(table.at(stale), UsageError);
    CHECK_THROWS(table.close(stale), UsageError);
  }
  CHECK(table.num_slots() < 300);  // slots are used again
}

void forged_handles_are_refused() {
  RowTable table;
  const RowHandle handle = open_row(table, 7);
  for (int bit = 0; bit < 64; ++bit) {
    const auto forged = static_cast<RowHandle>(static_cast<uint64_t>(handle) ^ uint64_t{1} << bit);
    CHECK(!table.is_open(forged));
    CHECK_THROWS(table.at(forged), UsageError);
  }
  for (const RowHandle bad : {RowHandle{0}, RowHandle{-1}, std::numeric_limits<RowHandle>::min(),
                              std::numeric_limits<RowHandle>::max()}) {
    CHECK_THROWS(table.close(bad), UsageError);
  }
  CHECK(table.size() == 1 && table.is_open(handle));
}

// A row that opens in a used slot inherits nothing but the next generation.
void a_used_slot_begins_afresh() {
  RowTable table;
  const RowHandle first = open_row(table, 7);
  table.at(first).num_expected = 5;
  table.at(first).grown_step = 9;
  table.close(first);
  CHECK(table.slot(0).num_expected == 0 && table.slot(0).grown_step == -1 &&
        table.slot(0).num_prompt == 0);
  const RowHandle second = open_row(table, 8);
  CHECK(second != first && (second & 0xffffffff) == (first & 0xffffffff));
  CHECK(table.at(second).num_expected == 0 && table.at(second).generation == 2);
  CHECK(table.memory_bytes() >= sizeof(Row));
}

void groups_have_rows_side_by_side() {
  for (const int32_t groups : {2, 3}) {
    RowTable table(groups);
    const RowHandle first = table.open();
    const RowHandle second = table.open();
    for (int32_t g = 0; g < groups; ++g) {
      table.append(table.at(first, g), RangeList({10 * g + 1, 2}));
      CHECK(table.slot_of(table.at(first, g)) == static_cast<size_t>(g));
      CHECK(table.slot_of(table.at(second, g)) == static_cast<size_t>(groups + g));
      CHECK(table.handle_of(table.slot_of(table.at(second, g))) == second);
    }
    for (const int32_t bad : {-1, groups}) CHECK_THROWS(table.at(first, bad), UsageError);
    CHECK(table.size() == 2 && table.num_slots() == 2 * static_cast<size_t>(groups));
    table.close(first);
    for (int32_t g = 0; g < groups; ++g) {
      CHECK(table.slot(static_cast<size_t>(g)).blocks.empty());
      CHECK_THROWS(table.at(first, g), UsageError);
      CHECK(table.at(second, g).blocks.empty());
    }
    const RowHandle third = table.open();  // in the place of the first
    CHECK(table.num_slots() == 2 * static_cast<size_t>(groups) && third != first);
    CHECK(table.slot_of(table.at(third, groups - 1)) == static_cast<size_t>(groups - 1));
    table.check_invariants();
  }
  CHECK_THROWS(RowTable(0), UsageError);
}

RangeList list_of(std::initializer_list<BlockRange> ranges) {
  RangeList out;
  for (const BlockRange range : ranges) out.append(range);
  return out;
}

bool is(const RowChange& change, RowHandle row, int32_t group, int32_t first,
        const RangeList& blocks) {
  return change.row == row && change.group == group && change.first_block == first &&
         change.blocks.ranges() == blocks.ranges();
}

void changes_are_told_once_and_from_the_first_changed_block_on() {
  RowTable table(2);
  const RowHandle row = table.open();
  CHECK(table.take_changes().empty());  // nothing to tell of empty rows
  table.append(table.at(row, 1), list_of({{5, 3}}));
  auto changes = table.take_changes();  // admission
  CHECK(changes.size() == 1 && is(changes[0], row, 1, 0, list_of({{5, 3}})));
  CHECK(table.take_changes().empty());
  table.append(table.at(row, 1), list_of({{8, 2}, {20, 1}}));  // growth, twice
  table.append(table.at(row, 1), list_of({{21, 1}}));
  table.append(table.at(row, 0), list_of({{1, 1}}));
  changes = table.take_changes();
  CHECK(changes.size() == 2 && is(changes[0], row, 1, 3, list_of({{8, 2}, {20, 2}})));
  CHECK(is(changes[1], row, 0, 0, list_of({{1, 1}})));
  table.replace(table.at(row, 1), 5, list_of({{30, 1}}));  // moves, the second one nearer
  table.replace(table.at(row, 1), 2, list_of({{40, 1}}));
  changes = table.take_changes();
  CHECK(changes.size() == 1 &&
        is(changes[0], row, 1, 2, list_of({{40, 1}, {8, 2}, {30, 1}, {21, 1}})));
  // Grown and cut back: as it was.
  table.append(table.at(row, 0), list_of({{2, 4}}));
  table.truncate(table.at(row, 0), 1);
  CHECK(table.take_changes().empty());
  // Moved and cut back: what is left of the move.
  table.append(table.at(row, 0), list_of({{2, 4}}));
  table.replace(table.at(row, 0), 0, list_of({{50, 1}}));
  table.truncate(table.at(row, 0), 1);
  changes = table.take_changes();
  CHECK(changes.size() == 1 && is(changes[0], row, 0, 0, list_of({{50, 1}})));
  table.append(table.at(row, 0), RangeList());
  CHECK(table.take_changes().empty());
}

void a_place_that_is_closed_and_opened_again_in_one_step_is_told_once() {
  RowTable table(2);
  const RowHandle gone = table.open();
  table.append(table.at(gone, 0), list_of({{5, 3}}));
  table.append(table.at(gone, 1), list_of({{9, 1}}));
  table.close(gone);
  const RowHandle row = table.open();
  CHECK((row & 0xffffffff) == (gone & 0xffffffff));
  table.append(table.at(row, 0), list_of({{7, 2}}));
  const auto changes = table.take_changes();
  CHECK(changes.size() == 1 && is(changes[0], row, 0, 0, list_of({{7, 2}})));
  table.append(table.at(row, 0), list_of({{1, 1}}));
  table.close(row);
  CHECK(table.take_changes().empty());
}

// What falls out of a window is told with the row's next change, from the first null block on that
// is news: whoever follows the changes has the row, and so no more ranges than it.
void skipped_blocks_are_told_with_the_next_change() {
  RowTable table;
  const RowHandle handle = table.open();
  const RowHandle other = table.open();
  const RowHandle third = table.open();
  Row& row = table.at(handle);
  table.append(row, list_of({{10, 4}, {20, 2}, {30, 2}}));
  table.take_changes();
  table.skip(row, 2);  // half of a range
  CHECK(row.blocks.ranges() == list_of({{0, 2}, {12, 2}, {20, 2}, {30, 2}}).ranges());
  CHECK(table.take_changes().empty());
  table.append(row, list_of({{40, 1}}));
  auto changes = table.take_changes();
  CHECK(changes.size() == 1);
  CHECK(is(changes[0], handle, 0, 0, list_of({{0, 2}, {12, 2}, {20, 2}, {30, 2}, {40, 1}})));
  table.skip(row, 6);
  table.append(row, list_of({{50, 1}}));
  changes = table.take_changes();
  CHECK(changes.size() == 1);
  CHECK(is(changes[0], handle, 0, 2, list_of({{0, 4}, {30, 2}, {40, 1}, {50, 1}})));
  table.append(row, list_of({{51, 1}}));
  changes = table.take_changes();
  CHECK(changes.size() == 1 && is(changes[0], handle, 0, 10, list_of({{51, 1}})));
  // A range and a piece of the next one fall out, and the rest moves: three would be known of two.
  Row& moved = table.at(other);
  table.append(moved, list_of({{10, 3}, {20, 3}}));
  table.take_changes();
  table.skip(moved, 4);
  table.replace(moved, 4, list_of({{30, 2}}));
  changes = table.take_changes();
  CHECK(changes.size() == 1 && is(changes[0], other, 0, 0, list_of({{0, 4}, {30, 2}})));
  // It moves, and more falls out before that is told.
  Row& late = table.at(third);
  table.append(late, list_of({{10, 8}}));
  table.take_changes();
  table.skip(late, 2);
  table.replace(late, 2, list_of({{40, 6}}));
  table.skip(late, 4);
  changes = table.take_changes();
  CHECK(changes.size() == 1 && is(changes[0], third, 0, 0, list_of({{0, 4}, {42, 4}})));
}

// New blocks of which some fell out before they were told.
void nulls_among_what_is_told_add_no_range() {
  RowTable table;
  const RowHandle handle = table.open();
  Row& row = table.at(handle);
  table.append(row, list_of({{10, 4}}));
  table.take_changes();
  table.append(row, list_of({{14, 4}}));
  table.skip(row, 6);
  auto changes = table.take_changes();  // from 4 on it would be (10, 4), (0, 2), (16, 2) there
  CHECK(changes.size() == 1 && is(changes[0], handle, 0, 0, list_of({{0, 6}, {16, 2}})));
  table.append(row, list_of({{30, 1}}));
  table.skip(row, 7);  // in front of the change, behind the nulls that were told
  changes = table.take_changes();
  CHECK(changes.size() == 1);
  CHECK(is(changes[0], handle, 0, 6, list_of({{0, 1}, {17, 1}, {30, 1}})));
}

// Random rows: what somebody knows who follows the changes, and whose range begins where.
void random_changes_suffice_and_owners_agree_with_a_scan() {
  for (const int32_t groups : {1, 2, 3}) {
    constexpr int32_t kBlocks = 60;
    RowTable table(groups, kBlocks);
    std::mt19937_64 random(static_cast<uint64_t>(groups));
    std::vector<RowHandle> open;
    std::map<std::pair<RowHandle, int32_t>, std::vector<BlockId>> known;
    std::vector<int> free(kBlocks, 1);
    free[kNullBlock] = 0;
    const auto take = [&](int32_t count) {  // free blocks, often one behind the other
      RangeList out;
      BlockId b = kNullBlock;
      for (int i = 0; i < 200 && out.num_blocks() < count; ++i) {
        b = random() % 4 != 0 && b + 1 < kBlocks ? b + 1 : static_cast<BlockId>(random() % kBlocks);
        if (free[static_cast<size_t>(b)] == 0) continue;
        free[static_cast<size_t>(b)] = 0;
        out.append({b, 1});
      }
      return out;
    };
    const auto give_back = [&](const RangeList& blocks) {
      for (const BlockId b : BlockModel::held(blocks)) free[static_cast<size_t>(b)] = 1;
    };
    for (int step = 0; step < 20000; ++step) {
      const auto group = static_cast<int32_t>(random() % static_cast<uint64_t>(groups));
      const uint64_t kind = random() % 8;
      if (open.empty() || kind == 0) {
        open.push_back(table.open());
      } else {
        const size_t at = random() % open.size();
        Row& row = table.at(open[at], group);
        const int32_t held = row.blocks.num_blocks();
        const int32_t nulls = row.blocks.num_leading_nulls();
        if (kind < 4) {
          table.append(row, take(1 + static_cast<int32_t>(random() % 4)));
        } else if (kind == 4 && held > nulls) {  // a part moves
          const int32_t first = nulls + static_cast<int32_t>(random() % uint64_t(held - nulls));
          const RangeList to = take(1 + static_cast<int32_t>(random() % uint64_t(held - first)));
          give_back(row.blocks.slice(first, first + to.num_blocks()));
          table.replace(row, first, to);
        } else if (kind == 5) {
          const auto count = static_cast<int32_t>(random() % uint64_t(held + 1));
          if (count > nulls) {
            give_back(row.blocks.slice(0, count));
            table.skip(row, count);
          }
        } else if (kind == 6) {  // as a call that is rolled back
          const RangeList more = take(3);
          table.append(row, more);
          table.truncate(row, held);
          give_back(more);
        } else if (kind == 7 && random() % 4 == 0) {
          for (int32_t g = 0; g < groups; ++g) {
            give_back(table.at(open[at], g).blocks);
            known.erase({open[at], g});
          }
          table.close(open[at]);
          open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
        }
      }
      if (random() % 6 != 0) continue;
      for (const RowChange& change : table.take_changes()) {
        std::vector<BlockId>& row = known[{change.row, change.group}];
        CHECK(static_cast<size_t>(change.first_block) <= row.size());
        row.resize(static_cast<size_t>(change.first_block));
        for (const BlockId b : BlockModel::ids(change.blocks)) row.push_back(b);
        CHECK(row == BlockModel::ids(table.at(change.row, change.group).blocks));
      }
      table.check_invariants();
      std::vector<const Row*> owner(kBlocks, nullptr);
      for (const RowHandle handle : open) {
        for (int32_t g = 0; g < groups; ++g) {
          const Row& row = table.at(handle, g);
          const std::vector<BlockId> ids = BlockModel::ids(row.blocks);
          const std::vector<BlockId>& told = known[{handle, g}];
          CHECK(told.size() == ids.size());
          for (size_t i = 0; i < ids.size(); ++i) CHECK(ids[i] == 0 || told[i] == ids[i]);
          for (const BlockRange& range : row.blocks.ranges()) {
            if (!range.is_null()) owner[static_cast<size_t>(range.start)] = &row;
          }
        }
      }
      for (BlockId b = 0; b < kBlocks; ++b) {
        CHECK(table.sole_owner(b) == owner[static_cast<size_t>(b)]);
      }
    }
  }
}

// Of a block that two rows begin with nobody is the sole owner; when one leaves, the other is.
void shared_ranges_have_their_owner_back_when_the_others_leave() {
  RowTable table(2, 20);
  const RowHandle first = table.open();
  const RowHandle second = table.open();
  table.append(table.at(first, 0), list_of({{5, 3}, {9, 1}}));
  table.append(table.at(second, 1), list_of({{5, 2}, {12, 2}}));
  CHECK(table.sole_owner(9) == &table.at(first, 0));
  CHECK(table.sole_owner(12) == &table.at(second, 1));
  CHECK(table.sole_owner(6) == nullptr && table.sole_owner(13) == nullptr);
  CHECK(table.sole_owner(1) == nullptr && table.sole_owner(20) == nullptr);
  table.close(first);
  CHECK(table.sole_owner(5) == &table.at(second, 1) && table.sole_owner(9) == nullptr);
  table.check_invariants();
  CHECK(RowTable(2).sole_owner(5) == nullptr);  // not kept
}

}  // namespace

int main() {
  return run_tests({
      {"random rows agree with a map", random_rows_agree_with_a_map},
      {"forged handles are refused", forged_handles_are_refused},
      {"a used slot begins afresh", a_used_slot_begins_afresh},
      {"groups have rows side by side", groups_have_rows_side_by_side},
      {"changes are told once, and from the first changed block on",
       changes_are_told_once_and_from_the_first_changed_block_on},
      {"a place that is closed and opened again in one step is told once",
       a_place_that_is_closed_and_opened_again_in_one_step_is_told_once},
      {"skipped blocks are told with the next change",
       skipped_blocks_are_told_with_the_next_change},
      {"nulls among what is told add no range", nulls_among_what_is_told_add_no_range},
      {"random changes suffice, and owners agree with a scan",
       random_changes_suffice_and_owners_agree_with_a_scan},
      {"shared ranges have their owner back when the others leave",
       shared_ranges_have_their_owner_back_when_the_others_leave},
  });
}
