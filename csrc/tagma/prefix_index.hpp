// Prefix index: (KV-cache group, block hash) -> cached block.
//
// vLLM's block hash covers the whole prefix (it is chained), so equal hashes mean equal prefixes,
// salt, LoRA and multimodal inputs included. Keys are compared in full; nothing is truncated.
//
// Several blocks can carry one hash (two requests computed the same prefix at the same time). As in
// vLLM none is dropped, and a look-up returns the one published first.
//
// Open addressing with linear probing and backward-shift deletion (Knuth, TAOCP vol. 3, 6.4
// algorithm R): 4 bytes a slot, keys stored per block, no allocation after construction but one if
// the keys turn out not to be SHA-256.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tagma/block_range.hpp"

namespace tagma {

class PrefixIndex {
 public:
  static constexpr size_t kMaxKeyBytes = 64;
  static constexpr size_t kUsualKeyBytes = 32;  // SHA-256, vLLM's default
  static constexpr int32_t kMaxGroups = 256;

  // `seed` makes the slot order unpredictable, so that prompts cannot be chosen to collide. Throws
  // UsageError for a number of groups outside 1 to 256.
  PrefixIndex(int32_t num_blocks, uint64_t seed, int32_t num_groups = 1)
      : seed_(seed | 1),
        has_groups_(checked_groups(num_groups) > 1),
        keys_(static_cast<size_t>(num_blocks) * kUsualKeyBytes, 0),
        group_of_(has_groups_ ? static_cast<size_t>(num_blocks) : 0, 0),
        next_same_(static_cast<size_t>(num_blocks), kNullBlock),
        prev_same_(static_cast<size_t>(num_blocks), kNullBlock) {
    // Half of them stay empty, whatever is published.
    slots_.assign(2 * static_cast<size_t>(num_blocks), kNullBlock);
  }

  // Fixes the key length, once; all keys of a pool have the same. Throws UsageError otherwise.
  void set_key_bytes(size_t bytes) {
    if (bytes == key_bytes_ && bytes != 0) return;
    if (key_bytes_ != 0 || bytes == 0 || bytes > kMaxKeyBytes) {
      throw UsageError(message("a block hash of ", bytes, " bytes; this pool's have ",
                               key_bytes_ == 0 ? kMaxKeyBytes : key_bytes_,
                               key_bytes_ == 0 ? " at most" : ""));
    }
    stride_log2_ = 0;
    while ((size_t{1} << stride_log2_) < bytes) ++stride_log2_;
    if (bytes != kUsualKeyBytes) {
      std::vector<uint8_t> keys(prev_same_.size() << stride_log2_, 0);
      keys_.swap(keys);
    }
    key_bytes_ = bytes;
  }

  // The block published first under this key in this group, or the null block. Expected O(1).
  BlockId find(int32_t group, const uint8_t* key) const {
    if (size_ == 0) return kNullBlock;
    for (size_t slot = home(group, key);; slot = next(slot)) {
      const BlockId block = slots_[slot];
      if (block == kNullBlock || equal(block, group, key)) return block;
    }
  }

  // find(), asking the block behind `previous` first: in a pool of ranges it nearly always is the
  // answer, and costs one comparison and no probe.
  // `kGrouped` false spares the look at the group in an index of one.
  template <bool kGrouped = true>
  BlockId find_behind(int32_t group, BlockId previous, const uint8_t* key) const {
    const size_t guess = static_cast<size_t>(previous) + 1;
    if (previous != kNullBlock && guess < prev_same_.size() &&
        is_first(static_cast<BlockId>(guess)) &&
        (!kGrouped || group_of(static_cast<BlockId>(guess)) == group) &&
        same_key(static_cast<BlockId>(guess), key)) {
      return static_cast<BlockId>(guess);
    }
    return find(group, key);
  }

  // Brings the slot where a look-up of this key begins nearer to the processor. Slots are visited
  // at random, so a caller that knows its next keys hides most of the wait for memory.
  void prefetch(int32_t group, const uint8_t* key) const {
    __builtin_prefetch(&slots_[home(group, key)]);
  }

