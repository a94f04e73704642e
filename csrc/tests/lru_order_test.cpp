// LruOrder against std::deque: the order, and which blocks are cold, after every operation.
#include "tagma/lru_order.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <random>

#include "tests/check.hpp"
#include "tests/exhaustive.hpp"

namespace {

using tagma::BlockId;
using tagma::BlockRange;
using tagma::InvariantError;
using tagma::kNullBlock;
using tagma::LruOrder;

// The order beside the list that it must equal; as in the allocator, cooled after each operation.
class Pair {
 public:
  Pair(int32_t num_blocks, int32_t slack)
      : order(num_blocks, slack), num_blocks_(num_blocks), slack_(slack) {}

  void push(BlockId block) {
    order.push(block);
    blocks.push_back(block);
    cool();
  }
  void push_backwards(BlockRange range) {
    order.push_backwards(range);
    for (BlockId b = range.end() - 1; b >= range.start; --b) blocks.push_back(b);
    cool();
  }
  void remove(BlockId block) {
    order.remove(block);
    blocks.erase(std::find(blocks.begin(), blocks.end(), block));
    cool();
  }
  void remove(BlockRange range) {
    order.remove(range);
    for (BlockId b = range.start; b < range.end(); ++b) {
      blocks.erase(std::find(blocks.begin(), blocks.end(), b));
    }
    cool();
  }
  void replace(BlockId from, BlockId to) {
    order.replace(from, to);
    *std::find(blocks.begin(), blocks.end(), from) = to;
    cool();
  }

  // Each block that is said to warm up is the newest cold one.
  void set_slack(int32_t slack) {
    slack_ = slack;
    order.set_slack(slack);
    for (BlockId b = order.warm_up(); b != kNullBlock; b = order.warm_up()) {
      CHECK(blocks[static_cast<size_t>(order.num_cold())] == b);
    }
    cool();
  }

  bool holds(BlockId block) const {
    return std::find(blocks.begin(), blocks.end(), block) != blocks.end();
  }

  // The blocks from `first` on that are in the order, or are not, at most `count`.
  BlockRange run_from(BlockId first, int32_t count, bool held) const {
    BlockRange range{first, 0};
    while (range.count < count && range.end() < num_blocks_ && holds(range.end()) == held) {
      ++range.count;
    }
    return range;
  }

  void compare() const {
    order.check_invariants([this](BlockId b) { return holds(b); });
    CHECK(order.size() == static_cast<int32_t>(blocks.size()));
    CHECK(order.num_cold() == std::min(slack_, order.size()));
    BlockId at = order.oldest();
    for (size_t i = 0; i < blocks.size(); ++i) {
      CHECK(at == blocks[i]);
      CHECK(order.is_cold(at) == (static_cast<int32_t>(i) < slack_));
      at = order.behind(at);
    }
    CHECK(at == kNullBlock);
    for (BlockId b = 1; b < num_blocks_; ++b) CHECK(holds(b) || !order.is_cold(b));
  }

  LruOrder order;
  std::deque<BlockId> blocks;

 private:
  // Each block that is said to cool is the oldest warm one, the last of a run first.
  void cool() {
    int32_t cold = order.num_cold();
    for (BlockRange run = order.cool(); run.count > 0; run = order.cool()) {
      for (BlockId b = run.end() - 1; b >= run.start; --b) {
        CHECK(blocks[static_cast<size_t>(cold++)] == b);
      }
      CHECK(order.num_cold() == cold);
    }
  }

