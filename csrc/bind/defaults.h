// Numbers that a call may leave out.
#pragma once
#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <optional>

#include "core/tensor_view.h"
#include "slicing/validate.h"

namespace sic::bind {

using Number = std::optional<double>;
using Count = std::optional<int64_t>;

inline int64_t dim(const TensorView& v, int axis) { return axis < v.rank ? v.shape[axis] : 0; }

inline float default_scale(Number scale, const TensorView& q) {
  return scale ? static_cast<float>(*scale)
               : static_cast<float>(1.0 / std::sqrt(static_cast<double>(q.rank > 0 ? q.shape[q.rank - 1] : 1)));
}

// Too small for f32 is not "none", which 0 means.
inline float softcap_of(Number softcap) {
  const auto cap = static_cast<float>(softcap.value_or(0));
  return cap == 0 && softcap.value_or(0) != 0 ? std::numeric_limits<float>::denorm_min() : cap;
}

// Of the longest sequence that fits. Of a page that the checks refuse any number will do.
inline int64_t positions(const TensorView& block_table, int64_t page) {
  return block_table.rank == 2 && page <= slicing::kMaxPage ? block_table.shape[1] * page : page;
}

}  // namespace sic::bind