  // Publishes a block under a key in a group. Throws UsageError if it carries one already or the
  // key length is not known yet. Expected O(1).
  void insert(BlockId block, int32_t group, const uint8_t* key) {
    if (key_bytes_ == 0) throw UsageError("publish before set_key_bytes()");
    if (contains(block)) throw UsageError(message("block ", block, " is published already"));
    size_t slot = home(group, key);
    copy_key(block, key);
    if (has_groups_) group_of_[block] = static_cast<uint8_t>(group);
    BlockId head = slots_[slot];
    while (head != kNullBlock && !equal(head, group, key)) head = slots_[slot = next(slot)];
    if (head == kNullBlock) {
      slots_[slot] = block;
      prev_same_[block] = block;
      ++num_keys_;
    } else {
      const BlockId last = prev_same_[head];  // the head's "previous" is the last of its list
      next_same_[last] = block;
      prev_same_[block] = last;
      prev_same_[head] = block;
    }
    next_same_[block] = kNullBlock;
    ++size_;
  }

  // Withdraws a published block. Throws UsageError if it carries no key. Expected O(1).
  void erase(BlockId block) {
    if (!contains(block)) throw UsageError(message("block ", block, " is not published"));
    const BlockId after = next_same_[block];
    const BlockId before = prev_same_[block];
    if (is_first(block)) {
      const size_t slot = slot_of(block);
      if (after == kNullBlock) {
        remove_slot(slot);
        --num_keys_;
      } else {
        slots_[slot] = after;
        prev_same_[after] = before;
      }
    } else {
      next_same_[before] = after;
      // The list's last block is known to its head only.
      prev_same_[after == kNullBlock ? slots_[slot_of(block)] : after] = before;
    }
    next_same_[block] = kNullBlock;
    prev_same_[block] = kNullBlock;
    --size_;
  }

  // `to` is published in the place of `from`: same key, same turn among blocks of that key. Throws
  // UsageError unless `from` carries a key and `to` none. Expected O(1).
  void move(BlockId from, BlockId to) {
    if (!contains(from) || contains(to)) {
      throw UsageError(message("move block ", from, " to ", to, " in the prefix index"));
    }
    const size_t slot = slot_of(from);
    const BlockId head = slots_[slot];
    const BlockId before = prev_same_[from];
    const BlockId after = next_same_[from];
    copy_key(to, key(from));
    if (has_groups_) group_of_[to] = group_of_[from];
    next_same_[to] = after;
    prev_same_[to] = before == from ? to : before;
    if (head == from) {
      slots_[slot] = to;
    } else {
      next_same_[before] = to;
    }
    if (after != kNullBlock) {
      prev_same_[after] = to;
    } else if (head != from) {
      prev_same_[head] = to;
    }
    next_same_[from] = kNullBlock;
    prev_same_[from] = kNullBlock;
  }

  // Withdraws everything. O(num_blocks).
  void clear() {
    std::fill(slots_.begin(), slots_.end(), kNullBlock);
    std::fill(next_same_.begin(), next_same_.end(), kNullBlock);
    std::fill(prev_same_.begin(), prev_same_.end(), kNullBlock);
    size_ = 0;
    num_keys_ = 0;
  }

  bool contains(BlockId block) const { return prev_same_[block] != kNullBlock; }
  bool has_key(BlockId block, int32_t group, const uint8_t* key) const {
    return contains(block) && equal(block, group, key);
  }
  // The group of a published block.
  int32_t group(BlockId block) const { return group_of(block); }
  bool has_groups() const { return has_groups_; }
  // The key of a published block, key_bytes() long.
  const uint8_t* key(BlockId block) const {
    return keys_.data() + (static_cast<size_t>(block) << stride_log2_);
  }
  size_t key_bytes() const { return key_bytes_; }
  int32_t size() const { return size_; }          // published blocks
  int32_t num_keys() const { return num_keys_; }  // distinct keys

  size_t memory_bytes() const {
    return keys_.capacity() + group_of_.capacity() +
           (slots_.capacity() + next_same_.capacity() + prev_same_.capacity()) * sizeof(BlockId);
  }

  // Law P: every published block is reachable from its key, in publication lists that agree both
  // ways, and nothing else is. Throws InvariantError. O(slots).
  void check_invariants() const {
    int32_t blocks = 0;
    int32_t keys = 0;
    for (const BlockId head : slots_) {
      if (head == kNullBlock) continue;
      ++keys;
      require(is_first(head), kLaw, "a slot names a block that is not the first of its key:", head);
      require(find(group(head), key(head)) == head, kLaw, "unreachable from its key: block", head);
      BlockId before = prev_same_[head];
      for (BlockId b = head; b != kNullBlock; b = next_same_[b]) {
        require(equal(b, group(head), key(head)), kLaw, "two keys in one list at block", b);
        require(prev_same_[b] == before, kLaw, "a list broken at block", b);
        before = b;
        require(++blocks <= size_, kLaw, "a cycle or a stray block at", b);
      }
      require(prev_same_[head] == before, kLaw, "the last block is not known to", head);
    }
    int32_t published = 0;
    for (const BlockId b : prev_same_) published += b != kNullBlock ? 1 : 0;
    require(blocks == size_ && published == size_, kLaw, "published blocks counted", published);
    require(keys == num_keys_, kLaw, "keys counted", keys);
  }

