// Requests for the soak: a stationary mix of long prompts over shared documents, chats whose
// histories grow turn by turn, and short prompts of their own. Lengths are in blocks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

struct SoakRequest {
  uint64_t shared;      // source of its leading blocks: a document or a chat
  int32_t num_shared;   // blocks of that source
  uint64_t own;         // source of the others
  int32_t prompt;       // blocks
  int32_t output;       // blocks
  int32_t abort_after;  // steps after admission, or -1
  int32_t chat;         // index, or -1

  // The hash of a block: which source it is of, and where in it.
  std::array<uint8_t, 32> key(int32_t i) const {
    const uint64_t parts[] = {i < num_shared ? shared : own, static_cast<uint64_t>(i)};
    std::array<uint8_t, 32> out{};
    // The first eight bytes choose the slot of the index.
    const uint64_t mixed = (parts[0] << 20 | parts[1]) * 0x9E3779B97F4A7C15u;
    std::memcpy(out.data(), &mixed, 8);
    std::memcpy(out.data() + 8, &parts[0], 8);
    return out;
  }
};

class SoakLoad {
 public:
  explicit SoakLoad(uint64_t seed) : random_(seed) {
    for (Chat& chat : chats_) chat = {++sources_, 1 + below(kLongestChat), false};
    for (Document& document : documents_) document = {++sources_, 16 + below(240)};
  }

  SoakRequest next() {
    SoakRequest request{};
    request.chat = -1;
    request.own = ++sources_;
    request.abort_after = below(100) < 3 ? below(30) : -1;
    const int32_t kind = below(10);
    if (kind < 3) {
      // Few documents are asked for often, many seldom.
      const auto most = static_cast<int32_t>(documents_.size());
      Document& document = documents_[static_cast<size_t>(std::min(below(most), below(most)))];
      if (below(200) == 0) document = {++sources_, 16 + below(240)};
      request.shared = document.source;
      request.num_shared = document.blocks;
      request.prompt = document.blocks + 4 + below(60);
      request.output = 1 + below(below(4) == 0 ? 40 : 15);
    } else if (kind < 9 && any_idle_chat(request.chat)) {
      Chat& chat = chats_[static_cast<size_t>(request.chat)];
      if (chat.blocks > kLongestChat) chat = {++sources_, 0, false};
      chat.busy = true;
      request.shared = chat.source;
      request.prompt = chat.blocks + 2 + below(16);
      request.output = 1 + below(16);
      request.num_shared = request.prompt + request.output;
    } else {
      request.prompt = 1 + below(12);
      request.output = 1 + below(20);
    }
    return request;
  }

  // The turn of a chat is over; what was answered is history, if it was.
  void finished(const SoakRequest& request, bool answered) {
    if (request.chat < 0) return;
    Chat& chat = chats_[static_cast<size_t>(request.chat)];
    chat.busy = false;
    if (answered) chat.blocks = request.prompt + request.output;
  }

 private:
  static constexpr int32_t kLongestChat = 200;

  struct Chat {
    uint64_t source;
    int32_t blocks;  // history
    bool busy;
  };
  struct Document {
    uint64_t source;
    int32_t blocks;
  };

  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }

  bool any_idle_chat(int32_t& found) {
    for (int tries = 0; tries < 8; ++tries) {
      const int32_t chat = below(static_cast<int32_t>(chats_.size()));
      if (chats_[static_cast<size_t>(chat)].busy) continue;
      found = chat;
      return true;
    }
    return false;
  }

  std::mt19937_64 random_;
  std::array<Chat, 80> chats_;
  std::array<Document, 30> documents_;
  uint64_t sources_ = 0;
};
