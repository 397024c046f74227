#include "slicing/sketch.h"

#include <array>

namespace sic::slicing {

const float* sketch_signs() {
  static const auto signs = [] {
    std::array<float, kSketchMaxDim> s;
    for (int d = 0; d < kSketchMaxDim; ++d) s[d] = sketch_sign_is_negative(d) ? -1.0f : 1.0f;
    return s;
  }();
  return signs.data();
}

const uint32_t* exp_table(int bits) {
  static const auto make = [](int b) {
    std::array<uint32_t, kExpSteps> t;
    for (int i = 0; i < kExpSteps; ++i) t[i] = static_cast<uint32_t>(std::ldexp(std::exp(-i / double(kScoreSteps)), b));
    return t;
  };
  static const auto narrow = make(24), wide = make(30);
  return bits == 24 ? narrow.data() : wide.data();
}

}  // namespace sic::slicing
