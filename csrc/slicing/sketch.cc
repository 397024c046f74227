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

}  // namespace sic::slicing
