// MoveLog: one round of its copies, read all and then write all, leaves what doing each move at
// once would have left, wherever a content still lives.
#include "tagma/move_log.hpp"

#include <cstdint>
#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "tests/check.hpp"
#include "tests/exhaustive.hpp"

namespace {

using tagma::BlockCopy;
using tagma::BlockId;
using tagma::MoveLog;

// Block contents as the pool believes them to be, beside those of the worker.
class Pair {
 public:
  explicit Pair(int32_t num_blocks)
      : log(num_blocks), now(static_cast<size_t>(num_blocks)), worker(now.size()) {
    for (size_t b = 0; b < now.size(); ++b) now[b] = worker[b] = static_cast<int64_t>(b) + 1;
  }

  // The content of `from` moves; what was at `to` is gone, and `from` holds nothing of worth.
  void move(BlockId from, BlockId to) {
    log.record(from, to);
    now[static_cast<size_t>(to)] = now[static_cast<size_t>(from)];
    now[static_cast<size_t>(from)] = kNothing;
  }
  void drop(BlockId block) {
    log.drop(block);
    now[static_cast<size_t>(block)] = kNothing;
  }
  bool holds(BlockId block) const { return now[static_cast<size_t>(block)] != kNothing; }

  void execute() {
    const int32_t owed = log.size();
    const std::vector<BlockCopy> copies = log.take();
    CHECK(static_cast<int32_t>(copies.size()) == owed && log.size() == 0 && log.take().empty());
    std::set<BlockId> targets;
    std::vector<int64_t> read;
    for (const BlockCopy& copy : copies) {
      CHECK(copy.from != copy.to);
      CHECK(targets.insert(copy.to).second);
      CHECK(holds(copy.to));  // nothing is copied in vain
      read.push_back(worker[static_cast<size_t>(copy.from)]);
    }
    for (size_t i = 0; i < copies.size(); ++i) worker[static_cast<size_t>(copies[i].to)] = read[i];
    for (size_t b = 0; b < now.size(); ++b) {
      if (now[b] != kNothing) CHECK(worker[b] == now[b]);
    }
    now = worker;
  }

  static constexpr int64_t kNothing = 0;

  MoveLog log;
  std::vector<int64_t> now;     // [block] what must be there after the next round
  std::vector<int64_t> worker;  // [block] what is there
};

void every_short_sequence() {
  constexpr int32_t kBlocks = 4;
  Choices choices;
  int64_t sequences = 0;
  do {
    Pair pair(kBlocks);
    for (int step = 0; step < 5; ++step) {
      std::vector<BlockId> held;
      for (BlockId b = 0; b < kBlocks; ++b) {
        if (pair.holds(b)) held.push_back(b);
      }
      if (held.empty()) break;
      const BlockId from = held[static_cast<size_t>(choices.choose(static_cast<int>(held.size())))];
      const BlockId to = choices.choose(kBlocks);
      from == to ? pair.drop(from) : pair.move(from, to);
    }
    pair.execute();
    ++sequences;
  } while (choices.next());
  std::printf("  %lld sequences\n", static_cast<long long>(sequences));
}

void random_rounds_agree() {
  std::mt19937_64 random(1);
  for (const int32_t num_blocks : {2, 3, 5, 9, 40}) {
    Pair pair(num_blocks);
    for (int round = 0; round < 2000; ++round) {
      for (uint64_t i = random() % 30; i > 0; --i) {
        const auto from = static_cast<BlockId>(random() % static_cast<uint64_t>(num_blocks));
        const auto to = static_cast<BlockId>(random() % static_cast<uint64_t>(num_blocks));
        if (!pair.holds(from)) continue;
        from == to ? pair.drop(from) : pair.move(from, to);
      }
      pair.execute();
    }
  }
}

std::vector<BlockCopy> after(std::initializer_list<BlockCopy> moves) {
  MoveLog log(10);
  for (const BlockCopy& move : moves) log.record(move.from, move.to);
  return log.take();
}

void a_chain_is_one_copy_and_there_and_back_is_none() {
  const std::vector<BlockCopy> chain = after({{1, 2}, {2, 3}, {3, 4}});
  CHECK(chain.size() == 1 && chain[0].from == 1 && chain[0].to == 4);
  CHECK(after({{1, 2}, {2, 1}}).empty());
  CHECK(after({{1, 2}, {2, 3}, {3, 1}}).empty());
  // Two blocks change places through a third: two copies, and the third is not written.
  const std::vector<BlockCopy> swap = after({{1, 3}, {2, 1}, {3, 2}});
  CHECK(swap.size() == 2);
  for (const BlockCopy& copy : swap) CHECK(copy.from + copy.to == 3);
  // What is overwritten is not copied first.
  const std::vector<BlockCopy> over = after({{1, 3}, {2, 3}});
  CHECK(over.size() == 1 && over[0].from == 2);
}

void a_block_that_is_not_needed_is_not_copied() {
  MoveLog log(10);
  for (BlockId b = 1; b < 5; ++b) log.record(b, b + 5);
  log.drop(7);
  log.drop(7);
  log.drop(3);  // nothing is owed to it
  log.record(8, 7);
  const std::vector<BlockCopy> copies = log.take();
  CHECK(copies.size() == 3);
  for (const BlockCopy& copy : copies) {
    CHECK((copy.from == 1 && copy.to == 6) || (copy.from == 3 && copy.to == 7) ||
          (copy.from == 4 && copy.to == 9));
  }
}

}  // namespace

int main() {
  return run_tests({
      {"every short sequence", every_short_sequence},
      {"random rounds agree", random_rounds_agree},
      {"a chain is one copy, and there and back is none",
       a_chain_is_one_copy_and_there_and_back_is_none},
      {"a block that is not needed is not copied", a_block_that_is_not_needed_is_not_copied},
  });
}
