// RangeTable: run-length encoding, rows that move, refusals that change nothing, slots.
#include "tagma/range_table.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/check.hpp"
#include "tests/exhaustive.hpp"

namespace {

using tagma::BlockId;
using tagma::BlockRange;
using tagma::kPadSlot;
using tagma::RangeList;
using tagma::RangeTable;
using Ids = std::vector<BlockId>;

void append(RangeTable& table, int32_t row, const Ids& ids) {
  table.append(row, ids.data(), static_cast<int64_t>(ids.size()));
}

std::vector<BlockRange> ranges_of(const RangeTable& table, int32_t row) {
  std::vector<BlockRange> out;
  for (int32_t i = 0; i < table.num_ranges(row); ++i) out.push_back(table.range(row, i));
  return out;
}

RangeList list_of(const Ids& ids) {
  return RangeList::of(ids.data(), static_cast<int64_t>(ids.size()));
}

// The ids that a row's descriptors stand for, and that they are maximal and consistent.
Ids ids_of(const RangeTable& table, int32_t row) {
  Ids ids;
  const std::vector<BlockRange> ranges = ranges_of(table, row);
  for (size_t i = 0; i < ranges.size(); ++i) {
    CHECK(ranges[i].count > 0);
    CHECK(i == 0 || !tagma::joins(ranges[i - 1], ranges[i].start));
    CHECK(table.range_starts(row)[i] == ranges[i].start);
    CHECK(table.range_cums(row)[i] == static_cast<int32_t>(ids.size()));
    for (int32_t at = 0; at < ranges[i].count; ++at) ids.push_back(ranges[i].at(at));
  }
  CHECK(table.num_blocks(row) == static_cast<int32_t>(ids.size()));
  return ids;
}

// What write() does, on plain ids.
void write(Ids& ids, int32_t first_block, const Ids& more) {
  ids.resize(static_cast<size_t>(first_block));
  ids.insert(ids.end(), more.begin(), more.end());
}

struct Slots {
  std::vector<int64_t> values;
  int64_t lookups;
};

Slots slots_of(const RangeTable& table, const std::vector<int32_t>& query_start_loc,
               const std::vector<int64_t>& positions, int32_t block_size) {
  Slots slots{std::vector<int64_t>(positions.size(), -99), 0};
  slots.lookups =
      table.compute_slots(static_cast<int32_t>(query_start_loc.size()) - 1, query_start_loc.data(),
                          positions.data(), static_cast<int64_t>(positions.size()),
                          slots.values.data(), static_cast<int64_t>(positions.size()), block_size);
  return slots;
}

// One row of ids, looked up the obvious way.
int64_t expected_slot(const Ids& ids, int64_t position, int64_t block_size) {
  if (position < 0 || position / block_size >= static_cast<int64_t>(ids.size())) return kPadSlot;
  const int64_t id = ids[static_cast<size_t>(position / block_size)];
  return id == 0 ? kPadSlot : id * block_size + position % block_size;
}

void encodes_ascending_runs_and_null_runs() {
  RangeTable table(2);
  append(table, 1, {7, 8, 9, 40, 41, 0, 0, 0, 1, 2, 2, 1});
  const std::vector<BlockRange> want = {{7, 3}, {40, 2}, {0, 3}, {1, 2}, {2, 1}, {1, 1}};
  CHECK(ranges_of(table, 1) == want);
  CHECK(table.num_blocks(1) == 12);
  CHECK(table.num_ranges(0) == 0 && table.num_blocks(0) == 0);
}

void appending_in_pieces_equals_appending_at_once() {
  const Ids ids = {5, 6, 0, 0, 0, 1, 2, 3, 9, 8, 7, 8};
  RangeTable whole(1);
  append(whole, 0, ids);
  for (size_t cut = 0; cut <= ids.size(); ++cut) {
    RangeTable parts(1);
    append(parts, 0, Ids(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(cut)));
    append(parts, 0, {});
    append(parts, 0, Ids(ids.begin() + static_cast<ptrdiff_t>(cut), ids.end()));
    CHECK(ranges_of(parts, 0) == ranges_of(whole, 0));
    CHECK(parts.num_blocks(0) == whole.num_blocks(0));
  }
}

// Every row of up to four of the ids 0, 1, 2, 3 and 7, written over from every block on with every
// list of up to three: nulls before block 1, joins on both sides, shorter and longer rows. At a cap
// of three ranges some are refused.
void every_write_equals_plain_ids() {
  constexpr BlockId kIds[] = {0, 1, 2, 3, 7};
  const auto choose_ids = [&kIds](Choices& choices, int most) {
    Ids ids(static_cast<size_t>(choices.choose(most + 1)));
    for (BlockId& id : ids) id = kIds[choices.choose(5)];
    return ids;
  };
  Choices choices;
  int64_t refused = 0;
  int64_t joined = 0;
  do {
    RangeTable table(2, 3);
    Ids ids = choose_ids(choices, 4);
    if (list_of(ids).num_ranges() > 3) continue;
    append(table, 1, ids);
    const auto first = static_cast<int32_t>(choices.choose(static_cast<int>(ids.size()) + 1));
    const Ids more = choose_ids(choices, 3);
    Ids wanted = ids;
    write(wanted, first, more);
    const std::vector<BlockRange> before = ranges_of(table, 1);
    if (list_of(wanted).num_ranges() > 3) {
      CHECK_THROWS(table.check_write(1, first, list_of(more)), tagma::RangeCapError);
      CHECK_THROWS(table.write(1, first, list_of(more)), tagma::RangeCapError);
      CHECK(ids_of(table, 1) == ids);
      ++refused;
    } else {
      table.check_write(1, first, list_of(more));
      CHECK(ids_of(table, 1) == ids);
      const int32_t written = table.write(1, first, list_of(more));
      CHECK(ids_of(table, 1) == wanted);
      CHECK(ranges_of(table, 1) == list_of(wanted).ranges());
      const std::vector<BlockRange> after = ranges_of(table, 1);
      const auto kept = static_cast<size_t>(written);
      CHECK(kept <= before.size() && kept <= after.size());
      for (size_t i = 0; i < kept; ++i) CHECK(before[i].start == after[i].start);
      joined += list_of(more).num_ranges() > 0 &&
                after.size() < kept + static_cast<size_t>(list_of(more).num_ranges());
    }
    CHECK(table.num_blocks(0) == 0);
  } while (choices.next());
  CHECK(refused > 1000 && joined > 1000);
}

// Long rows near the real cap, grown, moved, cut and swapped, against plain ids; slots with them.
void random_writes_equal_plain_ids() {
  std::mt19937 random(20261205);
  const auto below = [&random](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random);
  };
  const auto draw = [&](int64_t runs, int64_t longest) {
    Ids ids;
    for (; runs > 0; --runs) {
      const auto start = static_cast<BlockId>(below(5) == 0 ? 0 : 1 + below(400));
      for (int64_t i = 0, count = 1 + below(longest); i < count; ++i) {
        ids.push_back(start == 0 ? 0 : start + static_cast<BlockId>(i));
      }
    }
    return ids;
  };
  RangeTable table(3);
  std::vector<Ids> rows(3);
  int64_t refused = 0;
  for (int step = 0; step < 20000; ++step) {
    const auto row = static_cast<int32_t>(below(3));
    Ids& ids = rows[static_cast<size_t>(row)];
    const auto held = static_cast<int32_t>(ids.size());
    const bool grows = below(2) == 0;
    const auto first = grows ? held : static_cast<int32_t>(below(held + 1));
    Ids more = draw(below(grows ? 40 : 12), 6);
    if (below(3) == 0 && first < held) {  // a move: the row keeps what lies behind
      more.resize(std::min(more.size(), static_cast<size_t>(held - first)));
      more.insert(more.end(), ids.begin() + first + static_cast<ptrdiff_t>(more.size()), ids.end());
    }
    Ids wanted = ids;
    write(wanted, first, more);
    if (list_of(wanted).num_ranges() > tagma::kMaxRanges) {
      CHECK_THROWS(table.write(row, first, list_of(more)), tagma::RangeCapError);
      ++refused;
    } else {
      table.write(row, first, list_of(more));
      ids = wanted;
    }
    if (below(10) == 0) {
      const auto other = static_cast<int32_t>(below(3));
      table.swap(row, other);
      std::swap(rows[static_cast<size_t>(row)], rows[static_cast<size_t>(other)]);
    }
    const auto at = static_cast<size_t>(below(3));
    CHECK(ids_of(table, static_cast<int32_t>(at)) == rows[at]);
    if (step % 50 == 0) {
      std::vector<int64_t> positions;
      for (int64_t p = -3; p < static_cast<int64_t>(rows[0].size()) * 4 + 3; ++p) {
        positions.push_back(p);
      }
      const Slots slots =
          slots_of(table, {0, static_cast<int32_t>(positions.size())}, positions, 4);
      for (size_t t = 0; t < positions.size(); ++t) {
        CHECK(slots.values[t] == expected_slot(rows[0], positions[t], 4));
      }
    }
  }
  CHECK(refused > 100);
}

