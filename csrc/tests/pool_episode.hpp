// An episode of pool_fuzz: a pool with its own size, alignment, range cap, slack, compaction, copy
// budget, kind of hash and weights, random operations on it beside its model, and at the end the
// whole pool taken as one range. In a third of the episodes calls come in any order and nothing
// moves; in the others they come as a scheduler makes them, and a worker executes each step. Half
// of the episodes have two or three groups, and half have pins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tagma/kv_pool.hpp"
#include "tests/check.hpp"
#include "tests/pool_model.hpp"

struct EpisodeTotals {
  int64_t ops = 0;
  int64_t admitted = 0;
  int64_t refused = 0;
  int64_t hit_blocks = 0;
  int64_t evictions = 0;
  int64_t cap_evictions = 0;
  int64_t cap_refusals = 0;
  int64_t withdrawn = 0;
  int64_t moved = 0;
  int64_t moved_live = 0;
  int64_t relocated = 0;
  int64_t steps = 0;
  int64_t latest_turn = 0;
  int64_t pinned = 0;   // blocks
  int64_t skipped = 0;  // blocks
  int64_t passed = 0;   // blocks that were left out of the cache
};

class Episode {
 public:
  Episode(uint64_t seed, EpisodeTotals& totals)
      : random_(seed),
        extras_(seed + 1000000007),  // apart, so that an episode without extras stays as it was
        in_steps_(seed % 3 != 1),
        has_pins_(seed % 4 < 2),
        has_groups_(seed % 2 == 0),
        totals_(totals),
        options_(any_options()),
        longest_(1 + below(std::min(2 * options_.num_blocks, 60))),
        book_(12 * 60, any_key_bytes(), chance(50)),
        prompts_(any_prompts()),
        pair_(options_, book_),
        admit_weight_(2 + below(12)),
        free_weight_(1 + below(6)),
        check_every_(options_.num_blocks < 50 ? 7 : 60) {}

  void run(int64_t ops) {
    for (int64_t op = 0; op < ops; ++op) {
      step();
      if (op % check_every_ == 0) pair_.compare();
    }
    totals_.ops += ops;
    totals_.evictions += pair_.pool.num_evictions();
    totals_.cap_evictions += pair_.pool.num_cap_evictions();
    totals_.cap_refusals += pair_.pool.num_cap_refusals();
    totals_.moved += pair_.pool.num_moved();
    totals_.moved_live += pair_.pool.num_moved_live();
    totals_.latest_turn = std::max(totals_.latest_turn, pair_.latest_turn);
    if (in_steps_) end_step();
    pair_.drain();
  }

 private:
  using Row = PoolPair::Row;

  static constexpr int32_t kUnlimited = 1000000;
  static constexpr int32_t kOtherOps = 26;  // weights of all but admissions and frees
  static constexpr int32_t kPinOps = 8;
  static constexpr int32_t kSkipOps = 5;
  static constexpr size_t kMostPins = 8;

  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  int32_t extra_below(int32_t n) {
    return static_cast<int32_t>(extras_() % static_cast<uint64_t>(n));
  }

  // --- the episode ------------------------------------------------------------------------------

  tagma::PoolOptions any_options() {
    tagma::PoolOptions options;
    options.alignment = chance(85) ? 1 : 2 << below(2);
    const int32_t sizes[] = {2, 3, 5, 8, 13, 30, 64, 100, 300};
    options.num_blocks = sizes[below(9)] + below(4) + 2 * options.alignment - 2;
    options.max_ranges = chance(50) ? 1 + below(6) : 256;
    options.seed = random_();
    if (has_groups_) options.groups = any_groups();
    if (!in_steps_) return options;
    if (chance(10)) options.num_blocks = 1000 + below(2000);
    options.compaction = static_cast<tagma::Compaction>(below(3));
    const int32_t slacks[] = {0, 0, 1, 2, 5, 20, options.num_blocks};
    options.policy.slack = slacks[below(7)];
    if (extra_below(3) == 0) options.policy.most_slack = extra_below(options.num_blocks);
    const int32_t budgets[] = {0, 1, 2, 5, 20, 20, kUnlimited, kUnlimited};
    options.copy_budget = budgets[below(8)];
    if (options.policy.has_slack() || options.compaction != tagma::Compaction::kOff)
      options.alignment = 1;
    return options;
  }

