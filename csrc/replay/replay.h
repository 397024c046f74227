// The contract of the replay family: random numbers that follow from where they are used, and what a device must be
// told of a step, and tells of it.
#pragma once
#include <cstdint>

#include "core/op.h"

namespace sic::replay {

// Element i is number i % 4 of block i / 4 of the Stream (replay/philox.h) at the key, as a float from [0, 1).
struct UniformArgs {
  TensorView key;     // i64 [3]: seed (its 64 bits), position, layer
  int64_t count = 0;  // below 2^34
  TensorView out;     // f32 [count]
};
extern const Op<UniformArgs> uniform;

}  // namespace sic::replay
