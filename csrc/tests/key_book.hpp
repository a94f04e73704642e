// Block hashes for tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

// Block hashes by number: all different, of one length.
class KeyBook {
 public:
  // With `collide` the eight bytes that choose the slot are the same in all keys of 16 or more.
  KeyBook(int count, size_t bytes, bool collide) : bytes_(bytes) {
    for (int i = 0; i < count; ++i) {
      std::string key(bytes, '#');
      const size_t at = collide && bytes >= 16 ? 8 : 0;
      key[at] = static_cast<char>(i);
      if (bytes > 1) key[at + 1] = static_cast<char>(i >> 8);
      keys_.push_back(key);
    }
  }

  const uint8_t* operator[](int key) const {
    return reinterpret_cast<const uint8_t*>(keys_[static_cast<size_t>(key)].data());
  }
  bool equals(int key, const std::vector<uint8_t>& other) const {
    return other.size() == bytes_ && std::equal(other.begin(), other.end(), (*this)[key]);
  }
  size_t bytes() const { return bytes_; }
  int size() const { return static_cast<int>(keys_.size()); }

 private:
  size_t bytes_;
  std::vector<std::string> keys_;
};

using Keys = std::vector<int>;  // [logical block] its number in the book
