// The coordinate map: a bijection inside its bounds, a refusal outside of them.
#include <cstdint>
#include <limits>

#include "tagma/kv_coord_map.hpp"
#include "tests/check.hpp"

namespace {

using tagma::KvCoord;
using tagma::KvCoordMap;
using tagma::UsageError;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

void is_a_bijection_on_every_small_shape() {
  for (int64_t layers = 1; layers <= 4; ++layers) {
    for (int64_t blocks = 1; blocks <= 5; ++blocks) {
      for (int64_t tokens = 1; tokens <= 4; ++tokens) {
        for (const int64_t bytes : {1, 3, 8}) {
          const KvCoordMap map(layers, blocks, tokens, bytes);
          CHECK(map.size() == layers * blocks * tokens);
          CHECK(map.size_bytes() == map.size() * bytes);
          int64_t expected = 0;  // layer-major order visits n = 0, 1, 2, ...
          for (int64_t layer = 0; layer < layers; ++layer) {
            for (int64_t block = 0; block < blocks; ++block) {
              for (int64_t token = 0; token < tokens; ++token, ++expected) {
                CHECK(map.n(layer, block, token) == expected);
                CHECK(map.offset_bytes(layer, block, token) == expected * bytes);
                const KvCoord c = map.coord(expected);
                CHECK(c.layer == layer && c.block == block && c.token == token);
                for (int64_t byte = 0; byte < bytes; ++byte) {
                  const KvCoord o = map.coord_of_offset(expected * bytes + byte);
                  CHECK(o.layer == layer && o.block == block && o.token == token);
                }
              }
            }
          }
          CHECK(expected == map.size());
        }
      }
    }
  }
}

void refuses_what_is_out_of_bounds() {
  const KvCoordMap map(2, 3, 4, 5);
  for (const int64_t bad : {int64_t{-1}, std::numeric_limits<int64_t>::min(), kMax}) {
    CHECK_THROWS(map.n(bad, 0, 0), UsageError);
    CHECK_THROWS(map.n(0, bad, 0), UsageError);
    CHECK_THROWS(map.n(0, 0, bad), UsageError);
    CHECK_THROWS(map.offset_bytes(bad, 0, 0), UsageError);
    CHECK_THROWS(map.coord(bad), UsageError);
    CHECK_THROWS(map.coord_of_offset(bad), UsageError);
  }
  CHECK_THROWS(map.n(2, 0, 0), UsageError);
  CHECK_THROWS(map.n(0, 3, 0), UsageError);
  CHECK_THROWS(map.n(0, 0, 4), UsageError);
  CHECK_THROWS(map.coord(map.size()), UsageError);
  CHECK_THROWS(map.coord_of_offset(map.size_bytes()), UsageError);
  CHECK(map.n(1, 2, 3) == map.size() - 1);
}

void refuses_shapes_that_are_not_positive() {
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    CHECK_THROWS(KvCoordMap(bad, 1, 1, 1), UsageError);
    CHECK_THROWS(KvCoordMap(1, bad, 1, 1), UsageError);
    CHECK_THROWS(KvCoordMap(1, 1, bad, 1), UsageError);
    CHECK_THROWS(KvCoordMap(1, 1, 1, bad), UsageError);
  }
}

void refuses_shapes_whose_last_byte_overflows() {
  const KvCoordMap largest(1, 1, 1, kMax);
  CHECK(largest.size_bytes() == kMax);
  CHECK(largest.coord_of_offset(kMax - 1).token == 0);
  // 2^63 - 1 = 7 * 1317624576693539401: the exact bound, spread over two factors.
  CHECK(KvCoordMap(7, kMax / 7, 1, 1).size() == kMax);
  CHECK(KvCoordMap(7, kMax / 7, 1, 1).n(6, kMax / 7 - 1, 0) == kMax - 1);
  CHECK_THROWS(KvCoordMap(7, kMax / 7 + 1, 1, 1), UsageError);
  CHECK_THROWS(KvCoordMap(kMax, 2, 1, 1), UsageError);
  CHECK_THROWS(KvCoordMap(int64_t{1} << 32, int64_t{1} << 31, 1, 1), UsageError);
  CHECK_THROWS(KvCoordMap(int64_t{1} << 31, int64_t{1} << 31, 2, 1), UsageError);
  CHECK_THROWS(KvCoordMap(int64_t{1} << 31, int64_t{1} << 31, 1, 2), UsageError);
  // A shape of today's largest machines is far inside: 128 layers, 2^24 blocks of 16, 4 KiB a
  // token.
  CHECK(KvCoordMap(128, 1 << 24, 16, 4096).size_bytes() == int64_t{1} << 47);
}

void errors_name_value_and_limit() {
  try {
    KvCoordMap(2, 3, 4, 5).n(0, 3, 0);
    CHECK(false);
  } catch (const UsageError& error) {
    CHECK(std::string(error.what()) == "block=3 is outside [0, 3)");
  }
}

}  // namespace

int main() {
  return run_tests({
      {"is a bijection on every small shape", is_a_bijection_on_every_small_shape},
      {"refuses what is out of bounds", refuses_what_is_out_of_bounds},
      {"refuses shapes that are not positive", refuses_shapes_that_are_not_positive},
      {"refuses shapes whose last byte overflows", refuses_shapes_whose_last_byte_overflows},
      {"errors name value and limit", errors_name_value_and_limit},
  });
}
