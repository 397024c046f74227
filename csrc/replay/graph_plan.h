// Segments as CUDA graphs: what captures them, what launches them without those that are done, and how far they are.
//
// Nothing of CUDA is named here; streams are cudaStream_t. In a build without CUDA kernels the three functions throw
// Error. An object is used by one thread at a time; a capture begins on the device that is current then.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "core/check.h"
#include "replay/cursor_word.h"

namespace sic::replay {

// The device's context is lost (an illegal access, an ECC error): every later call fails too.
class ContextLost : public Error {
 public:
  using Error::Error;
};

class SegmentGraph {
 public:
  virtual ~SegmentGraph() = default;
  // Runs segments `first` and later. Those before are switched off for this launch alone; where they could not be
  // switched on again every later launch is an Error.
  virtual void launch(void* stream, int first) = 0;
  virtual int segments() const = 0;
};

// While it lives, what is put on its stream becomes part of a graph instead of running.
class SegmentCapture {
 public:
  virtual ~SegmentCapture() = default;  // gives up what has not ended
  // What follows belongs to the next segment. Work on other streams must have joined.
  virtual void end_segment() = 0;
  // Error where a graph of several segments holds what cannot be switched off: anything but kernels, copies and fills.
  virtual std::unique_ptr<SegmentGraph> end() = 0;
};
std::unique_ptr<SegmentCapture> begin_capture(void* stream);

// A progress word that the device writes, and the launches that will.
class DeviceProgress {
 public:
  virtual ~DeviceProgress() = default;
  virtual uint64_t* word() const = 0;  // as the device addresses it
  // Something has been launched that ends with a mark. now: becomes the word's stamp, as a device does not have the
  // clock.
  virtual void launched(void* stream, uint64_t now) = 0;
  // Until at most so many of them are under way. ContextLost where they never will be done.
  virtual void wait(size_t most) = 0;
  // Whether the device still works: waits for the stream, and throws ContextLost if not.
  virtual void check_alive(void* stream) = 0;
};
// progress: in a page of host memory that stays mapped while the result lives; the device may share it with others.
std::unique_ptr<DeviceProgress> share_progress(Progress* progress, int device);
// The last error of calls that are over, and did no harm to the context, is no longer reported. Says what it was;
// empty: there was none.
std::string forget_errors();

}  // namespace sic::replay
