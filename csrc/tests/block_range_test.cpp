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

}  // namespace

int main() {
  return run_tests({
      {"adjacent ranges merge on append", adjacent_ranges_merge_on_append},
      {"slices and truncations agree with the ids", slices_and_truncations_agree_with_the_ids},
  });
}
