// The fake runtime: errors, the device, streams and events.
#include <chrono>
#include <unordered_map>
#include <unordered_set>

#include "core/check.h"
#include "simt/checker.h"
#include "simt/cuda_state.h"

namespace sic::simt {
namespace {

cudaError_t last_error = cudaSuccess;
int multiprocessors = 4, shared_limit = static_cast<int>(kMaxSharedBytes);
bool clusters = true;
std::unordered_set<cudaStream_t> streams;
std::unordered_set<cudaEvent_t> events;
std::unordered_map<const void*, int> dynamic_shared_limit;

constexpr int kSharedWithoutAsking = 48 * 1024;

cudaError_t launch_problem(const KernelCall& call) {
  const dim3 g = call.grid, b = call.block;
  const uint64_t threads = uint64_t{b.x} * b.y * b.z;
  if (threads == 0 || threads > kMaxThreads || b.z > 64) return cudaErrorInvalidConfiguration;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
    return cudaErrorInvalidConfiguration;
  if (call.cluster == 0 || call.cluster > static_cast<unsigned>(clusters ? kMaxCluster : 1) || g.x % call.cluster != 0)
    return cudaErrorInvalidClusterSize;
  const auto limit = dynamic_shared_limit.find(call.entry);
  const int allowed = limit == dynamic_shared_limit.end() ? kSharedWithoutAsking : limit->second;
  return call.shared_bytes > static_cast<size_t>(allowed) ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace

cudaError_t record(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool known(cudaStream_t stream) { return !stream || streams.count(stream); }

cudaError_t enqueue(cudaStream_t stream, cudaGraphNodeType type, std::function<void()> work) {
  if (!known(stream)) return cudaErrorInvalidResourceHandle;
  if (stream && stream->capture) {
    if (!stream->capture->valid) return cudaErrorStreamCaptureInvalidated;
    stream->capture->graph->nodes.push_back(std::make_shared<CUgraphNode_st>(CUgraphNode_st{type, std::move(work)}));
    return cudaSuccess;
  }
  if (!stream)  // it waits for every blocking stream, which a capture cannot
    for (cudaStream_t s : streams)
      if (s->capture && s->flags == cudaStreamDefault) {
        s->capture->valid = false;
        return cudaErrorStreamCaptureImplicit;
      }
  work();
  return cudaSuccess;
}

cudaError_t outside_capture() {
  cudaError_t result = cudaSuccess;
  for (cudaStream_t s : streams)
    if (s->capture && s->capture->mode != cudaStreamCaptureModeRelaxed) {
      s->capture->valid = false;
      result = cudaErrorStreamCaptureUnsupported;
    }
  return result;
}

void submit(KernelCall call, cudaStream_t stream) {
  if (in_kernel()) return fault({}, "a kernel launches a kernel");
  const Lock hold;
  if (!engine.error.empty()) throw_fault();  // of host code, on its way here
  const void* entry = call.entry;
  cudaError_t status = launch_problem(call);
  if (status == cudaSuccess)
    status = enqueue(stream, cudaGraphNodeTypeKernel, [call = std::move(call)] { run_kernel(call); });
  if (status != cudaSuccess) throw Error(launch_error(entry, cudaGetErrorString(status)));
}

void set_multiprocessors(int count) {
  const Lock hold;
  multiprocessors = count;
}
void set_shared_memory(int bytes) {
  const Lock hold;
  shared_limit = bytes < static_cast<int>(kMaxSharedBytes) ? bytes : static_cast<int>(kMaxSharedBytes);
}

void set_clusters(bool on) {
  const Lock hold;
  clusters = on;
}

Counters counters() {
  const Lock hold;
  return engine.counters;
}

}  // namespace sic::simt

using namespace sic::simt;

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorECCUncorrectable:
      return "uncorrectable ECC error encountered";
    case cudaErrorNvlinkUncorrectable:
      return "uncorrectable NVLink error detected during the execution";
    case cudaErrorContained:
      return "an exception occurred on the device that is now contained";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchTimeout:
      return "the launch timed out and was terminated";
    case cudaErrorAssert:
      return "device-side assert triggered";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered:
      return "pointer does not correspond to a registered memory region";
    case cudaErrorHardwareStackError:
      return "hardware stack error";
    case cudaErrorIllegalInstruction:
      return "an illegal instruction was encountered";
    case cudaErrorMisalignedAddress:
      return "misaligned address";
    case cudaErrorInvalidAddressSpace:
      return "operation not supported on global/shared address space";
    case cudaErrorInvalidPc:
      return "invalid program counter";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorTensorMemoryLeak:
      return "tensor memory was not freed when a kernel ended";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorExternalDevice:
      return "an error of a device outside of CUDA";
    case cudaErrorInvalidClusterSize:
      return "invalid cluster size";
    case cudaErrorUnknown:
      return "unknown error";
  }
  return "unrecognized error code";
}
cudaError_t cudaGetLastError() {
  const Lock hold;
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  const Lock hold;
  return last_error;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return record(device == 0 ? cudaSuccess : cudaErrorInvalidValue); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const Lock hold;
  if (device != 0) return record(cudaErrorInvalidValue);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kMaxThreads;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kSharedWithoutAsking;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = kWarp;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 * 1024;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = shared_limit;
      return cudaSuccess;
    case cudaDevAttrClusterLaunch:
      *value = clusters;
      return cudaSuccess;
  }
  return record(cudaErrorInvalidValue);
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const Lock hold;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > shared_limit) return record(cudaErrorInvalidValue);
  dynamic_shared_limit[kernel] = value;
  return cudaSuccess;
}

