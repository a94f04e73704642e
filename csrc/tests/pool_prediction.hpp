// What a KvPool should do, predicted from the obvious models of its parts: whether there is room,
// which blocks are evicted in which order, when the range cap refuses. Where the pool may choose
// (slack: what to evict; compaction: what to move) the models follow it move by move, and the
// limits of the choice are checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/block_model.hpp"
#include "tests/cache_model.hpp"
#include "tests/check.hpp"
#include "tests/key_book.hpp"

class PoolPrediction {
 public:
  // A request's row in one group.
  struct Part {
    tagma::RangeList blocks;
    int32_t published = 0;
    int32_t published_before_step = 0;
    int64_t published_step = -1;
    int64_t grown_step = -1;  // never: it is being admitted
  };
  struct Row {
    tagma::RowHandle handle;
    const Keys* keys;         // the same in every group, as one hash stands for one prefix
    std::vector<Part> parts;  // [group]

    const tagma::RangeList& blocks(size_t group = 0) const { return parts[group].blocks; }
    int32_t published(size_t group = 0) const { return parts[group].published; }
  };
  struct Pin {
    tagma::PinHandle handle;
    tagma::RangeList blocks;
  };

  // Everything is predicted: nothing moves, and eviction has no choice.
  bool is_strict() const {
    return !options_.policy.has_slack() &&
           (options_.compaction == tagma::Compaction::kOff || options_.copy_budget == 0);
  }

  tagma::KvPool pool;
  BlockModel blocks;
  CacheModel cache;
  std::vector<Row> rows;
  std::vector<Pin> pins;
  int64_t latest_turn = 0;  // by how many turns a block was evicted too early, at most

 protected:
  PoolPrediction(const tagma::PoolOptions& options, const KeyBook& book)
      : pool(recording(options)),
        blocks(options.num_blocks, options.alignment),
        cache(options.groups, book, options.num_blocks),
        book_(book),
        options_(options),
        cap_(options.max_ranges),
        num_groups_(options.groups.size()) {
    pool.set_key_bytes(book.bytes());
  }

  // One capacity check for all groups: `held` blocks in each, `idle_hits` taken from the free ones.
  bool passes_gate(const std::vector<int64_t>& held, int64_t idle_hits,
                   const std::vector<tagma::Need>& needs, const tagma::Spare& spare) const {
    int64_t whole = 0;
    bool gated = false;
    for (size_t g = 0; g < num_groups_; ++g) {
      whole += std::max<int64_t>(needs[g].gate - held[g], 0);
      gated |= needs[g].gate > 0;
    }
    return !gated || whole + idle_hits + spare.watermark <= blocks.num_free();
  }
  bool fits(const std::vector<int64_t>& held, int64_t idle_hits,
            const std::vector<tagma::Need>& needs, const tagma::Spare& spare) const {
    int64_t lacking = 0;
    for (size_t g = 0; g < num_groups_; ++g) {
      lacking += std::max<int64_t>(needs[g].blocks - held[g], 0);
    }
    return lacking + idle_hits + spare.watermark + spare.reserved <= blocks.num_free();
  }

  // Follows what the pool did to give a request's rows their blocks; false if it rightly refused.
  // Then the rows are as before.
  bool settle(Row& row, const std::vector<tagma::Need>& needs,
              const std::vector<tagma::RangeList>& added, bool given) {
    std::vector<int32_t> lacking;
    int32_t all = 0;
    for (size_t g = 0; g < num_groups_; ++g) {
      lacking.push_back(std::max(needs[g].blocks - row.blocks(g).num_blocks(), 0));
      all += lacking.back();
      CHECK(added[g].num_blocks() == (given ? lacking.back() : 0));
    }
    if (all == 0) {
      CHECK(given);
      expect_untouched();
      return true;
    }
    if (is_strict()) return settle_exactly(row, lacking, added, given);
    return settle_by_following(row, lacking, all, added, given);
  }

  // Repeats the pool's moves and evictions. The pool reports each kind in order, but not how they
  // lie between each other: an eviction is repeated when a move needs the block it empties, at the
  // latest at the end. `row` may be one that is not in `rows` yet. Returns how many blocks of rows
  // moved.
  int64_t follow(Row& row, bool for_cap) {
    const std::vector<tagma::EvictedBlock> evicted = pool.take_evicted();
    CHECK(pool.num_evictions() - evictions_ == static_cast<int64_t>(evicted.size()));
    size_t next = 0;
    int64_t live = 0;
    int64_t in_rows = 0;  // these, and the hit of a new row
    const auto repeat_eviction = [&] {
      CHECK(next < evicted.size());
      const tagma::EvictedBlock& block = evicted[next++];
      if (!for_cap) check_turn(block.block);
      expect_eviction(block);
    };
    for (const tagma::BlockCopy& move : pool.take_relocations()) {
      CHECK(options_.compaction != tagma::Compaction::kOff);
      CHECK(!is_pinned(move.from));
      while (!blocks.in_hole(move.to)) repeat_eviction();
      const int32_t refs = blocks.refs(move.from);
      CHECK(refs <= 1);  // shared blocks never move
      if (refs == 1) {
        Part& owner = owner_of(row, move.from);
        // The prefix hit of a row that is being admitted was idle just before.
        const bool adopted = owner.grown_step < 0;
        CHECK(adopted || options_.compaction == tagma::Compaction::kLive);
        CHECK(owner.grown_step != step_);
        owner.blocks.replace(owner.blocks.index_of(move.from), tagma::RangeList({move.to, 1}));
        live += adopted ? 0 : 1;
        ++in_rows;
      }
      blocks.relocate(move.from, move.to);
      cache.move(move.from, move.to);
    }
    CHECK(pool.num_moved_live() - moved_live_ == live);
    while (next < evicted.size()) repeat_eviction();
    return in_rows;
  }

