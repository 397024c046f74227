// The key sketch, the part that every backend shares: signs, blocks, layout, constants.
//
// z = H(signs * (k - centre)) spreads a key evenly over the channels; plane 0 keeps the sign of each z, plane 1 whether
// |z| is large, one norm per token and head the scale (after RaBitQ, Gao & Long 2024). Everything here is additions in
// a fixed order and single IEEE operations, so that all backends make the same bits.
#pragma once
#include <cmath>
#include <cstdint>

namespace sic::slicing {

constexpr int kSketchMaxDim = 1024;          // dots of one plane stay within 16 bits
constexpr int kQueryLevels = 31;             // query integers; four of them fit a signed byte
constexpr float kSmallestQuery = 0x1p-120f;  // queries below it score nothing: levels / it must be finite
constexpr float kOuterThreshold = 1.25f;     // times the token's mean |z|: one standard deviation of a Gaussian
constexpr float kOnePlaneGain =
    2.2166f;  // E|z|level / E|z| of a Gaussian at that threshold: a 2-plane norm used with plane 0 alone
constexpr float kScoreSteps = 256;  // scores are in 1/256 nat
constexpr int kScoreMin = -32767;   // -32768 marks what is not visible
// One-bit scores overstate large logits: with this share of their spread the estimate of unread mass is unbiased on
// text.
constexpr float kUnreadShrink = 0.8f;
constexpr int kTokenBlock = 16;  // tokens whose bytes lie side by side

constexpr bool sketch_sign_is_negative(uint64_t channel) {
  uint64_t z = (channel + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) & 1;
}

// The largest power of two not above n: D is rotated in blocks of its binary digits.
inline int rotation_block(int n) {
  int b = 1;
  while (b * 2 <= n) b *= 2;
  return b;
}

inline float rotation_norm(int block) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(block))); }

inline int64_t sketch_row_bytes(int64_t D) { return (D + 7) / 8; }
inline int64_t sketch_plane_bytes(int64_t page, int64_t D) { return page * sketch_row_bytes(D); }

// +1 or -1 for each of kSketchMaxDim channels.
const float* sketch_signs();

}  // namespace sic::slicing
