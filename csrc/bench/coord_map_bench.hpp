// kv_coord_map: what it costs to turn a (layer, block, token) into a byte offset.
//
// The shape is that of an 8B model: 32 layers, 8 KV heads of 128 in bf16 (4 KiB a token and layer),
// blocks of 16 tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/round.hpp"
#include "tagma/kv_coord_map.hpp"

namespace tagma::bench {

constexpr int64_t kLayers = 32;
constexpr int64_t kMapBlocks = 65'536;
constexpr int64_t kBlockTokens = 16;
constexpr int64_t kTokenBytes = 4'096;

inline KvCoordMap shape() { return KvCoordMap(kLayers, kMapBlocks, kBlockTokens, kTokenBytes); }

// One offset of a random coordinate, bounds checked.
inline void coord_single_offset(Round& round) {
  const KvCoordMap map = shape();
  Random random(1);
  std::vector<KvCoord> coords(4'096);
  for (KvCoord& c : coords) {
    c = {random.below(kLayers), random.below(kMapBlocks), random.below(kBlockTokens)};
  }
  size_t i = 0;
  const auto call = [&] {
    const KvCoord& c = coords[i++ & 4'095];
    keep(map.offset_bytes(c.layer, c.block, c.token));
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
}

// A decode step's walk for one request: its new token in each of the layers.
inline void coord_decode_walk(Round& round) {
  const KvCoordMap map = shape();
  Random random(2);
  int64_t position = 0;
  const int64_t start = random.below(kMapBlocks / 2);
  const auto call = [&] {
    const int64_t block = start + position / kBlockTokens;
    const int64_t token = position % kBlockTokens;
    int64_t sum = 0;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      sum += map.offset_bytes(layer, block, token);
    }
    keep(sum);
    position = (position + 1) & 8'191;
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("offsets_per_call", kLayers);
}

// The offsets of 4,096 consecutive tokens of one layer, as a context read visits them.
inline void coord_context_walk(Round& round) {
  const KvCoordMap map = shape();
  constexpr int64_t kTokens = 4'096;
  int64_t start = 1;
  const auto call = [&] {
    int64_t sum = 0;
    for (int64_t position = 0; position < kTokens; ++position) {
      sum += map.offset_bytes(3, start + position / kBlockTokens, position % kBlockTokens);
    }
    keep(sum);
    start = start % 60'000 + 7;
  };
  round.warm_up(call);
  round.time(round.wanted(), call);
  round.count("offsets_per_call", kTokens);
}

}  // namespace tagma::bench
