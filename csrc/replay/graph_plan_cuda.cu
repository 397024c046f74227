// replay/graph_plan.h on CUDA.
#include "replay/graph_plan.h"

#include <deque>
#include <map>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "core/device.h"
#include "core/gpu.cuh"

namespace sic::replay {
namespace {

cudaStream_t handle(void* stream) { return static_cast<cudaStream_t>(stream); }

// After which the context cannot be used: CUDA reports these again from every call. Of an unknown error nobody says
// that the context is whole.
bool is_lost(cudaError_t status) {
  // Without names in the headers of earlier CUDA 12, whose driver may be a later one: cudaErrorContained,
  // cudaErrorTensorMemoryLeak.
  constexpr int kContained = 226, kTensorMemoryLeak = 721;
  switch (static_cast<int>(status)) {
    case kContained:
    case kTensorMemoryLeak:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

void check(cudaError_t status, const char* what) {
  if (is_lost(status)) throw ContextLost(std::string(what) + ": " + cudaGetErrorString(status));
  gpu::check_cuda(status, what);
}

// ---- capture and launch ----

using Nodes = std::vector<cudaGraphNode_t>;

Nodes nodes_of(cudaGraph_t graph) {
  size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "nodes of a graph");
  Nodes nodes(count);
  if (count) check(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes of a graph");
  return nodes;
}

class Graph final : public SegmentGraph {
 public:
  // Takes the graph over: its nodes are named as long as it lives.
  Graph(cudaGraph_t graph, std::vector<Nodes> segments) : graph_(graph), segments_(std::move(segments)) {
    try {
      check(cudaGetDevice(&device_), "current device");
      if (segments_.size() > 1) check_switches();
      check(cudaGraphInstantiate(&executable_, graph_, 0), "making a graph executable");
    } catch (...) {
      release();
      throw;
    }
  }
  ~Graph() override { release(); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  int segments() const override { return static_cast<int>(segments_.size()); }

  void launch(void* stream, int first) override {
    Check("SegmentGraph").value(first >= 0 && first < segments(), "first", first, "one of the segments");
    check(stuck_, "switching on a graph node after an earlier launch: the graph may lack segments");
    const DeviceGuard guard(device_);
    const WithoutFirst without(*this, first);
#if defined(SIC_SIMT)
    try {
      check(cudaGraphLaunch(executable_, handle(stream)), "launching a graph");
    } catch (const simt::Fault& fault) {  // a device would report it from some later call
      throw ContextLost(fault.what());
    }
#else
    check(cudaGraphLaunch(executable_, handle(stream)), "launching a graph");
#endif
  }

 private:
  // Launches that are under way keep the nodes that they had, so all can be switched on again at once.
  class WithoutFirst {
   public:
    WithoutFirst(Graph& graph, int count) : graph_(graph), count_(count) {
      const cudaError_t status = switch_all(0);
      if (status != cudaSuccess) restore();
      check(status, "switching off a graph node");
    }
    ~WithoutFirst() { restore(); }
    WithoutFirst(const WithoutFirst&) = delete;
    WithoutFirst& operator=(const WithoutFirst&) = delete;

   private:
    // A launch that lacked nodes would still mark their segments as done: the graph is refused from then on.
    void restore() {
      graph_.stuck_ = switch_all(1);
      if (graph_.stuck_ != cudaSuccess) forget_errors();  // the next launch reports it
    }
    cudaError_t switch_all(unsigned on) const {
      cudaError_t first_error = cudaSuccess;
      for (int i = 0; i < count_; ++i)
        for (cudaGraphNode_t node : graph_.segments_[static_cast<size_t>(i)]) {
          const cudaError_t status = cudaGraphNodeSetEnabled(graph_.executable_, node, on);
          if (first_error == cudaSuccess) first_error = status;
        }
      return first_error;
    }
    Graph& graph_;
    int count_;
  };

  void check_switches() const {
    for (size_t i = 0; i < segments_.size(); ++i)
      for (cudaGraphNode_t node : segments_[i]) {
        cudaGraphNodeType type;
        check(cudaGraphNodeGetType(node, &type), "type of a graph node");
        if (type != cudaGraphNodeTypeKernel && type != cudaGraphNodeTypeMemcpy && type != cudaGraphNodeTypeMemset)
          throw Error("segment " + std::to_string(i) + ": a graph node of type " + std::to_string(type) +
                      " cannot be switched off: use one graph for each segment");
      }
  }

  void release() {
    if (executable_) cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }

  int device_ = 0;
  cudaGraph_t graph_;
  std::vector<Nodes> segments_;
  cudaGraphExec_t executable_ = nullptr;
  cudaError_t stuck_ = cudaSuccess;  // why nodes may still be off
};

class Capture final : public SegmentCapture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  }
  ~Capture() override {
    if (!stream_) return;
    cudaGraph_t graph = nullptr;
    if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess) cudaGraphDestroy(graph);
    forget_errors();  // why it was given up is worth more than that it is void
  }

  void end_segment() override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    cudaGraph_t graph = nullptr;
    check(cudaStreamGetCaptureInfo(stream_, &status, &id, &graph), "a capture");
    if (status != cudaStreamCaptureStatusActive) throw Error("a segment made its capture void, or ended it");
    // Nodes come in no order that CUDA promises: a segment's are those that were not there before.
    Nodes own;
    for (cudaGraphNode_t node : nodes_of(graph))
      if (seen_.insert(node).second) own.push_back(node);
    segments_.push_back(std::move(own));
  }

