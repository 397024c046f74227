// Inside the fake runtime: what streams, events and graphs are.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "simt/simt.h"

struct CUgraphNode_st {
  cudaGraphNodeType type;
  std::function<void()> run;
  bool destroyed = false;  // with its graph: executables still run it, but it can no longer be named
};
struct CUgraph_st {
  std::vector<std::shared_ptr<CUgraphNode_st>> nodes;  // in the order of the calls, which is one that the edges allow
};
struct CUgraphExec_st {
  std::vector<std::shared_ptr<CUgraphNode_st>> nodes;
  std::vector<bool> enabled;
};

namespace sic::simt {

// One stream began it; others join by waiting for an event of a stream that takes part.
struct Capture {
  cudaStream_t origin;
  cudaStreamCaptureMode mode;
  unsigned long long id;
  std::unique_ptr<CUgraph_st> graph = std::make_unique<CUgraph_st>();
  bool valid = true;
};

}  // namespace sic::simt

struct CUstream_st {
  unsigned flags;
  std::shared_ptr<sic::simt::Capture> capture;
};
struct CUevent_st {
  std::shared_ptr<sic::simt::Capture> capture;  // of the stream that recorded it
  double seconds = 0;
};

namespace sic::simt {

// Keeps an error for cudaGetLastError.
cudaError_t record(cudaError_t error);

// Handles that have not been destroyed.
bool known(cudaStream_t stream);  // nullptr, the default stream, is

// Does the work now, or adds it to the graph that the stream captures.
cudaError_t enqueue(cudaStream_t stream, cudaGraphNodeType type, std::function<void()> work);
// For calls that wait for the device or allocate: an error while a stream captures, whose capture then is lost.
cudaError_t outside_capture();

}  // namespace sic::simt