void refused_writes_change_nothing() {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  RangeTable table(2, 3);
  const Ids ids = {5, 6, 9};
  append(table, 0, ids);
  const RangeList one(BlockRange{20, 1});
  CHECK_THROWS(table.write(-1, 0, one), tagma::UsageError);
  CHECK_THROWS(table.write(2, 0, one), tagma::UsageError);
  CHECK_THROWS(table.write(0, -1, one), tagma::UsageError);
  CHECK_THROWS(table.write(0, 4, one), tagma::UsageError);
  CHECK_THROWS(table.write(1, 1, one), tagma::UsageError);
  CHECK_THROWS(table.write(0, 3, RangeList(BlockRange{20, kMax - 2})), tagma::UsageError);
  CHECK_THROWS(table.write(0, 3, list_of({20, 30})), tagma::RangeCapError);
  CHECK(ids_of(table, 0) == ids && ids_of(table, 1).empty());
  try {
    table.check_write(0, 4, one);
    CHECK(false);
  } catch (const tagma::UsageError& error) {
    CHECK(std::string(error.what()) == "write from block 4 on to row 0, which has 3 blocks");
  }
  CHECK(table.write(0, 3, list_of({10})) == 2);  // the last range grows: nothing new to send
  CHECK(table.write(0, 1, RangeList()) == 1);    // and a row may be cut
  CHECK((ids_of(table, 0) == Ids{5}));
  CHECK(table.write(0, 0, list_of({6})) == 0);
}

