// Keys of a chain of blocks: keyed BLAKE2b (RFC 7693) with a digest of 16 bytes, each over the key before it and 3 bytes
// for every token. What `workers/block_key.py` does with hashlib, without a Python object per block.

#include <cstddef>
#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words of a message are little-endian");

namespace {

constexpr size_t kBlock = 128;
constexpr size_t kDigest = 16;
constexpr size_t kTokenBytes = 3;

constexpr uint64_t kIv[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                             0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

inline uint64_t rotated(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = rotated(d ^ a, 32);
  c += d;
  b = rotated(b ^ c, 24);
  a += b + y;
  d = rotated(d ^ a, 16);
  c += d;
  b = rotated(b ^ c, 63);
}

// Round by round as templates, so that every index into the message is a constant.
template <int kRound>
inline void rounds(uint64_t* v, const uint64_t* m) {
  if constexpr (kRound < 12) {
    constexpr const uint8_t* s = kSigma[kRound % 10];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    rounds<kRound + 1>(v, m);
  }
}

struct State {
  uint64_t words[8];
};

// One block of a message into the state. `num_bytes`: of the message up to and with this block.
void compress(State& state, const uint8_t* block, uint64_t num_bytes, bool is_last) {
  uint64_t* h = state.words;
  uint64_t m[16];
  std::memcpy(m, block, kBlock);
  uint64_t v[16];
  std::memcpy(v, h, sizeof kIv);
  std::memcpy(v + 8, kIv, sizeof kIv);
  v[12] ^= num_bytes;
  if (is_last) v[14] = ~v[14];
  rounds<0>(v, m);
  for (int word = 0; word < 8; ++word) h[word] ^= v[word] ^ v[word + 8];
}

// The state behind the key's own block, which comes first in every message and is always the same.
State keyed_state(const uint8_t* key, size_t key_bytes) {
  State state;
  std::memcpy(state.words, kIv, sizeof kIv);
  state.words[0] ^= 0x01010000 ^ key_bytes << 8 ^ kDigest;
  uint8_t padded[kBlock] = {};
  std::memcpy(padded, key, key_bytes);
  compress(state, padded, kBlock, false);
  return state;
}

// A message of a parent's key and tokens. Its last block is compressed by `finish`, so a full one waits.
class Hasher {
 public:
  Hasher(const State& keyed, const uint8_t* parent) : state_(keyed) { std::memcpy(buffer_, parent, kDigest); }

  void add(uint32_t token) {
    std::memcpy(buffer_ + num_filled_, &token, sizeof token);  // its highest byte is overwritten or cut off
    num_filled_ += kTokenBytes;
    if (num_filled_ <= kBlock) return;
    num_bytes_ += kBlock;
    compress(state_, buffer_, num_bytes_, false);
    num_filled_ -= kBlock;
    std::memcpy(buffer_, buffer_ + kBlock, num_filled_);
  }

  void finish(uint8_t* key) {
    std::memset(buffer_ + num_filled_, 0, sizeof buffer_ - num_filled_);
    compress(state_, buffer_, num_bytes_ + num_filled_, true);
    std::memcpy(key, state_.words, kDigest);
  }

 private:
  State state_;
  uint8_t buffer_[kBlock + 8];
  size_t num_filled_ = kDigest;
  uint64_t num_bytes_ = kBlock;
};

}  // namespace

// `key`: 1 to 64 bytes. `parent`: 16 bytes. `tokens`: `num_blocks` blocks of `block_size` each. `keys`: 16 bytes per
// block. Returns 0, or 1 when a token has no place in its 3 bytes.
extern "C" int tandem_block_keys(const uint8_t* key, size_t key_bytes, const uint8_t* parent, const uint32_t* tokens,
                                 size_t block_size, size_t num_blocks, uint8_t* keys) {
  const State keyed = keyed_state(key, key_bytes);
  uint32_t any = 0;
  for (size_t block = 0; block < num_blocks; ++block, keys += kDigest) {
    Hasher hasher(keyed, parent);
    for (size_t token = 0; token < block_size; ++token, ++tokens) {
      hasher.add(*tokens);
      any |= *tokens;
    }
    hasher.finish(keys);
    parent = keys;
  }
  return any >> 24 != 0;
}