 private:
  static constexpr const char* kLaw = "P (prefix index)";

  bool is_first(BlockId block) const {
    const BlockId before = prev_same_[block];
    return before != kNullBlock && next_same_[before] == kNullBlock;
  }

  static int32_t checked_groups(int32_t num_groups) {
    if (num_groups < 1 || num_groups > kMaxGroups) {
      throw UsageError(message("groups=", num_groups, " is outside 1 to ", kMaxGroups));
    }
    return num_groups;
  }

  int32_t group_of(BlockId block) const { return has_groups_ ? group_of_[block] : 0; }

  bool equal(BlockId block, int32_t of_group, const uint8_t* other) const {
    return group_of(block) == of_group && same_key(block, other);
  }

  // Of the default hash the length is known here, and a few instructions replace a library call.
  bool same_key(BlockId block, const uint8_t* other) const {
    if (key_bytes_ == kUsualKeyBytes) {
      const uint8_t* own = keys_.data() + static_cast<size_t>(block) * kUsualKeyBytes;
      return std::memcmp(own, other, kUsualKeyBytes) == 0;
    }
    return std::memcmp(key(block), other, key_bytes_) == 0;
  }

  void copy_key(BlockId block, const uint8_t* from) {
    if (key_bytes_ == kUsualKeyBytes) {
      std::memcpy(keys_.data() + static_cast<size_t>(block) * kUsualKeyBytes, from, kUsualKeyBytes);
    } else {
      std::memcpy(keys_.data() + (static_cast<size_t>(block) << stride_log2_), from, key_bytes_);
    }
  }

  size_t home(int32_t group, const uint8_t* key) const {
    uint64_t word = 0;
    if (key_bytes_ >= sizeof(word)) {
      std::memcpy(&word, key, sizeof(word));
    } else {
      std::memcpy(&word, key, key_bytes_);
    }
    // One hash stands for the same prefix in every group: without the group all would collide.
    if (group != 0) word += static_cast<uint64_t>(group) * 0xD1B54A32D192ED03u;
    word = (word ^ seed_) * 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio
    // Lemire, Fast random integer generation in an interval, 2019: 32 bits as a share of the slots.
    return static_cast<size_t>(((word >> 32) * slots_.size()) >> 32);
  }

  size_t next(size_t slot) const { return slot + 1 < slots_.size() ? slot + 1 : 0; }

  // Steps from one slot to another.
  size_t distance(size_t from, size_t to) const {
    return to >= from ? to - from : to + slots_.size() - from;
  }

  size_t slot_of(BlockId block) const {
    size_t slot = home(group(block), key(block));
    while (!equal(slots_[slot], group(block), key(block))) slot = next(slot);
    return slot;
  }

  // Closes the gap so that no later entry of the cluster becomes unreachable.
  void remove_slot(size_t gap) {
    for (size_t at = next(gap); slots_[at] != kNullBlock; at = next(at)) {
      const size_t from = home(group(slots_[at]), key(slots_[at]));
      // Movable unless its home lies cyclically in (gap, at].
      if (distance(from, at) >= distance(gap, at)) {
        slots_[gap] = slots_[at];
        gap = at;
      }
    }
    slots_[gap] = kNullBlock;
  }

  uint64_t seed_;
  size_t key_bytes_ = 0;
  int stride_log2_ = 5;  // of a key's place in keys_: a shift, not a product
  bool has_groups_;
  std::vector<uint8_t> keys_;       // [block][1 << stride_log2_]
  std::vector<uint8_t> group_of_;   // [block]; empty if there is one group
  std::vector<BlockId> slots_;      // first block of a key, or the null block
  std::vector<BlockId> next_same_;  // [block] the next published under the same key
  std::vector<BlockId>
      prev_same_;  // [block] the one before; of the first: the last; 0: unpublished
  int32_t size_ = 0;
  int32_t num_keys_ = 0;
};

}  // namespace tagma