void largest_block_id_does_not_wrap() {
  const BlockId top = std::numeric_limits<BlockId>::max();
  RangeTable table(1);
  append(table, 0, {top - 1, top});
  append(table, 0, {5, 0, top});
  const std::vector<BlockRange> want = {{top - 1, 2}, {5, 1}, {0, 1}, {top, 1}};
  CHECK(ranges_of(table, 0) == want);
  const int32_t block_size = std::numeric_limits<int32_t>::max();
  const int64_t last = int64_t{2} * block_size - 1;
  CHECK(slots_of(table, {0, 1}, {last}, block_size).values[0] ==
        (int64_t{top} + 1) * block_size - 1);
}

void cap_refusal_changes_nothing_and_carries_the_numbers() {
  RangeTable table(2, 3);
  append(table, 1, {1, 2, 5, 6});
  const auto before = ranges_of(table, 1);
  try {
    append(table, 1, {7, 10, 20, 30});
    CHECK(false);
  } catch (const tagma::RangeCapError& error) {
    CHECK(error.row() == 1 && error.needed() == 5 && error.cap() == 3);
    CHECK(std::string(error.what()) == "row 1 needs 5 ranges, above the cap of 3");
  }
  CHECK(ranges_of(table, 1) == before && table.num_blocks(1) == 4);
  append(table, 1, {7, 10});  // the third range still fits
  CHECK(table.num_ranges(1) == 3);
  CHECK_THROWS(append(table, 1, {12}), tagma::CapError);
  append(table, 1, {11});  // and the last one still grows
  CHECK(table.num_blocks(1) == 7);
}