// ---- streams ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const Lock hold;
  *stream = new CUstream_st{flags, nullptr};
  streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock hold;
  if (!streams.erase(stream)) return record(cudaErrorInvalidResourceHandle);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock hold;
  if (!known(stream)) return record(cudaErrorInvalidResourceHandle);
  ++engine.counters.synchronisations;
  if (!stream || stream->capture) return record(outside_capture());
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Lock hold;
  if (!known(stream)) return record(cudaErrorInvalidResourceHandle);
  return stream && stream->capture ? record(outside_capture()) : cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Lock hold;
  ++engine.counters.synchronisations;
  return record(outside_capture());
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock hold;
  if (!known(stream) || !events.count(event)) return record(cudaErrorInvalidResourceHandle);
  if (stream && event->capture && event->capture->graph) stream->capture = event->capture;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const Lock hold;
  return record(enqueue(stream, cudaGraphNodeTypeHost, [=] { function(data); }));
}

// ---- events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const Lock hold;
  *event = new CUevent_st;
  events.insert(*event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock hold;
  if (!events.erase(event)) return record(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock hold;
  if (!known(stream) || !events.count(event)) return record(cudaErrorInvalidResourceHandle);
  event->capture = stream ? stream->capture : nullptr;
  event->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Lock hold;
  if (!events.count(event)) return record(cudaErrorInvalidResourceHandle);
  ++engine.counters.synchronisations;
  return event->capture ? record(outside_capture()) : cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock hold;
  if (!events.count(event)) return record(cudaErrorInvalidResourceHandle);
  return event->capture ? record(outside_capture()) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const Lock hold;
  if (!events.count(start) || !events.count(end)) return record(cudaErrorInvalidResourceHandle);
  *milliseconds = static_cast<float>((end->seconds - start->seconds) * 1e3);
  return cudaSuccess;
}

// ---- capture ----

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const Lock hold;
  if (!known(stream)) return record(cudaErrorInvalidResourceHandle);
  if (!stream || stream->capture) return record(cudaErrorStreamCaptureUnsupported);
  stream->capture = std::make_shared<Capture>();
  static unsigned long long captures = 0;
  stream->capture->origin = stream, stream->capture->mode = mode, stream->capture->id = ++captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock hold;
  *graph = nullptr;
  if (!stream || !known(stream)) return record(cudaErrorInvalidResourceHandle);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture || capture->origin != stream) return record(cudaErrorInvalidValue);
  for (cudaStream_t s : streams)
    if (s->capture == capture) s->capture = nullptr;
  if (!capture->valid) return record(cudaErrorStreamCaptureInvalidated);
  *graph = capture->graph.release();
  ++engine.counters.live_graphs;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Lock hold;
  if (!known(stream)) return record(cudaErrorInvalidResourceHandle);
  *status = !stream || !stream->capture ? cudaStreamCaptureStatusNone
            : stream->capture->valid    ? cudaStreamCaptureStatusActive
                                        : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph) {
  const Lock hold;
  const cudaError_t error = cudaStreamIsCapturing(stream, status);
  if (error != cudaSuccess || *status != cudaStreamCaptureStatusActive) return error;
  if (id) *id = stream->capture->id;
  if (graph) *graph = stream->capture->graph.get();
  return cudaSuccess;
}
