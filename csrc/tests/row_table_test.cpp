// RowTable against std::map: handles name one row for ever, and closed ones nothing.
#include "tagma/row_table.hpp"

#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "tests/check.hpp"

namespace {

using tagma::Row;
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

}  // namespace

int main() {
  return run_tests({
      {"random rows agree with a map", random_rows_agree_with_a_map},
      {"forged handles are refused", forged_handles_are_refused},
      {"a used slot begins afresh", a_used_slot_begins_afresh},
  });
}