void bad_input_is_refused_before_anything_changes() {
  CHECK_THROWS(RangeTable(0), tagma::UsageError);
  CHECK_THROWS(RangeTable(1, 0), tagma::UsageError);
  RangeTable table(2);
  append(table, 0, {3});
  for (const int32_t row : {-1, 2}) {
    CHECK_THROWS(append(table, row, {1}), tagma::UsageError);
    CHECK_THROWS(table.clear(row), tagma::UsageError);
    CHECK_THROWS(table.move(row, 0), tagma::UsageError);
    CHECK_THROWS(table.move(0, row), tagma::UsageError);
    CHECK_THROWS(table.swap(row, 0), tagma::UsageError);
    CHECK_THROWS(table.swap(0, row), tagma::UsageError);
    CHECK_THROWS(table.num_ranges(row), tagma::UsageError);
    CHECK_THROWS(table.num_blocks(row), tagma::UsageError);
    CHECK_THROWS(table.range(row, 0), tagma::UsageError);
  }
  CHECK_THROWS(table.range(0, 1), tagma::UsageError);
  CHECK_THROWS(table.move(0, 0), tagma::UsageError);
  CHECK_THROWS(append(table, 0, {4, -1}), tagma::UsageError);
  CHECK_THROWS(table.append(0, nullptr, -1), tagma::UsageError);
  CHECK_THROWS(table.append(0, nullptr, std::numeric_limits<int32_t>::max()), tagma::UsageError);
  CHECK(table.num_blocks(0) == 1);

  const std::vector<int64_t> positions = {0, 1};
  std::vector<int64_t> out = {-7, -7};
  const auto compute = [&](int32_t num_reqs, std::vector<int32_t> starts, int64_t num_tokens,
                           int64_t pad_to, int32_t block_size) {
    return table.compute_slots(num_reqs, starts.data(), positions.data(), num_tokens, out.data(),
                               pad_to, block_size);
  };
  CHECK_THROWS(compute(-1, {0}, 2, 2, 16), tagma::UsageError);
  CHECK_THROWS(compute(3, {0, 0, 0, 0}, 2, 2, 16), tagma::UsageError);
  CHECK_THROWS(compute(1, {1, 2}, 2, 2, 16), tagma::UsageError);
  CHECK_THROWS(compute(2, {0, 2, 1}, 2, 2, 16), tagma::UsageError);
  CHECK_THROWS(compute(1, {0, 2}, 1, 2, 16), tagma::UsageError);
  CHECK_THROWS(compute(1, {0, 2}, 2, 1, 16), tagma::UsageError);
  CHECK_THROWS(compute(1, {0, 2}, 2, 2, 0), tagma::UsageError);
  CHECK(out[0] == -7 && out[1] == -7);
}

void rows_move_swap_and_clear() {
  RangeTable table(3);
  append(table, 0, {1, 2, 9});
  append(table, 2, {30});
  table.swap(0, 2);
  CHECK((ranges_of(table, 0) == std::vector<BlockRange>{{30, 1}}));
  CHECK((ranges_of(table, 2) == std::vector<BlockRange>{{1, 2}, {9, 1}}));
  table.swap(2, 2);
  table.move(2, 0);
  CHECK(table.num_blocks(2) == 0 && table.num_ranges(2) == 0);
  append(table, 0, {10});  // the moved row still knows where its last range ends
  CHECK((ranges_of(table, 0) == std::vector<BlockRange>{{1, 2}, {9, 2}}));
  append(table, 2, {3});  // and the vacated one does not continue what it held
  CHECK((ranges_of(table, 2) == std::vector<BlockRange>{{3, 1}}));
  table.clear(0);
  CHECK(table.num_blocks(0) == 0 && table.num_ranges(0) == 0);
  CHECK(slots_of(table, {0, 1}, {0}, 16).values[0] == kPadSlot);
}

void pads_outside_every_range() {
  RangeTable table(2);
  append(table, 0, {4, 0, 0, 5});
  const Slots slots = slots_of(table, {0, 9, 9}, {-1, 0, 15, 16, 47, 48, 63, 64, -5}, 16);
  const std::vector<int64_t> want = {-1, 64, 79, -1, -1, 80, 95, -1, -1};
  CHECK(slots.values == want);
  CHECK(slots.lookups == 4);  // block 4, the null run, block 5, behind the row
  const int64_t far = std::numeric_limits<int64_t>::max();
  const int64_t low = std::numeric_limits<int64_t>::min();
  CHECK((slots_of(table, {0, 2}, {far, low}, 16).values == std::vector<int64_t>{-1, -1}));
}

void pads_behind_the_last_request_and_leaves_the_rest() {
  RangeTable table(1);
  append(table, 0, {2});
  const std::vector<int32_t> starts = {0, 1};
  const std::vector<int64_t> positions = {3, 4, 5};
  std::vector<int64_t> out(6, -99);
  table.compute_slots(1, starts.data(), positions.data(), 3, out.data(), 5, 16);
  CHECK((out == std::vector<int64_t>{35, -1, -1, -1, -1, -99}));
  const std::vector<int32_t> none = {0};
  CHECK(table.compute_slots(0, none.data(), positions.data(), 0, out.data(), 1, 16) == 0);
  CHECK(out[0] == -1);
}