  // Two or three groups of any kind, mostly full attention first.
  std::vector<tagma::GroupSpec> any_groups() {
    std::vector<tagma::GroupSpec> groups(2 + static_cast<size_t>(extra_below(2)));
    for (size_t g = 0; g < groups.size(); ++g) {
      if (g > 0 || extra_below(5) == 0) {
        groups[g].kind = static_cast<tagma::GroupKind>(extra_below(4));
      }
      const bool chunks = groups[g].kind == tagma::GroupKind::kChunk;
      if (chunks || groups[g].kind == tagma::GroupKind::kWindow) {
        groups[g].window_blocks = 1 + extra_below(5);
      }
      if (!chunks) groups[g].align_blocks = 1 + extra_below(2) * extra_below(4);
    }
    return groups;
  }

  size_t any_key_bytes() {
    const size_t sizes[] = {2, 4, 8, 16, 20, 32};
    const size_t bytes = sizes[below(6)];
    if (!has_groups_ || bytes < 20) return bytes;
    return bytes == 32 ? 36 : 64;  // a hash and a group's number; the longest
  }

  // Prompts that share prefixes: each continues a part of an earlier one with keys of its own.
  std::vector<Keys> any_prompts() {
    std::vector<Keys> prompts;
    int next = 0;
    for (int i = 0; i < 12; ++i) {
      Keys keys;
      if (i > 0 && chance(60)) {
        const Keys& parent = prompts[static_cast<size_t>(below(i))];
        keys.assign(parent.begin(), parent.begin() + below(longest_ + 1));
      }
      while (static_cast<int32_t>(keys.size()) < longest_) keys.push_back(next++ % book_.size());
      prompts.push_back(keys);
    }
    return prompts;
  }

  // --- steps ------------------------------------------------------------------------------------

  // Only inside a step are rows given blocks, or published, where a worker executes it.
  void ensure_step() {
    if (in_steps_ && !pair_.scheduling) pair_.begin_step();
  }

  void end_step() {
    if (!pair_.scheduling) return;
    pair_.execute(random_);
    ++totals_.steps;
  }

  void step() {
    const int32_t pin_ops = has_pins_ ? kPinOps : 0;
    const int32_t skip_ops = has_groups_ ? kSkipOps : 0;
    const int kind = below(admit_weight_ + free_weight_ + kOtherOps + pin_ops + skip_ops);
    if (kind < admit_weight_) return admit();
    if (kind < admit_weight_ + free_weight_) return free();
    const int other = kind - admit_weight_ - free_weight_;
    if (other >= kOtherOps + pin_ops) return skip();
    if (other >= kOtherOps) return other % 2 == 0 ? pin() : unpin();
    switch (other) {
      case 0:
      case 1:
        if (in_steps_) end_step();
        return pair_.begin_step();
      case 2:
      case 3:
        return in_steps_ ? end_step() : pair_.end_scheduling();
      case 4:
        return evict();
      case 5:
        return reset();
      case 6:
        return misuse();
      case 7:
      case 8:
      case 9: {
        const Keys& keys = any_prompt();
        stale_ = pair_.lookup(keys, below(longest_ + 1));
        return;
      }
      case 10:
      case 11:
      case 12:
      case 13:
        return publish();
      default:
        return in_steps_ && chance(15) ? relocate() : grow();
    }
  }

  // --- what is asked for ------------------------------------------------------------------------

  size_t num_groups() const { return options_.groups.size(); }
  int32_t any_group() { return extra_below(static_cast<int32_t>(num_groups())); }
  const Keys& any_prompt() { return prompts_[static_cast<size_t>(below(12))]; }
  size_t any_row() { return random_() % pair_.rows.size(); }

  int32_t aligned(int32_t blocks) const {
    return (blocks + options_.alignment - 1) / options_.alignment * options_.alignment;
  }

  int32_t aligned_down(int32_t blocks) const {
    return blocks / options_.alignment * options_.alignment;
  }

