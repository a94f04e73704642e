// One pool of KV blocks as the scheduler sees it: rows of requests, prefix cache, capacity.
//
// Everything that vLLM's manager does per call happens here in one call: capacity check, adoption
// of a prefix hit, eviction, placement, publication. A call that returns nothing or throws has
// changed nothing that a request could notice.
//
// A request has a row in each KV-cache group, and all groups take blocks from the one pool. Where a
// call takes arrays, they have one element for each group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tagma/adaptive_slack.hpp"
#include "tagma/admission.hpp"
#include "tagma/block_range.hpp"
#include "tagma/block_store.hpp"
#include "tagma/compactor.hpp"
#include "tagma/group_spec.hpp"
#include "tagma/headroom.hpp"
#include "tagma/pin_table.hpp"
#include "tagma/pool_laws.hpp"
#include "tagma/pool_options.hpp"
#include "tagma/pool_views.hpp"
#include "tagma/rollback.hpp"
#include "tagma/row_extender.hpp"
#include "tagma/row_table.hpp"
#include "tagma/step_state.hpp"

namespace tagma {

class KvPool {
 public:
  // Throws UsageError for options that make no sense.
  explicit KvPool(const PoolOptions& options)
      : groups_(checked_groups(options.groups)),
        step_(options.moves_in_step()),
        slack_(options.policy.slack, options.policy.most_slack, options.num_blocks),
        store_(allocator_options(options), num_groups(), options.seed, options.record_evictions,
               step_),
        rows_(num_groups(),
              options.compaction == Compaction::kLive && options.moves() ? options.num_blocks : 0),
        compactor_(store_, rows_, pins_, options.compaction, options.policy, options.max_ranges),
        extender_(store_, rows_, compactor_, options.max_ranges),
        headroom_(groups_.size(), HeadroomEstimator(options.policy.headroom_percent)) {}

  KvPool(const KvPool&) = delete;  // its parts refer to each other
  KvPool& operator=(const KvPool&) = delete;

  // --- steps ------------------------------------------------------------------------------------

  // A scheduler step begins: until end_scheduling(), a row that is freed was preempted.
  void begin_step() {
    step_.begin();
    if (!slack_.adapts()) return;
    KvAllocator& allocator = store_.allocator();
    allocator.set_slack(slack_.next(num_admitted_, allocator.num_cold_hits(), num_evictions()));
  }
  void end_scheduling() { step_.end_scheduling(); }

  // Fixes the length of this pool's block hashes; see PrefixIndex.
  void set_key_bytes(size_t bytes) { store_.index().set_key_bytes(bytes); }

  // --- prefix cache -----------------------------------------------------------------------------

  // What the cache has of at most `max_blocks` blocks, by the kind of the group; key_at(i) gives
  // the i-th block's key. No side effect: recency is refreshed when a hit is adopted. A hit in so
  // many ranges that the rest of the row might not fit under the cap is cut short. O(blocks hit),
  // for windows and states O(max_blocks), for
  // chunks O(chunk).
  template <typename KeyAt>
  RangeList lookup(int32_t group, KeyAt&& key_at, int32_t max_blocks) const {
    const GroupSpec& spec = spec_of(group);
    const int32_t cap = extender_.max_hit_ranges();
    if (spec.kind == GroupKind::kChunk) {
      return last_chunk(store_.index(), group, max_blocks, spec.window_blocks, cap, key_at);
    }
    if (store_.index().size() == 0) return {};
    if (num_groups() == 1 && spec.kind == GroupKind::kPrefix) {
      return longest_prefix<false>(store_.index(), group, max_blocks, spec.align_blocks, cap,
                                   key_at);
    }
    if (spec.kind == GroupKind::kPrefix) {
      return longest_prefix(store_.index(), group, max_blocks, spec.align_blocks, cap, key_at);
    }
    return rightmost_window(store_.index(), group, max_blocks, spec.window_blocks,
                            spec.align_blocks, cap, key_at);
  }

  // Throws UsageError if the alignment is not 1: then nothing can be published.
  void check_can_publish() const {
    if (store_.allocator().alignment() == 1) return;
    throw UsageError(message("publish in a pool with alignment ", store_.allocator().alignment()));
  }

