// Several regions of KV memory addressed by the same block ids, as KV transfer registers them: one
// for each layer, or for each of its K and V halves.
//
//   address(region, block) = region.address + block * region.bytes_per_block
//
// So a range of blocks is one span of bytes in each region, and a request of r ranges is sent with
// regions * r descriptors. KvCoordMap is the closed form within one tensor of all layers, and is
// such a map with evenly spaced regions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tagma/block_range.hpp"
#include "tagma/errors.hpp"
#include "tagma/kv_coord_map.hpp"

namespace tagma {

struct KvRegion {
  int64_t address;  // of block 0
  int64_t blocks;
  int64_t bytes_per_block;

  int64_t end() const { return address + blocks * bytes_per_block; }
};

struct KvSpan {
  int32_t region;
  int64_t address;
  int64_t bytes;
};

struct KvPlace {
  int32_t region;
  int64_t block;
  int64_t byte;  // within the block
};

class KvRegionMap {
 public:
  // Throws UsageError if there is no region, one is empty or ends beyond 63 bits, or two overlap.
  // O(regions log regions).
  explicit KvRegionMap(std::vector<KvRegion> regions) : regions_(std::move(regions)) {
    if (regions_.empty()) throw UsageError("a map without regions");
    for (size_t i = 0; i < regions_.size(); ++i) {
      const KvRegion& r = regions_[i];
      if (r.address < 0 || r.blocks <= 0 || r.bytes_per_block <= 0 ||
          r.blocks > (std::numeric_limits<int64_t>::max() - r.address) / r.bytes_per_block) {
        throw UsageError(message("region ", i, ": ", r.blocks, " blocks of ", r.bytes_per_block,
                                 " bytes at ", r.address, " are no memory"));
      }
      by_address_.push_back(static_cast<int32_t>(i));
    }
    std::sort(by_address_.begin(), by_address_.end(),
              [this](int32_t a, int32_t b) { return region(a).address < region(b).address; });
    for (size_t i = 1; i < by_address_.size(); ++i) {
      if (region(by_address_[i - 1]).end() > region(by_address_[i]).address) {
        throw UsageError(
            message("regions ", by_address_[i - 1], " and ", by_address_[i], " overlap"));
      }
    }
  }

  // The layers of a KvCoordMap, the first at `address`.
  static KvRegionMap of(const KvCoordMap& map, int64_t address) {
    std::vector<KvRegion> regions;
    const int64_t bytes_per_block = map.tokens_per_block() * map.bytes_per_token();
    for (int64_t layer = 0; layer < map.layers(); ++layer) {
      regions.push_back({address + map.offset_bytes(layer, 0, 0), map.blocks(), bytes_per_block});
    }
    return KvRegionMap(std::move(regions));
  }

  // Throws UsageError for a region or block that there is not.
  int64_t address(int32_t region_id, int64_t block) const {
    if (region_id < 0 || region_id >= num_regions()) {
      throw UsageError(message("region ", region_id, " is outside [0, ", num_regions(), ")"));
    }
    const KvRegion& r = region(region_id);
    if (block < 0 || block >= r.blocks) {
      throw UsageError(
          message("block ", block, " is outside [0, ", r.blocks, ") of region ", region_id));
    }
    return r.address + block * r.bytes_per_block;
  }

  // Whose byte an address is. Throws UsageError if it is in no region. O(log regions).
  KvPlace locate(int64_t address) const {
    const auto above =
        std::upper_bound(by_address_.begin(), by_address_.end(), address,
                         [this](int64_t a, int32_t id) { return a < region(id).address; });
    if (above != by_address_.begin()) {
      const int32_t id = *(above - 1);
      const KvRegion& r = region(id);
      if (address < r.end()) {
        const int64_t offset = address - r.address;
        return {id, offset / r.bytes_per_block, offset % r.bytes_per_block};
      }
    }
    throw UsageError(message("address ", address, " is in no region"));
  }

  // The bytes of these blocks, region by region, one span for each range; null runs have none.
  // Throws UsageError for a block that a region has not. O(regions * ranges).
  std::vector<KvSpan> spans(const RangeList& blocks) const {
    std::vector<KvSpan> out;
    out.reserve(regions_.size() * blocks.ranges().size());
    for (int32_t id = 0; id < num_regions(); ++id) {
      for (const BlockRange& range : blocks.ranges()) {
        if (range.is_null()) continue;
        address(id, int64_t{range.start} + range.count - 1);  // the last of them
        out.push_back({id, address(id, range.start), range.count * region(id).bytes_per_block});
      }
    }
    return out;
  }

  // One descriptor (address, bytes, device) for each run of blocks in each region, region by
  // region, into `out`, which holds 3 * num_regions() * runs numbers: what a transfer of these runs
  // posts. Unlike ranges, runs may touch: the other side of the transfer may break between them.
  // Throws UsageError for a run that a region has not, and leaves a part of `out` written.
  // O(regions * runs).
  void write_descriptors(const int64_t* starts, const int64_t* counts, int64_t runs, int64_t device,
                         int64_t* out) const {
    for (int32_t id = 0; id < num_regions(); ++id) {
      const KvRegion& r = region(id);
      for (int64_t i = 0; i < runs; ++i) {
        const int64_t start = starts[i];
        const int64_t count = counts[i];
        if (start < 0 || count < 1 || start >= r.blocks || count > r.blocks - start) {
          throw UsageError(message("run of ", count, " blocks from ", start, " is outside [0, ",
                                   r.blocks, ") of region ", id));
        }
        *out++ = r.address + start * r.bytes_per_block;
        *out++ = count * r.bytes_per_block;
        *out++ = device;
      }
    }
  }

  int32_t num_regions() const { return static_cast<int32_t>(regions_.size()); }

 private:
  const KvRegion& region(int32_t id) const { return regions_[static_cast<size_t>(id)]; }

  std::vector<KvRegion> regions_;
  std::vector<int32_t> by_address_;
};

}  // namespace tagma