  // What all groups have, in some of them less; now and then what each has by itself.
  std::vector<tagma::RangeList> any_hits(const Keys& keys) {
    std::vector<tagma::RangeList> hits(num_groups());
    if (options_.alignment != 1 || !chance(80)) return hits;
    const int32_t most = below(longest_ + 1);
    if (num_groups() == 1) {
      hits[0] = pair_.lookup(keys, most);
    } else if (extra_below(4) > 0) {
      hits = pair_.common_hit(keys, most);
    } else {
      for (size_t g = 0; g < hits.size(); ++g) {
        hits[g] = pair_.lookup(static_cast<int32_t>(g), keys, extra_below(longest_ + 1));
      }
    }
    if (chance(20)) {
      for (tagma::RangeList& hit : hits) hit.truncate(below(hit.num_blocks() + 1));
    }
    return hits;
  }

  // Now and then demands that no pool can meet, and free blocks that are promised away.
  tagma::Demand any_demand(int32_t blocks) {
    tagma::Demand demand;
    demand.blocks = aligned(blocks);
    if (chance(50)) demand.gate = aligned(blocks + below(6));
    if (chance(20)) demand.watermark = below(5);
    if (chance(20)) demand.reserved = below(8);
    if (chance(2)) demand.reserved = std::numeric_limits<int32_t>::max();
    if (chance(2)) demand.watermark = std::numeric_limits<int32_t>::max();
    demand.prompt = aligned(blocks + below(6));
    demand.limit = chance(5) ? std::numeric_limits<int32_t>::max() : demand.prompt + below(40);
    return demand;
  }

  // The groups beside the first need about as much.
  std::vector<tagma::Need> any_needs(const tagma::Need& first) {
    std::vector<tagma::Need> needs(num_groups(), first);
    for (size_t g = 1; g < needs.size(); ++g) {
      if (extra_below(5) == 0) needs[g].blocks = aligned(extra_below(longest_ + 1));
    }
    return needs;
  }

  // --- operations -------------------------------------------------------------------------------

  void admit() {
    ensure_step();
    const Keys& keys = any_prompt();
    const std::vector<tagma::RangeList> hits = any_hits(keys);
    int32_t hit = 0;
    for (const tagma::RangeList& of_group : hits) hit = std::max(hit, of_group.num_blocks());
    int32_t blocks = std::min(hit + 1 + below(8), longest_);
    if (chance(5)) blocks = std::min(pair_.blocks.num_free(), longest_);
    if (chance(10)) blocks = longest_;
    const tagma::Demand demand = any_demand(blocks);
    std::vector<tagma::Need> needs = any_needs(demand);
    for (size_t g = 0; g < num_groups(); ++g) {
      if (options_.groups[g].kind == tagma::GroupKind::kPrefix || extra_below(3) > 0) continue;
      needs[g].skip = aligned(extra_below(needs[g].blocks + 4));
    }
    const int row = pair_.admit(keys, hits, needs, demand);
    (row < 0 ? totals_.refused : totals_.admitted) += 1;
    if (row < 0) return;
    for (const tagma::RangeList& of_group : hits) {
      totals_.hit_blocks += static_cast<int64_t>(BlockModel::held(of_group).size());
    }
    if (options_.alignment == 1 && chance(60)) publish_all(pair_.rows.size() - 1, longest_);
  }

  void publish_all(size_t row, int32_t most) {
    for (size_t g = 0; g < num_groups(); ++g) {
      const int32_t held = pair_.rows[row].blocks(g).num_blocks();
      pair_.publish(row, std::min(held, most), static_cast<int32_t>(g));
    }
  }

  void grow() {
    if (pair_.rows.empty()) return;
    ensure_step();
    const size_t row = any_row();
    const int32_t held = pair_.rows[row].blocks().num_blocks();
    int32_t blocks = held + (chance(70) ? below(3) : below(12));
    if (chance(3)) blocks = held + pair_.blocks.num_free();
    if (chance(3)) blocks = below(held + 1);
    tagma::Demand demand = any_demand(blocks);
    if (chance(70)) demand.watermark = demand.reserved = demand.gate = 0;
    std::vector<tagma::Need> needs = any_needs(demand);
    for (size_t g = 0; has_groups_ && g < num_groups(); ++g) {
      if (extra_below(3) == 0) needs[g].skip = any_skip(row, g);
    }
    pair_.grow(row, needs, demand);
  }

