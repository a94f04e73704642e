// Closed-form coordinates of the KV cache: (layer, block, token) <-> n <-> byte offset.
//
//   n      = (layer * B + block) * T + token
//   offset = n * bytes_per_token
//
// The layout is layer-major: within a layer a range of blocks is one contiguous stretch of bytes,
// so a request of r ranges needs layers * r transfer descriptors.
#pragma once

#include <cstdint>
#include <limits>

#include "tagma/errors.hpp"

namespace tagma {

struct KvCoord {
  int64_t layer;
  int64_t block;
  int64_t token;
};

class KvCoordMap {
 public:
  // layers, blocks (B) and tokens per block (T) count; bytes_per_token is one layer's K and V of
  // one token. Throws UsageError if any is not positive or the last byte does not fit in 63 bits.
  KvCoordMap(int64_t layers, int64_t blocks, int64_t tokens_per_block, int64_t bytes_per_token)
      : layers_(positive("layers", layers)),
        blocks_(positive("blocks", blocks)),
        tokens_(positive("tokens_per_block", tokens_per_block)),
        bytes_per_token_(positive("bytes_per_token", bytes_per_token)),
        size_(times(times(layers, blocks), tokens_per_block)),
        size_bytes_(times(size_, bytes_per_token)) {}

  // Throws UsageError if a coordinate is out of bounds.
  int64_t n(int64_t layer, int64_t block, int64_t token) const {
    within("layer", layer, layers_);
    within("block", block, blocks_);
    within("token", token, tokens_);
    return (layer * blocks_ + block) * tokens_ + token;
  }

  int64_t offset_bytes(int64_t layer, int64_t block, int64_t token) const {
    return n(layer, block, token) * bytes_per_token_;
  }

  KvCoord coord(int64_t n) const {
    within("n", n, size_);
    const int64_t row = n / tokens_;
    return {row / blocks_, row % blocks_, n % tokens_};
  }

  // The coordinate whose bytes hold `offset`; any byte of a token maps to it.
  KvCoord coord_of_offset(int64_t offset) const {
    within("offset", offset, size_bytes_);
    return coord(offset / bytes_per_token_);
  }

  int64_t layers() const { return layers_; }
  int64_t blocks() const { return blocks_; }
  int64_t tokens_per_block() const { return tokens_; }
  int64_t bytes_per_token() const { return bytes_per_token_; }
  int64_t size() const { return size_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  static int64_t positive(const char* name, int64_t value) {
    if (value <= 0) throw UsageError(message(name, "=", value, " is not positive"));
    return value;
  }

  static int64_t times(int64_t a, int64_t b) {
    if (a > std::numeric_limits<int64_t>::max() / b) {
      throw UsageError(message(a, " * ", b, " overflows a 64-bit KV coordinate"));
    }
    return a * b;
  }

  static void within(const char* name, int64_t value, int64_t limit) {
    if (value < 0 || value >= limit) {
      throw UsageError(message(name, "=", value, " is outside [0, ", limit, ")"));
    }
  }

  int64_t layers_;
  int64_t blocks_;
  int64_t tokens_;
  int64_t bytes_per_token_;
  int64_t size_;
  int64_t size_bytes_;
};

}  // namespace tagma
