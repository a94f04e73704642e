// PrefixIndex against std::map: every short sequence on keys that all collide, random runs for each
// kind of key, and duplicates in the order of their publication.
#include "tagma/prefix_index.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/check.hpp"
#include "tests/exhaustive.hpp"

namespace {

using tagma::BlockId;
using tagma::kNullBlock;
using tagma::PrefixIndex;
using tagma::UsageError;

const uint8_t* bytes(const std::string& key) {
  return reinterpret_cast<const uint8_t*>(key.data());
}

using Name = std::pair<int32_t, std::string>;  // group and key

// The index beside the map it must equal.
class Pair {
 public:
  Pair(int32_t num_blocks, size_t key_bytes, uint64_t seed, int32_t num_groups = 1)
      : index(num_blocks, seed, num_groups), groups(num_groups) {
    index.set_key_bytes(key_bytes);
  }

  void insert(BlockId block, const std::string& key, int32_t group = 0) {
    index.insert(block, group, bytes(key));
    blocks_of[{group, key}].push_back(block);
    key_of[block] = {group, key};
  }

  void erase(BlockId block) {
    index.erase(block);
    const Name name = key_of.at(block);
    std::vector<BlockId>& list = blocks_of[name];
    list.erase(std::find(list.begin(), list.end(), block));
    if (list.empty()) blocks_of.erase(name);
    key_of.erase(block);
  }

  void move(BlockId from, BlockId to) {
    index.move(from, to);
    std::vector<BlockId>& list = blocks_of.at(key_of.at(from));
    *std::find(list.begin(), list.end(), from) = to;
    key_of[to] = key_of.at(from);
    key_of.erase(from);
  }

  BlockId expected(const std::string& key, int32_t group = 0) const {
    const auto found = blocks_of.find({group, key});
    return found == blocks_of.end() ? kNullBlock : found->second.front();
  }

  void compare(const std::vector<std::string>& keys, int32_t num_blocks) const {
    index.check_invariants();
    CHECK(index.size() == static_cast<int32_t>(key_of.size()));
    CHECK(index.num_keys() == static_cast<int32_t>(blocks_of.size()));
    for (const std::string& key : keys) {
      for (int32_t group = 0; group < groups; ++group) {
        CHECK(index.find(group, bytes(key)) == expected(key, group));
        for (BlockId previous = 0; previous < num_blocks; ++previous) {
          CHECK(index.find_behind(group, previous, bytes(key)) == expected(key, group));
        }
      }
    }
    for (BlockId b = 1; b < num_blocks; ++b) {
      const auto found = key_of.find(b);
      CHECK(index.contains(b) == (found != key_of.end()));
      if (found == key_of.end()) continue;
      CHECK(index.group(b) == found->second.first);
      CHECK(std::string(reinterpret_cast<const char*>(index.key(b)), index.key_bytes()) ==
            found->second.second);
      for (int32_t group = 0; group < groups; ++group) {
        CHECK(index.has_key(b, group, bytes(found->second.second)) ==
              (group == found->second.first));
      }
    }
  }