  int32_t num_blocks_;
  int32_t slack_;
};

void every_short_sequence() {
  for (int32_t slack = 0; slack <= 4; ++slack) {
    Choices choices;
    int64_t sequences = 0;
    do {
      Pair pair(5, slack);
      for (int step = 0; step < 8; ++step) {
        // Remove any; push the first that is not in; let it replace any.
        BlockId fresh = kNullBlock;
        for (BlockId b = 4; b >= 1; --b) fresh = pair.holds(b) ? fresh : b;
        const int held = static_cast<int>(pair.blocks.size());
        const int choice = choices.choose(fresh == kNullBlock ? held : 2 * held + 1);
        if (choice < held) {
          pair.remove(pair.blocks[static_cast<size_t>(choice)]);
        } else if (choice < 2 * held) {
          pair.replace(pair.blocks[static_cast<size_t>(choice - held)], fresh);
        } else {
          pair.push(fresh);
        }
        if (choices.fresh()) pair.compare();
      }
      ++sequences;
    } while (choices.next());
    std::printf("  slack %d: %lld sequences\n", slack, static_cast<long long>(sequences));
  }
}

// The slack goes up and down between the other operations.
void every_short_sequence_with_changes() {
  Choices choices;
  int64_t sequences = 0;
  do {
    Pair pair(5, 1);
    for (int step = 0; step < 6; ++step) {
      BlockId fresh = kNullBlock;
      for (BlockId b = 4; b >= 1; --b) fresh = pair.holds(b) ? fresh : b;
      const int held = static_cast<int>(pair.blocks.size());
      const int choice = choices.choose(held + 4 + (fresh == kNullBlock ? 0 : 1));
      if (choice < held) {
        pair.remove(pair.blocks[static_cast<size_t>(choice)]);
      } else if (choice < held + 4) {
        pair.set_slack(choice - held);
      } else {
        pair.push(fresh);
      }
      if (choices.fresh()) pair.compare();
    }
    ++sequences;
  } while (choices.next());
  std::printf("  changing slack: %lld sequences\n", static_cast<long long>(sequences));
}

void random_runs_agree() {
  for (const int32_t slack : {0, 1, 7, 40, 1000}) {
    Pair pair(100, slack);
    std::mt19937_64 random(static_cast<uint64_t>(slack));
    const auto any = [&] { return 1 + static_cast<BlockId>(random() % 99); };
    for (int step = 0; step < 5000; ++step) {
      const BlockId block = any();
      const BlockId other = any();
      const bool filling = step / 500 % 2 == 0;
      if (step % 7 == 0) pair.set_slack(static_cast<int32_t>(random() % 30));
      if (step % 11 == 0) pair.push_backwards(pair.run_from(any(), 1 + any() % 12, false));
      if (step % 13 == 0) pair.remove(pair.run_from(any(), 1 + any() % 20, true));
      if (!pair.holds(block)) {
        if (filling || random() % 4 == 0) pair.push(block);
      } else if (!pair.holds(other) && random() % 2 == 0) {
        pair.replace(block, other);
      } else if (!filling || random() % 4 == 0) {
        pair.remove(block);
      }
      if (step % 5 == 0) pair.compare();
    }
  }
}

// The checker is no rubber stamp.
void the_checker_sees_what_is_wrong() {
  Pair pair(10, 2);
  for (const BlockId b : {3, 5, 7, 9}) pair.push(b);
  const auto all = [&](BlockId b) { return pair.holds(b); };
  pair.order.check_invariants(all);
  CHECK_THROWS(pair.order.check_invariants([&](BlockId b) { return all(b) && b != 5; }),
               InvariantError);
  CHECK_THROWS(pair.order.check_invariants([&](BlockId b) { return all(b) || b == 1; }),
               InvariantError);
  pair.order.remove(3);  // and nobody cools the next
  pair.blocks.pop_front();
  CHECK_THROWS(pair.order.check_invariants(all), InvariantError);
  CHECK((pair.order.cool() == BlockRange{7, 1}));
  pair.order.check_invariants(all);
}

}  // namespace

int main() {
  return run_tests({
      {"every short sequence", every_short_sequence},
      {"every short sequence with changes", every_short_sequence_with_changes},
      {"random runs agree", random_runs_agree},
      {"the checker sees what is wrong", the_checker_sees_what_is_wrong},
  });
}
