// BLAKE2b (RFC 7693), with key: one message at a time, of any length, in any number of pieces.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sic::delta {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read and written as they lie in memory");

class Blake2b {
 public:
  static constexpr size_t kBlock = 128;
  static constexpr size_t kMostBytes = 64;  // of a digest, and of a key

  // 1 to 64 bytes of digest, 0 to 64 bytes of key. A copy of a keyed state has its key's block behind it.
  explicit Blake2b(size_t digest_bytes, const void* key = nullptr, size_t key_bytes = 0)
      : digest_bytes_(digest_bytes), keyed_(key_bytes > 0) {
    std::memcpy(h_, kIv, sizeof h_);
    h_[0] ^= 0x01010000 ^ key_bytes << 8 ^ digest_bytes;
    if (!keyed_) return;
    std::memcpy(buffer_, key, key_bytes);
    std::memset(buffer_ + key_bytes, 0, kBlock - key_bytes);
    std::memcpy(keyed_h_, h_, sizeof h_);
    compress(h_, buffer_, kBlock, false);
    count_ = kBlock;
  }

  size_t digest_bytes() const { return digest_bytes_; }

  void update(const void* data, size_t n) {
    const auto* p = static_cast<const uint8_t*>(data);
    while (n > 0) {
      if (used_ == kBlock) {  // more follows, so this is not the last block
        count_ += kBlock;
        compress(h_, buffer_, count_, false);
        used_ = 0;
      }
      const size_t take = n < kBlock - used_ ? n : kBlock - used_;
      std::memcpy(buffer_ + used_, p, take);
      used_ += take, p += take, n -= take;
    }
    any_ = any_ || used_ > 0;
  }

  // Ends the message; writes digest_bytes().
  void finish(void* digest) {
    if (keyed_ && !any_) {  // the key's block is the last one
      std::memcpy(h_, keyed_h_, sizeof h_);
      compress(h_, buffer_, kBlock, true);
    } else {
      std::memset(buffer_ + used_, 0, kBlock - used_);
      compress(h_, buffer_, count_ + used_, true);
    }
    std::memcpy(digest, h_, digest_bytes_);
  }

 private:
  static constexpr uint64_t kIv[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                      0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  static constexpr uint8_t kSigma[10][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
      {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
      {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
      {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
      {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

  static uint64_t rotate_right(uint64_t x, int n) { return x >> n | x << (64 - n); }

  static void mix(uint64_t* v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = rotate_right(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotate_right(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotate_right(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate_right(v[b] ^ v[c], 63);
  }

  template <int kRound>
  static void round(uint64_t* v, const uint64_t* m) {
    constexpr const uint8_t* s = kSigma[kRound % 10];
    mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
  }

  // `count`: bytes up to the end of this block. Messages end below 2^64 bytes, so the counter's high word is 0.
  static void compress(uint64_t* h, const uint8_t* block, uint64_t count, bool last) {
    uint64_t m[16], v[16];
    std::memcpy(m, block, sizeof m);
    std::memcpy(v, h, 64);
    std::memcpy(v + 8, kIv, 64);
    v[12] ^= count;
    if (last) v[14] = ~v[14];
    round<0>(v, m), round<1>(v, m), round<2>(v, m), round<3>(v, m), round<4>(v, m), round<5>(v, m);
    round<6>(v, m), round<7>(v, m), round<8>(v, m), round<9>(v, m), round<10>(v, m), round<11>(v, m);
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
  }

  size_t digest_bytes_;
  bool keyed_, any_ = false;
  uint64_t h_[8], keyed_h_[8];
  uint64_t count_ = 0;  // bytes compressed
  size_t used_ = 0;     // of the buffer
  uint8_t buffer_[kBlock];
};

}  // namespace sic::delta