  void remember_counters() {
    evictions_ = pool.num_evictions();
    cap_evictions_ = pool.num_cap_evictions();
    cap_refusals_ = pool.num_cap_refusals();
    moved_live_ = pool.num_moved_live();
  }

  void expect_untouched() {
    CHECK(pool.take_evicted().empty());
    CHECK(pool.num_evictions() == evictions_ && pool.num_cap_evictions() == cap_evictions_ &&
          pool.num_cap_refusals() == cap_refusals_);
  }

  void expect_withdrawn(const std::vector<tagma::BlockId>& expected) {
    const std::vector<tagma::EvictedBlock> withdrawn = pool.take_evicted();
    CHECK(withdrawn.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(withdrawn[i].block == expected[i]);
      check_key(withdrawn[i]);
      forget(expected[i]);
    }
  }

  void forget(tagma::BlockId block) {
    cache.forget(block);
    blocks.uncache(block);
  }

  bool is_pinned(tagma::BlockId block) const {
    return std::any_of(pins.begin(), pins.end(),
                       [block](const Pin& pin) { return pin.blocks.index_of(block) >= 0; });
  }

  static constexpr int64_t kPlenty = 100000;  // moves that no step of these tests can spend

  int64_t budget() const {
    return options_.compaction == tagma::Compaction::kOff ? 0 : options_.copy_budget;
  }

  const KeyBook& book_;
  tagma::PoolOptions options_;
  int32_t cap_;
  size_t num_groups_;
  int64_t step_ = 0;
  int64_t evictions_ = 0, cap_evictions_ = 0, cap_refusals_ = 0;
  int64_t moved_live_ = 0;

 private:
  static tagma::PoolOptions recording(tagma::PoolOptions options) {
    options.record_evictions = true;
    return options;
  }

  int32_t soft_cap() const { return cap_ / 2 / static_cast<int32_t>(num_groups_); }

  bool settle_exactly(Row& row, const std::vector<int32_t>& lacking,
                      const std::vector<tagma::RangeList>& added, bool given) {
    const std::vector<tagma::EvictedBlock> evicted = pool.take_evicted();
    CHECK(pool.num_evictions() - evictions_ == static_cast<int64_t>(evicted.size()));
    const Row before = row;
    size_t next = 0;  // eviction
    int64_t for_cap = 0;
    for (size_t g = 0; g < num_groups_; ++g) {
      if (lacking[g] == 0) continue;
      tagma::RangeList& part = row.parts[g].blocks;
      const int32_t ranges = part.num_ranges();
      const int32_t fewest = BlockModel::fewest_ranges(blocks.holes(true), lacking[g], part.tail());
      CHECK(fewest >= 0);
      const bool possible = ranges + fewest <= cap_;
      for (int32_t n = lacking[g] - blocks.num_in_holes(); n > 0; --n) {
        CHECK(next < evicted.size() && evicted[next].block == blocks.lru().front());
        expect_eviction(evicted[next++]);
      }
      if (!given && possible) {
        // A later group was refused; where this one was placed till then, the pool does not tell.
        CHECK(num_groups_ > 1);
        while (next < evicted.size()) expect_eviction(evicted[next++]);
        for_cap = pool.num_cap_evictions() - cap_evictions_;
      }
      if (!given) break;
      CHECK(possible);  // refused only when no eviction at all could help
      const int32_t by_recency =
          ranges + BlockModel::fewest_ranges(blocks.holes(), lacking[g], part.tail());
      const bool capped = by_recency > std::max(soft_cap(), ranges);
      if (capped) {
        const std::vector<tagma::BlockId> victims = cap_victims(part, lacking[g]);
        for (const tagma::BlockId victim : victims) {
          CHECK(next < evicted.size() && evicted[next].block == victim);
          expect_eviction(evicted[next++]);
        }
        for_cap += victims.empty() ? 0 : 1;
      }
      const bool alone = num_groups_ == 1 && capped && blocks.num_live() == part.num_blocks();
      const int32_t bound = alone ? ranges_to_come(part) : 0;
      blocks.take(added[g]);
      part.append(added[g]);
      // What makes a request alone reach the size of the pool: see RowExtender.
      if (alone) CHECK(ranges_to_come(part) <= bound);
      CHECK(part.num_ranges() <= cap_);
      CHECK(part.num_ranges() == (capped ? ranges + fewest : by_recency));
    }
    CHECK(next == evicted.size());
    CHECK(pool.num_cap_evictions() - cap_evictions_ == for_cap);
    CHECK(pool.num_cap_refusals() - cap_refusals_ == (given ? 0 : 1));
    if (!given) row = before;
    return given;
  }