  void publish() {
    if (pair_.rows.empty() || options_.alignment != 1) return;
    ensure_step();
    const size_t row = any_row();
    if (num_groups() > 1 && extra_below(2) == 0) return publish_all(row, below(longest_ + 1));
    const int32_t group = any_group();
    const int32_t held = pair_.rows[row].blocks(static_cast<size_t>(group)).num_blocks();
    const int32_t upto = below(std::min(held, longest_) + 1);
    if (has_groups_ && extra_below(3) == 0) return pass_over(row, upto, group);
    pair_.publish(row, upto, group);
  }

  void pass_over(size_t row, int32_t upto, int32_t group) {
    totals_.passed += std::max(upto - pair_.rows[row].published(static_cast<size_t>(group)), 0);
    pair_.pass_over(row, upto, group);
  }

  // A part of a row, or of one of its ranges so that it can succeed.
  void relocate() {
    if (pair_.rows.empty()) return;
    ensure_step();
    const size_t row = any_row();
    const int32_t group = any_group();
    const tagma::RangeList& blocks = pair_.rows[row].blocks(static_cast<size_t>(group));
    int32_t first = below(blocks.num_blocks() + 1);
    int32_t last = first + below(blocks.num_blocks() - first + 1);
    if (chance(70) && !blocks.empty()) {
      const auto range = static_cast<size_t>(below(blocks.num_ranges()));
      first = 0;
      for (size_t i = 0; i < range; ++i) first += blocks.ranges()[i].count;
      last = first + blocks.ranges()[range].count;
      first += chance(50) ? below(last - first) : 0;
    }
    totals_.relocated += pair_.relocate(row, first, last, group) ? 1 : 0;
  }

  // Where steps are executed only what was written falls out of a window.
  int32_t any_skip(size_t index, size_t group) {
    const Row& row = pair_.rows[index];
    const tagma::RangeList& blocks = row.blocks(group);
    int32_t most = blocks.num_blocks();
    if (in_steps_) {
      most = std::min(most, pair_.worker.written(row.handle, static_cast<int32_t>(group)));
    }
    const int32_t count = aligned_down(extra_below(most + 1));
    totals_.skipped += std::max(count - blocks.num_leading_nulls(), 0);
    return count;
  }

  void skip() {
    if (pair_.rows.empty()) return;
    const size_t index = any_row();
    const int32_t group = any_group();
    pair_.skip(index, group, any_skip(index, static_cast<size_t>(group)));
  }

  void free() {
    if (pair_.rows.empty()) return;
    const size_t row = any_row();
    if (in_steps_ && pair_.scheduling && !pair_.may_be_preempted(row)) return;
    const int32_t cached = pair_.blocks.num_cached();
    stale_row_ = pair_.rows[row].handle;
    pair_.free(row);
    totals_.withdrawn += cached - pair_.blocks.num_cached();
  }

  void evict() {
    std::vector<tagma::BlockId> ids;
    const tagma::BlockId first = options_.alignment;
    for (int i = below(4); i > 0; --i) ids.push_back(first + below(pair_.blocks.capacity()));
    pair_.evict(ids);
  }

  void reset() {
    if (chance(10)) {
      if (in_steps_) end_step();
      while (!pair_.rows.empty()) free();
      if (extra_below(2) == 0) {
        while (!pair_.pins.empty()) unpin();
      }
    }
    pair_.reset();
  }

  // A part of a row, what is cached of a prompt, or idle blocks; often what is pinned already.
  void pin() {
    if (pair_.pins.size() >= kMostPins) return unpin();
    const int32_t what = extra_below(4);
    if (what < 2 && !pair_.rows.empty()) {
      const size_t row = any_row();
      const int32_t group = any_group();
      const int32_t held = pair_.rows[row].blocks(static_cast<size_t>(group)).num_blocks();
      const int32_t first = aligned_down(extra_below(held + 1));
      const int32_t last = first + aligned_down(extra_below(held - first + 1));
      pair_.pin(row, group, first, last);
    } else if (what == 2) {
      pair_.pin(pair_.lookup(any_group(), any_prompt(), extra_below(longest_ + 1)));
    } else {
      tagma::RangeList idle;
      for (const tagma::BlockId b : pair_.blocks.lru()) {
        if (extra_below(4) == 0) idle.append({b, 1});
      }
      pair_.pin(idle);
    }
    totals_.pinned += pair_.pins.back().blocks.num_blocks();
  }

