// RangeList: merging on append, slices, truncation.
#include "tagma/block_range.hpp"

#include <cstdint>
#include <limits>
#include <vector>

#include "tests/block_model.hpp"
#include "tests/check.hpp"

namespace {

using tagma::BlockId;
using tagma::BlockRange;
using tagma::RangeList;
using tagma::UsageError;

RangeList list_of(std::initializer_list<BlockRange> ranges) {
  RangeList out;
  for (const BlockRange& range : ranges) out.append(range);
  return out;
}

void ids_that_are_no_blocks_are_refused() {
  const std::vector<BlockId> ids = {4, -1};
  CHECK_THROWS(RangeList::of(ids.data(), 2), UsageError);
  CHECK_THROWS(RangeList::of(ids.data(), -1), UsageError);
  CHECK_THROWS(RangeList::of(ids.data(), int64_t{1} << 31), UsageError);
}

void adjacent_ranges_merge_on_append() {
  RangeList list;
  list.append({4, 2});
  list.append({6, 3});
  CHECK(list.num_ranges() == 1 && list.num_blocks() == 5 && list.tail() == 8);
  list.append({9, 0});
  CHECK(list.num_ranges() == 1 && list.num_blocks() == 5);
  list.append({2, 2});  // in front of it in memory, behind it in the request
  CHECK(list.num_ranges() == 2 && list.at(5) == 2);
  list.append(list_of({{4, 1}, {20, 2}}));
  CHECK(list.num_ranges() == 3 && list.num_blocks() == 10);
  CHECK_THROWS(list.at(10), UsageError);
  CHECK_THROWS(list.at(-1), UsageError);
  CHECK_THROWS(list.truncate(-1), UsageError);
  CHECK_THROWS(list.append({30, std::numeric_limits<int32_t>::max() - 9}), UsageError);
  CHECK(list.num_blocks() == 10);
}

void slices_and_truncations_agree_with_the_ids() {
  const RangeList list = list_of({{10, 3}, {4, 1}, {20, 4}, {7, 2}});
  const std::vector<BlockId> ids = BlockModel::ids(list);
  const int32_t size = list.num_blocks();
  for (int32_t first = 0; first <= size; ++first) {
    for (int32_t last = first; last <= size; ++last) {
      const std::vector<BlockId> expected(ids.begin() + first, ids.begin() + last);
      CHECK(BlockModel::ids(list.slice(first, last)) == expected);
    }
    RangeList cut = list;
    cut.truncate(first);
    CHECK(BlockModel::ids(cut) == std::vector<BlockId>(ids.begin(), ids.begin() + first));
    CHECK(cut.tail() == (first == 0 ? 0 : ids[static_cast<size_t>(first) - 1]));
  }
  for (int32_t i = 0; i < size; ++i) CHECK(list.at(i) == ids[static_cast<size_t>(i)]);
  RangeList same = list;
  same.truncate(size + 5);
  CHECK(same.ranges() == list.ranges());
}

// Ids 0 0 0 1 2 once fused the null run with block 1.
void null_runs_merge_with_null_runs_only() {
  RangeList list = list_of({{0, 2}, {0, 1}, {1, 2}, {3, 1}, {0, 1}, {1, 1}});
  const std::vector<BlockRange> expected = {{0, 3}, {1, 3}, {0, 1}, {1, 1}};
  CHECK(list.ranges() == expected);
  CHECK(list.num_leading_nulls() == 3);
  CHECK(list.at(0) == 0 && list.at(2) == 0 && list.at(3) == 1 && list.at(6) == 0);
  CHECK(list.index_of(1) == 3 && list.index_of(0) == -1 && list.index_of(4) == -1);
  list.truncate(7);
  CHECK(list.tail() == 0 && list.joins_with(0) && !list.joins_with(1));
  list.truncate(2);
  CHECK(list.tail() == 0 && list.num_leading_nulls() == 2);
  CHECK(list_of({{1, 2}}).num_leading_nulls() == 0 && RangeList().num_leading_nulls() == 0);
}

// Every list of up to four ids of a small alphabet, null runs included: what the ranges say is what
// the ids say, and no two ranges could be one.
void every_short_list_agrees_with_its_ids() {
  const std::vector<BlockId> alphabet = {0, 1, 2, 3, 9};
  std::vector<std::vector<BlockId>> lists = {{}};
  for (size_t i = 0; i < lists.size(); ++i) {
    if (lists[i].size() == 4) break;
    for (const BlockId id : alphabet) {
      lists.push_back(lists[i]);
      lists.back().push_back(id);
    }
  }
  for (const std::vector<BlockId>& ids : lists) {
    RangeList list;
    for (const BlockId id : ids) list.append({id, 1});
    CHECK(BlockModel::ids(list) == ids);
    CHECK(RangeList::of(ids.data(), static_cast<int64_t>(ids.size())).ranges() == list.ranges());
    for (size_t i = 1; i < list.ranges().size(); ++i) {
      CHECK(!tagma::joins(list.ranges()[i - 1], list.ranges()[i].start));
    }
    for (size_t at = 0; at < ids.size(); ++at) {
      for (size_t end = at; end <= ids.size(); ++end) {
        const std::vector<BlockId> part(ids.begin() + static_cast<std::ptrdiff_t>(at),
                                        ids.begin() + static_cast<std::ptrdiff_t>(end));
        CHECK(BlockModel::ids(list.slice(static_cast<int32_t>(at), static_cast<int32_t>(end))) ==
              part);
        RangeList other = list;
        std::vector<BlockId> expected = ids;
        RangeList fresh;
        for (size_t i = at; i < end; ++i) {
          expected[i] = i % 2 == 0 ? 0 : 7;
          fresh.append({expected[i], 1});
        }
        other.replace(static_cast<int32_t>(at), fresh);
        CHECK(BlockModel::ids(other) == expected);
      }
    }
    CHECK_THROWS(list.replace(0, RangeList({4, static_cast<int32_t>(ids.size()) + 1})), UsageError);
    CHECK_THROWS(list.replace(-1, RangeList()), UsageError);
  }
}

}  // namespace

int main() {
  return run_tests({
      {"ids that are no blocks are refused", ids_that_are_no_blocks_are_refused},
      {"adjacent ranges merge on append", adjacent_ranges_merge_on_append},
      {"slices and truncations agree with the ids", slices_and_truncations_agree_with_the_ids},
      {"null runs merge with null runs only", null_runs_merge_with_null_runs_only},
      {"every short list agrees with its ids", every_short_list_agrees_with_its_ids},
  });
}