  bool settle_by_following(Row& row, const std::vector<int32_t>& lacking, int32_t all,
                           const std::vector<tagma::RangeList>& added, bool given) {
    const int32_t in_holes = blocks.num_in_holes();
    const bool for_cap = pool.num_cap_evictions() > cap_evictions_;
    const int64_t in_rows = follow(row, for_cap);
    CHECK(pool.num_cap_refusals() - cap_refusals_ == (given ? 0 : 1));
    // Evicted is what the holes lack, and no more than the slack beyond.
    const int64_t evicted = pool.num_evictions() - evictions_;
    if (!for_cap) {
      CHECK(evicted >= std::max(all - in_holes, 0) || !given);
      CHECK(evicted <= std::max(all - in_holes, 0) + in_rows + pool.allocator().slack() ||
            budget() < kPlenty);
    }
    if (!given) {
      if (num_groups_ > 1) return false;
      const int32_t fewest =
          BlockModel::fewest_ranges(blocks.holes(true), lacking[0], row.blocks().tail());
      CHECK(row.blocks().num_ranges() + fewest > cap_);
      return false;
    }
    for (size_t g = 0; g < num_groups_; ++g) {
      blocks.take(added[g]);
      row.parts[g].blocks.append(added[g]);
      CHECK(row.blocks(g).num_ranges() <= cap_);
    }
    return true;
  }

  // The longest stretches without live blocks, the one behind the tail first, until `lacking`
  // blocks fit: what is idle in them goes.
  std::vector<tagma::BlockId> cap_victims(const tagma::RangeList& row, int32_t lacking) const {
    std::vector<tagma::BlockRange> stretches = blocks.holes(true);
    std::stable_sort(stretches.begin(), stretches.end(), [&](const auto& a, const auto& b) {
      const bool a_follows = row.joins_with(a.start);
      if (a_follows || row.joins_with(b.start)) return a_follows;
      return a.count > b.count;
    });
    std::vector<tagma::BlockId> out;
    for (size_t i = 0; i < stretches.size() && lacking > 0; ++i) {
      lacking -= stretches[i].count;
      for (tagma::BlockId b = stretches[i].start; b < stretches[i].end(); ++b) {
        if (blocks.cached(b)) out.push_back(b);
      }
    }
    return out;
  }

  // Blocks are evicted in turn, but for the slack, unless a step has too few moves: one of the
  // `slack` oldest (as of this step) each time, or the oldest.
  void check_turn(tagma::BlockId block) {
    const auto at = std::find(blocks.lru().begin(), blocks.lru().end(), block);
    const int64_t turn = at - blocks.lru().begin();
    const int64_t in_turn = std::max(pool.allocator().slack(), 1);
    latest_turn = std::max(latest_turn, turn - in_turn + 1);
    if (options_.compaction == tagma::Compaction::kOff || budget() >= kPlenty) {
      CHECK(turn < in_turn);
    }
  }

  Part& owner_of(Row& row, tagma::BlockId block) {
    for (Part& part : row.parts) {
      if (part.blocks.index_of(block) >= 0) return part;
    }
    for (Row& other : rows) {
      for (Part& part : other.parts) {
        if (part.blocks.index_of(block) >= 0) return part;
      }
    }
    CHECK(!"a live block without a row");
    return row.parts[0];
  }

  // Ranges that a row alone in the pool would have if it took every other block, at worst.
  int32_t ranges_to_come(const tagma::RangeList& row) const {
    int32_t ranges = row.num_ranges();
    for (const tagma::BlockRange& s : blocks.holes(true)) {
      ranges += row.empty() || s.start != row.tail() + 1 ? 1 : 0;
    }
    return ranges;
  }

  void expect_eviction(const tagma::EvictedBlock& evicted) {
    CHECK(blocks.refs(evicted.block) == 0);  // no request and no pin
    check_key(evicted);
    forget(evicted.block);
  }

  void check_key(const tagma::EvictedBlock& evicted) const {
    const CacheModel::Entry& entry = cache.of(evicted.block);
    CHECK(entry.key >= 0 && book_.equals(entry.key, evicted.key));
    CHECK(entry.group == evicted.group);
  }
};