  void unpin() {
    if (!pair_.pins.empty()) pair_.unpin(extras_() % pair_.pins.size());
  }

  // None of this may be accepted, and none may leave a trace; the comparisons that follow see it.
  void misuse() {
    using tagma::UsageError;
    std::vector<tagma::RangeList> added(num_groups());
    std::vector<tagma::RangeList> hits(num_groups());
    std::vector<tagma::Need> needs(num_groups());
    tagma::KvPool& pool = pair_.pool;
    const auto groups = static_cast<int32_t>(num_groups());
    const auto keys = [&](int32_t) { return book_[0]; };
    for (const tagma::RowHandle bad :
         {tagma::RowHandle{0}, tagma::RowHandle{-1}, stale_row_, tagma::RowHandle{1} << 40}) {
      CHECK_THROWS(pool.free(bad), UsageError);
      CHECK_THROWS(pool.grow(bad, needs.data(), {}, added.data()), UsageError);
      CHECK_THROWS(pool.publish(bad, 0, 1, keys), UsageError);
      CHECK_THROWS(pool.skip(bad, 0, 0), UsageError);
      CHECK_THROWS(pool.pin(bad, 0, 0, 0), UsageError);
      CHECK_THROWS(pool.unpin(bad == 0 ? 0 : -1), UsageError);
    }
    tagma::Spare negative;
    negative.reserved = -1;
    CHECK_THROWS(pool.admit(hits.data(), needs.data(), negative, added.data()), UsageError);
    CHECK_THROWS(pool.lookup(groups, keys, 1), UsageError);
    if (!pair_.rows.empty()) {
      const Row& row = pair_.rows[any_row()];
      const int32_t held = row.blocks().num_blocks();
      CHECK_THROWS(pool.publish(row.handle, 0, held + 1, keys), UsageError);
      CHECK_THROWS(pool.grow(row.handle, needs.data(), negative, added.data()), UsageError);
      CHECK_THROWS(pool.skip(row.handle, 0, held + 1), UsageError);
      CHECK_THROWS(pool.pin(row.handle, 0, 0, held + 1), UsageError);
      CHECK_THROWS(pool.pin(row.handle, 0, 1, 0), UsageError);
      for (const int32_t group : {-1, groups}) {
        CHECK_THROWS(pool.publish(row.handle, group, 0, keys), UsageError);
        CHECK_THROWS(pool.relocate(row.handle, 0, 0, group), UsageError);
        CHECK_THROWS(pool.skip(row.handle, group, 0), UsageError);
        CHECK_THROWS(pool.pin(row.handle, group, 0, 0), UsageError);
      }
    }
    CHECK_THROWS(pool.evict({options_.alignment, 0}), UsageError);
    CHECK_THROWS(pool.evict({options_.num_blocks}), UsageError);
    for (const tagma::BlockRange& hole : pair_.blocks.holes()) {
      CHECK_THROWS(pool.pin(tagma::RangeList({hole.start, 1})), UsageError);
    }
    for (const tagma::BlockId b : BlockModel::held(stale_)) {
      if (pair_.blocks.cached(b)) continue;
      hits[0] = stale_;
      CHECK_THROWS(pool.admit(hits.data(), needs.data(), {}, added.data()), UsageError);
      break;
    }
    for (const tagma::RangeList& list : added) CHECK(list.empty());
    CHECK(pool.take_evicted().empty());
  }

  std::mt19937_64 random_;
  std::mt19937_64 extras_;  // for groups and pins
  bool in_steps_;           // a worker executes each step
  bool has_pins_;
  bool has_groups_;
  EpisodeTotals& totals_;
  tagma::PoolOptions options_;
  int32_t longest_;
  KeyBook book_;
  std::vector<Keys> prompts_;
  PoolPair pair_;
  int admit_weight_;
  int free_weight_;
  int64_t check_every_;
  tagma::RangeList stale_;
  tagma::RowHandle stale_row_ = 0;
};
