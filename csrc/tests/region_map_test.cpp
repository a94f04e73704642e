// The region map: spans cover exactly the bytes of their blocks, and addresses lead back to them.
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tagma/kv_region_map.hpp"
#include "tests/block_model.hpp"
#include "tests/check.hpp"

namespace {

using tagma::BlockId;
using tagma::KvCoord;
using tagma::KvCoordMap;
using tagma::KvPlace;
using tagma::KvRegion;
using tagma::KvRegionMap;
using tagma::KvSpan;
using tagma::RangeList;
using tagma::UsageError;

void layers_of_one_tensor_are_regions() {
  const KvCoordMap coords(3, 5, 4, 2);
  const KvRegionMap map = KvRegionMap::of(coords, 100);
  for (int32_t layer = 0; layer < 3; ++layer) {
    for (int64_t block = 0; block < 5; ++block) {
      CHECK(map.address(layer, block) == 100 + coords.offset_bytes(layer, block, 0));
    }
  }
  for (int64_t byte = 0; byte < coords.size_bytes(); ++byte) {
    const KvPlace place = map.locate(100 + byte);
    const KvCoord coord = coords.coord_of_offset(byte);
    CHECK(place.region == coord.layer && place.block == coord.block);
    CHECK(place.byte / 2 == coord.token);
  }
}

// Regions in any order, of different block lengths, with gaps between them.
void spans_cover_the_bytes_of_their_blocks() {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<KvRegion> regions;
    int64_t at = static_cast<int64_t>(random() % 7);
    for (uint64_t i = 1 + random() % 4; i > 0; --i) {
      regions.push_back({at, 12, static_cast<int64_t>(1 + random() % 5)});
      at = regions.back().end() + static_cast<int64_t>(random() % 3);
    }
    std::shuffle(regions.begin(), regions.end(), random);
    const KvRegionMap map(regions);
    RangeList blocks;
    for (uint64_t i = random() % 6; i > 0; --i) {
      const auto start = static_cast<BlockId>(random() % 12);
      const auto longest = start == 0 ? 3 : 12 - start;
      blocks.append({start, static_cast<int32_t>(1 + random() % static_cast<uint64_t>(longest))});
    }
    std::vector<int64_t> expected;
    for (const KvRegion& region : regions) {
      for (const BlockId b : BlockModel::ids(blocks)) {
        for (int64_t i = 0; b != 0 && i < region.bytes_per_block; ++i) {
          expected.push_back(region.address + b * region.bytes_per_block + i);
        }
      }
    }
    std::vector<int64_t> covered;
    size_t ranges = 0;
    for (const auto& range : blocks.ranges()) ranges += range.is_null() ? 0 : 1;
    const std::vector<KvSpan> spans = map.spans(blocks);
    CHECK(spans.size() == ranges * regions.size());
    for (const KvSpan& span : spans) {
      for (int64_t i = 0; i < span.bytes; ++i) {
        covered.push_back(span.address + i);
        CHECK(map.locate(span.address + i).region == span.region);
      }
    }
    CHECK(covered == expected);
  }
}

void descriptors_are_the_spans_of_runs() {
  const KvRegionMap map({{1000, 50, 8}, {0, 60, 4}});
  const std::vector<int64_t> starts = {7, 20, 8};  // 8 follows 7: runs may touch
  const std::vector<int64_t> counts = {1, 3, 2};
  std::vector<int64_t> out(3 * 2 * 3, -1);
  map.write_descriptors(starts.data(), counts.data(), 3, 5, out.data());
  CHECK(out == std::vector<int64_t>({1056, 8, 5, 1160, 24, 5, 1064, 16, 5,  //
                                     28, 4, 5, 80, 12, 5, 32, 8, 5}));
  for (const auto& [start, count] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {0, 0}, {0, -1}, {50, 1}, {48, 3}, {1, std::numeric_limits<int64_t>::max()}}) {
    CHECK_THROWS(map.write_descriptors(&start, &count, 1, 0, out.data()), UsageError);
  }
}

void refuses_what_is_no_memory() {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  CHECK_THROWS(KvRegionMap({}), UsageError);
  CHECK_THROWS(KvRegionMap({{-1, 1, 1}}), UsageError);
  CHECK_THROWS(KvRegionMap({{0, 0, 1}}), UsageError);
  CHECK_THROWS(KvRegionMap({{0, 1, 0}}), UsageError);
  CHECK_THROWS(KvRegionMap({{1, kMax, 1}}), UsageError);
  CHECK_THROWS(KvRegionMap({{0, kMax / 2 + 1, 2}}), UsageError);
  CHECK_THROWS(KvRegionMap({{10, 5, 2}, {0, 11, 1}}), UsageError);
  const KvRegionMap map({{10, 5, 2}, {0, 10, 1}});
  CHECK_THROWS(map.address(2, 0), UsageError);
  CHECK_THROWS(map.address(-1, 0), UsageError);
  CHECK_THROWS(map.address(0, 5), UsageError);
  CHECK_THROWS(map.address(0, -1), UsageError);
  CHECK_THROWS(map.locate(20), UsageError);
  CHECK_THROWS(map.locate(-1), UsageError);
  CHECK_THROWS(map.spans(RangeList({4, 2})),
               UsageError);  // the second region has it, not the first
  CHECK(map.spans(RangeList({4, 1})).size() == 2 && map.spans(RangeList({0, 9})).empty());
  CHECK(map.locate(0).region == 1 && map.locate(19).block == 4);
}

}  // namespace

int main() {
  return run_tests({
      {"layers of one tensor are regions", layers_of_one_tensor_are_regions},
      {"spans cover the bytes of their blocks", spans_cover_the_bytes_of_their_blocks},
      {"descriptors are the spans of runs", descriptors_are_the_spans_of_runs},
      {"refuses what is no memory", refuses_what_is_no_memory},
  });
}
