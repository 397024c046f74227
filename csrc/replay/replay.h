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

// What changes from one replay of captured segments to the next, where their kernels read it.
struct StepArgs {
  TensorView place;      // i64 [2]: the first token of the chunk, and the one after its last
  TensorView keys;       // i64 [L,3]: seed, position, layer of each segment, as uniform takes them
  TensorView words;      // i64 [L]: what the progress word holds once the segment is done
  TensorView positions;  // i64 [N]: of the chunk's tokens
  uint64_t epoch = 0, seed = 0;
  int64_t position = 0;  // 0 to 2^28 - 1 - N
};
extern const Op<StepArgs> set_step;  // CUDA only; writes all four

// One 64-bit store of words[layer] to the progress word, after everything that was done before on the device.
struct MarkArgs {
  TensorView words;  // i64 [L]
  int64_t layer = 0;
  uint64_t* progress = nullptr;  // the word, as the device addresses it
};
extern const Op<MarkArgs> mark_step;  // CUDA only

}  // namespace sic::replay