  PrefixIndex index;
  int32_t groups;
  std::map<Name, std::vector<BlockId>> blocks_of;  // in order of publication
  std::map<BlockId, Name> key_of;
};

// Bytes whose first eight, the only ones that choose a slot, are the same for all.
std::string colliding_key(int i, size_t key_bytes = 32) {
  std::string key(key_bytes, 'x');
  key[8] = static_cast<char>(i);
  key[key_bytes - 1] = static_cast<char>(i >> 8);
  return key;
}

// Keys with homes all over the table: the first bytes differ.
std::string spread_key(size_t key_bytes, uint64_t i) {
  std::string key(key_bytes, '\0');
  for (size_t at = 0; at < key_bytes; ++at) {
    key[at] = static_cast<char>(at < 8 ? i >> (8 * at) : i * 31 + at);
  }
  return key;
}

// One key in each group is as good as several in one.
void every_short_sequence(int32_t groups, const std::vector<std::string>& keys, int depth) {
  constexpr int32_t kBlocks = 5;
  const int names = static_cast<int>(keys.size()) * groups;
  Choices choices;
  int64_t sequences = 0;
  do {
    Pair pair(kBlocks, keys[0].size(), 7, groups);
    for (int step = 0; step < depth; ++step) {
      // A published block can be withdrawn or moved; the first one that is not gets one of the keys
      // or the moved block's place.
      std::vector<BlockId> published;
      BlockId fresh = kNullBlock;
      for (BlockId b = kBlocks - 1; b >= 1; --b) {
        if (pair.key_of.count(b) > 0) {
          published.push_back(b);
        } else {
          fresh = b;
        }
      }
      const int inserts = fresh == kNullBlock ? 0 : names;
      const int erasures = static_cast<int>(published.size());
      const int moves = fresh == kNullBlock ? 0 : erasures;
      const int choice = choices.choose(inserts + erasures + moves);
      if (choice < inserts) {
        pair.insert(fresh, keys[static_cast<size_t>(choice / groups)], choice % groups);
      } else if (choice < inserts + erasures) {
        pair.erase(published[static_cast<size_t>(choice - inserts)]);
      } else {
        pair.move(published[static_cast<size_t>(choice - inserts - erasures)], fresh);
      }
      if (choices.fresh()) pair.compare(keys, kBlocks);
    }
    ++sequences;
  } while (choices.next());
  std::printf("  %d groups: %lld sequences\n", groups, static_cast<long long>(sequences));
}

void every_short_sequence_on_colliding_keys() {
  every_short_sequence(1, {colliding_key(0), colliding_key(1), colliding_key(2)}, 6);
  every_short_sequence(3, {colliding_key(0)}, 6);
  every_short_sequence(2, {colliding_key(0, 36), colliding_key(1, 36)}, 5);
}

void random_runs_agree_with_a_map() {
  for (const size_t key_bytes : {1, 2, 4, 7, 8, 9, 16, 20, 31, 32, 36, 64}) {
    for (const bool collide : {false, true}) {
      for (const int32_t groups : {1, 2, 3}) {
        if (collide && key_bytes < 32) continue;
        constexpr int32_t kBlocks = 40;
        std::mt19937_64 random(key_bytes * 2 + (collide ? 1 : 0));
        std::vector<std::string> keys;
        for (int i = 0; i < 30 / groups; ++i) {
          keys.push_back(collide ? colliding_key(i, key_bytes)
                                 : spread_key(key_bytes, random() % 100000));
        }
        Pair pair(kBlocks, key_bytes, random(), groups);
        for (int step = 0; step < 3000; ++step) {
          const BlockId block = 1 + static_cast<BlockId>(random() % (kBlocks - 1));
          // Mostly full and mostly empty by turns.
          const bool filling = step / 200 % 2 == 0;
          if (pair.key_of.count(block) == 0 && random() % 4 < (filling ? 3U : 1U)) {
            const auto group = static_cast<int32_t>(random() % static_cast<uint64_t>(groups));
            pair.insert(block, keys[random() % keys.size()], group);
          } else if (pair.key_of.count(block) > 0 && random() % 4 < (filling ? 1U : 3U)) {
            pair.erase(block);
          }
          const BlockId to = 1 + static_cast<BlockId>(random() % (kBlocks - 1));
          if (pair.key_of.count(block) > 0 && pair.key_of.count(to) == 0 && random() % 2 == 0) {
            pair.move(block, to);
          }
          if (step % 10 == 0) pair.compare(keys, kBlocks);
        }
        pair.index.clear();
        pair.blocks_of.clear();
        pair.key_of.clear();
        pair.compare(keys, kBlocks);
      }
    }
  }
}

// All blocks published, in tables of every fill up to the largest: clusters wrap around its end.
void full_indexes_stay_searchable() {
  for (int32_t num_blocks = 2; num_blocks <= 130; ++num_blocks) {
    Pair pair(num_blocks, 16, static_cast<uint64_t>(num_blocks));
    std::vector<std::string> keys;
    for (BlockId b = 1; b < num_blocks; ++b) {
      keys.push_back(spread_key(16, static_cast<uint64_t>(b) * 0x9E3779B97F4A7C15u));
      pair.insert(b, keys.back());
    }
    for (const std::string& key : keys) CHECK(pair.index.find(0, bytes(key)) == pair.expected(key));
    CHECK(pair.index.find(0, bytes(spread_key(16, 1))) == kNullBlock);
    for (BlockId b = 1; b < num_blocks; b += 2) pair.erase(b);
    pair.index.check_invariants();
    for (const std::string& key : keys) CHECK(pair.index.find(0, bytes(key)) == pair.expected(key));
  }
}

void duplicates_are_found_in_order_of_publication() {
  const std::string key = colliding_key(1);
  for (int first = 0; first < 4; ++first) {
    for (int second = 0; second < 4; ++second) {
      Pair pair(10, 32, 3);
      pair.insert(9, colliding_key(0));
      for (const BlockId b : {5, 2, 7, 3}) pair.insert(b, key);
      CHECK(pair.index.find(0, bytes(key)) == 5);
      const std::vector<BlockId> order = {5, 2, 7, 3};
      pair.erase(order[static_cast<size_t>(first)]);
      pair.compare({key, colliding_key(0)}, 10);
      if (second != first) pair.erase(order[static_cast<size_t>(second)]);
      pair.compare({key, colliding_key(0)}, 10);
      pair.insert(8, key);  // behind those that are left
      pair.compare({key, colliding_key(0)}, 10);
      while (pair.expected(key) != kNullBlock) {
        pair.erase(pair.expected(key));
        pair.compare({key, colliding_key(0)}, 10);
      }
    }
  }
}

// A block that moves keeps its turn: the first stays the first, the last the last.
void a_moved_block_keeps_its_turn() {
  const std::string key = colliding_key(1);
  for (size_t i = 0; i < 4; ++i) {
    for (size_t j = 0; j < 4; ++j) {
      Pair pair(12, 32, 3);
      pair.insert(9, colliding_key(0));
      for (const BlockId b : {5, 2, 7, 3}) pair.insert(b, key);
      pair.move(pair.blocks_of.at({0, key})[i], 10);
      pair.compare({key, colliding_key(0)}, 12);
      pair.move(pair.blocks_of.at({0, key})[j], 11);
      pair.insert(6, key);
      while (pair.expected(key) != kNullBlock) {
        pair.compare({key, colliding_key(0)}, 12);
        pair.erase(pair.expected(key));
      }
      pair.compare({key, colliding_key(0)}, 12);
    }
  }
}

void keys_are_compared_in_full() {
  for (size_t at = 0; at < 32; ++at) {
    Pair pair(4, 32, 1);
    std::string key(32, 'k');
    pair.insert(1, key);
    std::string other = key;
    other[at] ^= 1;
    CHECK(pair.index.find(0, bytes(other)) == kNullBlock);
    CHECK(pair.index.find(0, bytes(key)) == 1);
    pair.insert(2, other);
    CHECK(pair.index.find(0, bytes(other)) == 2);
    CHECK(pair.index.find(0, bytes(key)) == 1);
  }
}

// The same prefix in every group, published in a different order in each, and moved across places
// that another group had.
void a_key_leads_to_the_blocks_of_its_group() {
  for (const size_t key_bytes : {36, 64}) {
    const std::string key = colliding_key(1, key_bytes);
    Pair pair(20, key_bytes, 5, 3);
    for (BlockId b = 1; b <= 9; ++b) pair.insert(b, key, b % 3);
    pair.compare({key, colliding_key(2, key_bytes)}, 20);
    CHECK(pair.index.num_keys() == 3 && pair.index.size() == 9);
    CHECK(pair.index.find(0, bytes(key)) == 3 && pair.index.find(1, bytes(key)) == 1);
    pair.move(1, 10);
    pair.move(3, 1);  // group 0 where group 1 was
    pair.compare({key}, 20);
    CHECK(pair.index.find(0, bytes(key)) == 1 && pair.index.find(1, bytes(key)) == 10);
    pair.erase(1);
    pair.erase(10);
    pair.insert(1, key, 2);
    pair.compare({key}, 20);
    CHECK(pair.index.find(0, bytes(key)) == 6 && pair.index.find(1, bytes(key)) == 4);
    while (!pair.key_of.empty()) {
      pair.erase(pair.key_of.begin()->first);
      pair.compare({key}, 20);
    }
  }
}

void as_many_groups_as_a_byte_names() {
  CHECK_THROWS(PrefixIndex(8, 1, 0), UsageError);
  CHECK_THROWS(PrefixIndex(8, 1, 257), UsageError);
  Pair pair(300, 32, 1, 256);
  for (int32_t g = 0; g < 256; ++g) pair.insert(g + 1, colliding_key(0), g);
  for (int32_t g = 0; g < 256; ++g) CHECK(pair.index.find(g, bytes(colliding_key(0))) == g + 1);
  pair.index.check_invariants();
}

void misuse_is_refused_and_changes_nothing() {
  PrefixIndex index(8, 1);
  const std::string key = colliding_key(0);
  CHECK(index.find(0, bytes(key)) == kNullBlock);
  CHECK_THROWS(index.insert(1, 0, bytes(key)), UsageError);  // no key length yet
  CHECK_THROWS(index.set_key_bytes(0), UsageError);
  CHECK_THROWS(index.set_key_bytes(65), UsageError);
  CHECK(index.key_bytes() == 0);
  index.set_key_bytes(32);
  index.set_key_bytes(32);
  CHECK_THROWS(index.set_key_bytes(0), UsageError);
  CHECK_THROWS(index.set_key_bytes(16), UsageError);
  CHECK(index.key_bytes() == 32);
  index.insert(1, 0, bytes(key));
  CHECK_THROWS(index.insert(1, 0, bytes(colliding_key(1))), UsageError);
  CHECK(index.find(0, bytes(key)) == 1);
  CHECK_THROWS(index.erase(2), UsageError);
  CHECK_THROWS(index.move(2, 3), UsageError);
  CHECK_THROWS(index.move(1, 1), UsageError);
  index.insert(2, 0, bytes(colliding_key(1)));
  CHECK_THROWS(index.move(1, 2), UsageError);
  CHECK(index.find(0, bytes(key)) == 1 && index.find(0, bytes(colliding_key(1))) == 2);
  index.erase(2);
  index.erase(1);
  CHECK_THROWS(index.erase(1), UsageError);
  CHECK(index.size() == 0 && index.num_keys() == 0);
  index.check_invariants();
}

}  // namespace

int main() {
  return run_tests({
      {"every short sequence on colliding keys", every_short_sequence_on_colliding_keys},
      {"random runs agree with a map", random_runs_agree_with_a_map},
      {"full indexes stay searchable", full_indexes_stay_searchable},
      {"duplicates are found in order of publication",
       duplicates_are_found_in_order_of_publication},
      {"a moved block keeps its turn", a_moved_block_keeps_its_turn},
      {"keys are compared in full", keys_are_compared_in_full},
      {"a key leads to the blocks of its group", a_key_leads_to_the_blocks_of_its_group},
      {"as many groups as a byte names", as_many_groups_as_a_byte_names},
      {"misuse is refused and changes nothing", misuse_is_refused_and_changes_nothing},
  });
}