void one_lookup_per_position_block_at_most() {
  Ids scattered;
  for (BlockId b = 0; b < 64; ++b) scattered.push_back(1 + 2 * b);
  RangeTable table(2);
  append(table, 0, scattered);
  Ids contiguous;
  for (BlockId b = 0; b < 64; ++b) contiguous.push_back(1000 + b);
  append(table, 1, contiguous);
  std::vector<int64_t> positions;
  for (int round = 0; round < 2; ++round) {
    for (int64_t p = 0; p < 64 * 16; ++p) positions.push_back(p);
  }
  CHECK(slots_of(table, {0, 1024, 2048}, positions, 16).lookups == 64 + 1);
}

// Any range may follow any other: every sequence of three positions next to a range's bounds.
void every_jump_between_ranges() {
  const Ids ids = {3, 4, 9, 0, 0, 20, 21, 7};
  RangeTable table(1);
  append(table, 0, ids);
  std::vector<int64_t> bounds;
  for (const int64_t block : {0, 2, 3, 5, 7, 8}) {
    for (const int64_t offset : {-1, 0, 1}) bounds.push_back(block * 4 + offset);
  }
  for (const int64_t first : bounds) {
    for (const int64_t second : bounds) {
      for (const int64_t third : bounds) {
        const std::vector<int64_t> positions = {first, second, third};
        const Slots slots = slots_of(table, {0, 3}, positions, 4);
        CHECK(slots.lookups <= 3);
        for (size_t t = 0; t < 3; ++t) {
          CHECK(slots.values[t] == expected_slot(ids, positions[t], 4));
        }
      }
    }
  }
}

void random_batches_equal_the_plain_lookup() {
  std::mt19937 random(20260101);
  const auto below = [&random](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    const int32_t block_size = static_cast<int32_t>(1 + below(64));
    const int32_t num_rows = static_cast<int32_t>(1 + below(4));
    RangeTable table(num_rows);
    std::vector<Ids> rows(static_cast<size_t>(num_rows));
    std::vector<int32_t> starts = {0};
    std::vector<int64_t> positions;
    for (int32_t row = 0; row < num_rows; ++row) {
      Ids& ids = rows[static_cast<size_t>(row)];
      for (int64_t run = below(6); run > 0; --run) {
        const auto start = static_cast<BlockId>(below(4) == 0 ? 0 : below(1 << 30));
        const int64_t count = 1 + below(9);
        for (int64_t i = 0; i < count; ++i) {
          ids.push_back(start == 0 ? 0 : start + static_cast<BlockId>(i));
        }
      }
      append(table, row, ids);
      int64_t position = below(40) - 8;
      for (int64_t t = below(4) == 0 ? 1 : below(200); t > 0; --t) {
        if (below(30) == 0) position = below(500) - 20;
        positions.push_back(position++);
      }
      starts.push_back(static_cast<int32_t>(positions.size()));
    }
    const Slots slots = slots_of(table, starts, positions, block_size);
    for (int32_t row = 0; row < num_rows; ++row) {
      const auto r = static_cast<size_t>(row);
      for (auto t = static_cast<size_t>(starts[r]); t < static_cast<size_t>(starts[r + 1]); ++t) {
        CHECK(slots.values[t] == expected_slot(rows[r], positions[t], block_size));
      }
    }
  }
}

}  // namespace

int main() {
  return run_tests({
      {"encodes_ascending_runs_and_null_runs", encodes_ascending_runs_and_null_runs},
      {"appending_in_pieces_equals_appending_at_once",
       appending_in_pieces_equals_appending_at_once},
      {"every_write_equals_plain_ids", every_write_equals_plain_ids},
      {"random_writes_equal_plain_ids", random_writes_equal_plain_ids},
      {"refused_writes_change_nothing", refused_writes_change_nothing},
      {"largest_block_id_does_not_wrap", largest_block_id_does_not_wrap},
      {"cap_refusal_changes_nothing_and_carries_the_numbers",
       cap_refusal_changes_nothing_and_carries_the_numbers},
      {"bad_input_is_refused_before_anything_changes",
       bad_input_is_refused_before_anything_changes},
      {"rows_move_swap_and_clear", rows_move_swap_and_clear},
      {"pads_outside_every_range", pads_outside_every_range},
      {"pads_behind_the_last_request_and_leaves_the_rest",
       pads_behind_the_last_request_and_leaves_the_rest},
      {"one_lookup_per_position_block_at_most", one_lookup_per_position_block_at_most},
      {"every_jump_between_ranges", every_jump_between_ranges},
      {"random_batches_equal_the_plain_lookup", random_batches_equal_the_plain_lookup},
  });
}