  std::unique_ptr<SegmentGraph> end() override {
    cudaGraph_t graph = nullptr;
    const cudaStream_t stream = stream_;
    stream_ = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "ending a capture");
    return std::make_unique<Graph>(graph, std::move(segments_));
  }

 private:
  cudaStream_t stream_;
  std::unordered_set<cudaGraphNode_t> seen_;
  std::vector<Nodes> segments_;
};

// ---- progress ----

constexpr uintptr_t kPage = 4096;

// A page of host memory that the device writes too. CUDA refuses to register memory twice, so those who share one
// count.
class SharedPage {
 public:
  explicit SharedPage(const void* inside) : page_(reinterpret_cast<uintptr_t>(inside) & ~(kPage - 1)) {
    const std::lock_guard<std::mutex> lock(mutex());
    Entry& entry = entries()[page_];
    try {
      if (entry.users == 0) share(entry);
    } catch (...) {
      entries().erase(page_);
      throw;
    }
    ++entry.users;
    device_ = entry.device;
  }
  ~SharedPage() {
    const std::lock_guard<std::mutex> lock(mutex());
    Entry& entry = entries()[page_];
    if (--entry.users) return;
    if (entry.registered) cudaHostUnregister(reinterpret_cast<void*>(page_));
    entries().erase(page_);
  }
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  void* on_device(const void* inside) const { return device_ + (reinterpret_cast<uintptr_t>(inside) - page_); }

 private:
  struct Entry {
    int users = 0;
    bool registered = false;  // here, not by the caller
    char* device = nullptr;
  };
  static std::mutex& mutex() {
    static std::mutex m;
    return m;
  }
  static std::map<uintptr_t, Entry>& entries() {
    static std::map<uintptr_t, Entry> all;
    return all;
  }

  void share(Entry& entry) const {
    void *const page = reinterpret_cast<void*>(page_), *device = nullptr;
    cudaError_t status = cudaHostRegister(page, kPage, cudaHostRegisterMapped);
    entry.registered = status == cudaSuccess;
    if (status == cudaErrorHostMemoryAlreadyRegistered) {
      forget_errors();
      status = cudaSuccess;
    }
    if (status == cudaSuccess) status = cudaHostGetDevicePointer(&device, page, 0);
    if (status != cudaSuccess && entry.registered) cudaHostUnregister(page);
    check(status, "sharing the progress word with the device (its file has to lie in memory, as in /dev/shm)");
    entry.device = static_cast<char*>(device);
  }

  uintptr_t page_;
  char* device_ = nullptr;
};

class SharedProgress final : public DeviceProgress {
 public:
  SharedProgress(Progress* progress, int device) : progress_(progress), device_(device) {
    const DeviceGuard guard(device_);
    page_ = std::make_unique<SharedPage>(progress);
  }
  ~SharedProgress() override {
    while (!under_way_.empty()) retire();
    for (cudaEvent_t event : spare_) cudaEventDestroy(event);
  }
  SharedProgress(const SharedProgress&) = delete;
  SharedProgress& operator=(const SharedProgress&) = delete;

  uint64_t* word() const override { return static_cast<uint64_t*>(page_->on_device(&progress_->word)); }

  void launched(void* stream, uint64_t now) override {
    const DeviceGuard guard(device_);
    progress_->stamp.store(now, std::memory_order_relaxed);
    if (spare_.empty()) {
      cudaEvent_t event = nullptr;
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
      spare_.push_back(event);
    }
    check(cudaEventRecord(spare_.back(), handle(stream)), "event");
    under_way_.push_back(spare_.back());
    spare_.pop_back();
  }

  void wait(size_t most) override {
    const DeviceGuard guard(device_);
    while (under_way_.size() > most) check(retire(), "waiting for a segment");
  }

  void check_alive(void* stream) override {
    const DeviceGuard guard(device_);
    check(cudaStreamSynchronize(handle(stream)), "waiting for the device");
    const cudaError_t status = cudaPeekAtLastError();
    if (is_lost(status)) check(status, "the device");
  }

 private:
  // The oldest.
  cudaError_t retire() {
    const cudaError_t status = cudaEventSynchronize(under_way_.front());
    spare_.push_back(under_way_.front());
    under_way_.pop_front();
    return status;
  }

  Progress* progress_;
  int device_;
  std::unique_ptr<SharedPage> page_;
  std::deque<cudaEvent_t> under_way_;
  std::vector<cudaEvent_t> spare_;
};

}  // namespace

std::unique_ptr<SegmentCapture> begin_capture(void* stream) { return std::make_unique<Capture>(handle(stream)); }

std::unique_ptr<DeviceProgress> share_progress(Progress* progress, int device) {
  return std::make_unique<SharedProgress>(progress, device);
}

std::string forget_errors() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

}  // namespace sic::replay