  // Publishes the row's blocks up to `blocks` under their keys (key_at() is called twice for each);
  // null blocks have none. Publishing less than is published already is a no-op. Returns the number
  // of blocks published before. Throws UsageError if the row is shorter or the alignment is not 1.
  // O(blocks published).
  template <typename KeyAt>
  int32_t publish(RowHandle handle, int32_t group, int32_t blocks, KeyAt&& key_at) {
    Row& row = rows_.at(handle, group);
    const int32_t before = row.num_published;
    if (blocks <= before) return before;
    if (blocks > row.blocks.num_blocks()) {
      throw UsageError(
          message("publish ", blocks, " blocks of a row of ", row.blocks.num_blocks()));
    }
    check_can_publish();
    if (row.published_step != step_.number()) {
      row.published_step = step_.number();
      row.published_before_step = before;
    }
    const RangeList fresh = row.blocks.slice(before, blocks);
    PrefixIndex& index = store_.index();
    KvAllocator& allocator = store_.allocator();
    int32_t i = before;
    for (const BlockRange& range : fresh.ranges()) {
      if (range.is_null()) {
        i += range.count;
        row.num_published = i;
        continue;
      }
      for (BlockId b = range.start; b < range.end(); ++b, ++i) {
        const int32_t ahead = i + kPrefetchAhead;
        if (ahead < blocks) index.prefetch(group, key_at(ahead));
        index.insert(b, group, key_at(i));
        allocator.cache(b);
        row.num_published = i + 1;
      }
    }
    return before;
  }

  // The row's blocks up to `blocks` count as published, but those that are not yet stay out of the
  // cache: no later request could use them (a window needs only the blocks in front of the places
  // where requests resume). Passing over less than is published already is a no-op. Throws
  // UsageError if the row is shorter.
  void pass_over(RowHandle handle, int32_t group, int32_t blocks) {
    Row& row = rows_.at(handle, group);
    if (blocks < 0 || blocks > row.blocks.num_blocks()) {
      throw UsageError(
          message("pass over ", blocks, " blocks of a row of ", row.blocks.num_blocks()));
    }
    row.num_published = std::max(row.num_published, blocks);
  }

  // Withdraws these blocks from the cache; references stay. Blocks that are not cached are ignored,
  // foreign ids throw UsageError before anything changes. O(blocks).
  void evict(const std::vector<BlockId>& blocks) {
    for (const BlockId block : blocks) store_.allocator().is_cached(block);
    for (const BlockId block : blocks) {
      if (store_.allocator().is_cached(block)) store_.withdraw(block);
    }
  }

  // Empties the cache, if no request or pin holds a block; else returns false and changes nothing.
  // O(num_blocks).
  bool reset() {
    if (store_.allocator().num_live() > 0) return false;
    store_.clear();
    return true;
  }

  // Blocks that left the cache since the last call, in order, if record_evictions is on.
  std::vector<EvictedBlock> take_evicted() { return store_.take_evicted(); }

  // --- rows -------------------------------------------------------------------------------------

  // Opens a request's rows, each of which begins with a prefix hit (counted as published), and
  // puts their new blocks, and nothing else, into `added`. Returns 0, and leaves the pool as it
  // was, if too few blocks are free for all groups together, or (last resort) if a row would exceed
  // the range cap whatever is evicted. Throws UsageError on a stale hit or a malformed need.
  RowHandle admit(const RangeList* hits, const Need* needs, const Spare& spare, RangeList* added) {
    check_needs(needs, groups_.size(), spare, store_.allocator().alignment());
    int32_t idle_hits = 0;
    Lack lack;
    for (size_t g = 0; g < groups_.size(); ++g) {
      added[g].clear();
      check_hit(store_.allocator(), groups_[g], hits[g], nulls_behind(hits[g], needs[g]) > 0,
                max_ranges());
      idle_hits += store_.allocator().count_idle(hits[g]);
      lack.add(std::max(hits[g].num_blocks(), needs[g].skip), needs[g]);
    }
    const int32_t free = store_.allocator().num_free();
    if (!lack.passes_gate(free, idle_hits, spare) || !lack.fits(free, idle_hits, spare)) return 0;
    const RowHandle handle = rows_.open();
    Rollback close([&] {
      for (size_t g = 0; g < groups_.size(); ++g) {
        store_.allocator().release(row_at(handle, g).blocks);  // the hit, wherever it is by now
        added[g].clear();
      }
      rows_.close(handle);
    });
    for (size_t g = 0; g < groups_.size(); ++g) {
      Row& row = row_at(handle, g);
      store_.allocator().acquire(hits[g]);
      rows_.append(row, hits[g]);
      row.num_published = hits[g].num_blocks();
      const int32_t nulls = nulls_behind(hits[g], needs[g]);
      if (nulls > 0) rows_.append(row, RangeList({kNullBlock, nulls}));
      row.num_prompt = std::max(needs[g].prompt, needs[g].blocks);
      num_admitted_ += row.num_prompt;
      row.num_expected = expected_blocks(g, row.num_prompt, needs[g]);
      row.grown_step = step_.number();
    }
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (!extender_.extend(row_at(handle, g), true, needs[g].blocks, added[g])) return 0;
    }
    close.keep();
    return handle;
  }

  // Lets go of the heads that rows need no more (skip()), gives them the blocks they lack and puts
  // these, and nothing else, into `added`; never takes any other away. Returns false, and leaves
  // the rows as they were, for the reasons admit() returns 0; heads are gone nonetheless, if the
  // gate was passed. O(1) for each group whose last range grows in place.
  bool grow(RowHandle handle, const Need* needs, const Spare& spare, RangeList* added) {
    check_needs(needs, groups_.size(), spare, store_.allocator().alignment());
    Lack lack;
    for (size_t g = 0; g < groups_.size(); ++g) {
      added[g].clear();
      lack.add(row_at(handle, g).blocks.num_blocks(), needs[g]);
    }
    if (!lack.passes_gate(store_.allocator().num_free(), 0, spare)) return false;
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (needs[g].skip > 0) skip_head(row_at(handle, g), needs[g].skip);
    }
    if (!lack.fits(store_.allocator().num_free(), 0, spare)) return false;
    if (lack.now == 0) return true;
    size_t grown = 0;  // groups
    Rollback shrink([&] {
      for (size_t g = 0; g < grown; ++g) {
        Row& row = row_at(handle, g);
        store_.allocator().release(added[g]);
        rows_.truncate(row, row.blocks.num_blocks() - added[g].num_blocks());
        added[g].clear();
      }
    });
    for (; grown < groups_.size(); ++grown) {
      Row& row = row_at(handle, grown);
      const Need& need = needs[grown];
      if (need.blocks <= row.blocks.num_blocks()) continue;
      if (row.num_expected < need.blocks) {  // outgrew its estimate: hope for as much again
        row.num_expected = expected_blocks(grown, need.blocks, need);
      }
      if (!extender_.extend(row, false, need.blocks, added[grown])) return false;
      row.grown_step = step_.number();
    }
    shrink.keep();
    return true;
  }

  // One group's admit() and grow().
  RowHandle admit(const RangeList& hit, const Demand& demand, RangeList& added) {
    check_one_group();
    return admit(&hit, &demand, demand, &added);
  }
  bool grow(RowHandle handle, const Demand& demand, RangeList& added) {
    check_one_group();
    return grow(handle, &demand, demand, &added);
  }

  // The leading `blocks` of a row have no content any more (they fell out of a window): they become
  // null, and the references that the row had to them are dropped. A row at the range cap keeps its
  // first range, which this would split in two, until all of it falls out. Throws UsageError if the
  // row is shorter. O(blocks that it held).
  void skip(RowHandle handle, int32_t group, int32_t blocks) {
    Row& row = rows_.at(handle, group);
    if (blocks < 0 || blocks > row.blocks.num_blocks()) {
      throw UsageError(message("skip ", blocks, " blocks of a row of ", row.blocks.num_blocks()));
    }
    skip_head(row, blocks);
  }

  // Closes a request's rows. During scheduling it was preempted: what it published in this very
  // step will never be written, so it is withdrawn first (stock vLLM leaves it hittable: #57580).
  void free(RowHandle handle) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      Row& row = row_at(handle, g);
      if (!step_.scheduling()) {
        // A row aborted inside its prompt has not grown at all.
        headroom_[g].observe(std::max(row.blocks.num_blocks() - row.num_prompt, 0));
      } else if (row.published_step == step_.number()) {
        withdraw(row.blocks.slice(row.published_before_step, row.num_published));
      }
      store_.allocator().release(row.blocks);
    }
    rows_.close(handle);
  }

  // The rows' blocks stay where they are for the rest of the step: they are on their way to the
  // worker. Rows that are admitted or grow are held without this.
  void hold(RowHandle handle) {
    for (size_t g = 0; g < groups_.size(); ++g) row_at(handle, g).grown_step = step_.number();
  }

  const RangeList& row_blocks(RowHandle handle, int32_t group = 0) const {
    return rows_.at(handle, group).blocks;
  }
  int32_t num_published(RowHandle handle, int32_t group = 0) const {
    return rows_.at(handle, group).num_published;
  }

  // What the workers must know of rows that were admitted, grew or moved since the last call.
  std::vector<RowChange> take_row_changes() { return rows_.take_changes(); }

  // --- pins -------------------------------------------------------------------------------------

  // Pins the logical blocks [first, last) of a row where they are now: until unpin() they are
  // neither moved nor evicted nor handed out, whoever frees them. Null blocks are left out. Pins
  // count: a block is free of them when the last is gone. Copies that are owed when a pin is made
  // come before whatever it is made for. Throws UsageError if the row is shorter. O(blocks).
  PinHandle pin(RowHandle handle, int32_t group, int32_t first, int32_t last) {
    const RangeList& blocks = rows_.at(handle, group).blocks;
    if (first < 0 || last < first || last > blocks.num_blocks()) {
      throw UsageError(
          message("pin the blocks [", first, ", ", last, ") of a row of ", blocks.num_blocks()));
    }
    return pin(blocks.slice(first, last));
  }

  // Pins live or idle blocks, by the same rules. Throws UsageError, and changes nothing, if one is
  // free or named twice. O(blocks).
  PinHandle pin(const RangeList& blocks) {
    RangeList held;
    for (const BlockRange& range : blocks.ranges()) {
      if (!range.is_null()) held.append(range);
    }
    store_.allocator().acquire(held);
    Rollback drop([&] { store_.allocator().unreference(held); });  // no memory for the pin
    const PinHandle handle = pins_.add(held);
    drop.keep();
    return handle;
  }

  // Throws UsageError if the pin is not held. O(blocks).
  void unpin(PinHandle pin) {
    store_.allocator().unreference(pins_.at(pin));
    pins_.remove(pin);
  }

  const PinTable& pins() const { return pins_; }

  // --- moves ------------------------------------------------------------------------------------

  // Block copies that the worker must make before it writes anything in this step; see MoveLog.
  std::vector<BlockCopy> take_copies() { return store_.take_copies(); }

  // All moves since the last call, in order, if record_evictions is on.
  std::vector<BlockCopy> take_relocations() { return store_.take_relocations(); }

  // Moves the logical blocks [first, last) of a row elsewhere, as live compaction would; false, and
  // nothing has changed, if they are shared, pinned, null or not one range, the row grew in this
  // step, no moves are left, or no room has as many blocks. O(blocks).
  bool relocate(RowHandle handle, int32_t first, int32_t last, int32_t group = 0) {
    return compactor_.relocate(rows_.at(handle, group), first, last);
  }

  // --- counters ---------------------------------------------------------------------------------

  const KvAllocator& allocator() const { return store_.allocator(); }
  const PrefixIndex& index() const { return store_.index(); }
  int32_t num_groups() const { return static_cast<int32_t>(groups_.size()); }
  int32_t num_rows() const { return rows_.size(); }  // requests
  int32_t max_ranges() const { return extender_.max_ranges(); }
  int32_t headroom_blocks(int32_t group = 0) const {
    spec_of(group);
    return headroom_[static_cast<size_t>(group)].blocks();
  }
  int64_t num_evictions() const { return store_.num_evictions(); }
  // Blocks moved, in all and of these live ones.
  int64_t num_moved() const { return store_.num_moved(); }
  int64_t num_moved_live() const { return store_.num_moved_live(); }
  // Times that blocks beyond the least recently used were evicted to stay under the range cap.
  int64_t num_cap_evictions() const { return extender_.num_cap_evictions(); }
  // Times that admit() or grow() gave up because of the cap although enough blocks were free.
  int64_t num_cap_refusals() const { return extender_.num_cap_refusals(); }

  bool can_move() const { return store_.allocator().idle_can_move(); }
  bool is_published_as(BlockId block, int32_t group, const uint8_t* key) const {
    return store_.index().has_key(block, group, key);
  }

  // Ranges of the open rows; runs of null blocks are none. O(ranges).
  RowRanges row_ranges() const { return count_row_ranges(rows_); }

  // Live and idle blocks in each `n`-th of the pool, by address. Throws UsageError if n < 1.
  // O(num_blocks).
  std::vector<PartCount> parts(int32_t n) const { return count_parts(store_.allocator(), n); }

  // Bytes of the pool and the index; rows add 8 bytes a range.
  size_t memory_bytes() const { return store_.memory_bytes() + rows_.memory_bytes(); }

  // Throws InvariantError. O(num_blocks + blocks in rows).
  void check_invariants() const { check_pool_laws(store_, rows_, pins_, max_ranges()); }

 private:
  // An insertion takes about a tenth of a trip to memory.
  static constexpr int32_t kPrefetchAhead = 12;

  static AllocatorOptions allocator_options(const PoolOptions& options) {
    AllocatorOptions out;
    out.num_blocks = options.num_blocks;
    out.alignment = options.alignment;
    out.policy = options.policy;
    out.idle_can_move = options.moves();
    return out;
  }

  static const std::vector<GroupSpec>& checked_groups(const std::vector<GroupSpec>& groups) {
    if (groups.empty()) throw UsageError("a pool without groups");
    for (const GroupSpec& group : groups) group.check();
    return groups;
  }

  const GroupSpec& spec_of(int32_t group) const {
    if (group < 0 || group >= num_groups()) {
      throw UsageError(message("group ", group, " is outside [0, ", num_groups(), ")"));
    }
    return groups_[static_cast<size_t>(group)];
  }
  void check_one_group() const {
    if (num_groups() != 1) throw UsageError(message("one need for ", num_groups(), " groups"));
  }

  Row& row_at(RowHandle handle, size_t group) {
    return rows_.at(handle, static_cast<int32_t>(group));
  }

  // Null blocks that a new row has behind its hit; not above 0 if none.
  static int32_t nulls_behind(const RangeList& hit, const Need& need) {
    return std::min(need.skip, need.blocks) - hit.num_blocks();
  }

  int32_t expected_blocks(size_t group, int32_t known, const Need& need) const {
    const int64_t hoped = int64_t{known} + headroom_[group].blocks();
    const int64_t limit = std::max(need.limit, need.blocks);
    return static_cast<int32_t>(std::min({hoped, limit, int64_t{store_.allocator().capacity()}}));
  }

  // skip() of at most what the row has.
  void skip_head(Row& row, int32_t blocks) {
    blocks = std::min(blocks, row.blocks.num_blocks());
    const int32_t nulls = row.blocks.num_leading_nulls();
    const RangeList gone = row.blocks.slice(nulls, blocks);
    if (gone.empty()) return;
    const bool splits = nulls == 0 && blocks < row.blocks.ranges().front().count;
    if (splits && row.blocks.num_ranges() >= max_ranges()) return;
    if (blocks == row.blocks.num_blocks()) {
      store_.allocator().release(gone);
    } else {
      store_.allocator().unreference(gone);
    }
    rows_.skip(row, blocks);
  }

  void withdraw(const RangeList& blocks) {
    for (const BlockRange& range : blocks.ranges()) {
      if (range.is_null()) continue;
      for (BlockId b = range.start; b < range.end(); ++b) {
        if (store_.allocator().is_cached(b)) store_.withdraw(b);
      }
    }
  }

  std::vector<GroupSpec> groups_;
  StepState step_;
  AdaptiveSlack slack_;
  int64_t num_admitted_ = 0;  // blocks of admitted prompts
  BlockStore store_;
  RowTable rows_;
  PinTable pins_;
  Compactor compactor_;
  RowExtender extender_;
  std::vector<HeadroomEstimator> headroom_;  // [group]
};

}  // namespace tagma
