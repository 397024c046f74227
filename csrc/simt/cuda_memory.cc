// The fake runtime: memory and graphs.
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "simt/checker.h"
#include "simt/cuda_state.h"
#include "simt/memory.h"

namespace sic::simt {
namespace {

struct Block {
  Offered offered;
  size_t bytes;
};
struct Registered : Block {
  bool mapped;
};
// Never destroyed: what is still there at the end of the process may not outlive the table of ranges.
auto& blocks = *new std::unordered_map<void*, Block>;
auto& registered = *new std::unordered_map<void*, Registered>;  // the host's memory that the device knows
std::unordered_set<cudaGraphExec_t> executables;
cudaError_t switch_error = cudaSuccess;  // of calls after the next `good_switches`
int good_switches = 0;

constexpr unsigned char kGarbage = 0xcb;

cudaError_t allocate(void** p, size_t bytes, const char* name, Contents contents) {
  *p = nullptr;
  const cudaError_t status = outside_capture();
  if (status != cudaSuccess) return record(status);
  const size_t rounded = (bytes + 255) / 256 * 256;
  void* block = std::aligned_alloc(256, rounded ? rounded : 256);
  if (!block) return record(cudaErrorMemoryAllocation);
  std::memset(block, kGarbage, rounded);
  blocks.emplace(block, Block{Offered(offer(name, block, bytes, Access::read_write, contents)), bytes});
  ++engine.counters.allocations;
  engine.counters.live_bytes += bytes;
  *p = block;
  return cudaSuccess;
}

cudaError_t release(void* p) {
  if (!p) return cudaSuccess;
  const cudaError_t status = outside_capture();
  if (status != cudaSuccess) return record(status);
  const auto block = blocks.find(p);
  if (block == blocks.end()) return record(cudaErrorInvalidValue);
  ++engine.counters.frees;
  engine.counters.live_bytes -= block->second.bytes;
  blocks.erase(block);
  std::free(p);
  return cudaSuccess;
}

bool any_registered(const void* p, size_t bytes) {
  const auto a = reinterpret_cast<uintptr_t>(p);
  for (const auto& [begin, r] : registered) {
    const auto b = reinterpret_cast<uintptr_t>(begin);
    if (a < b + r.bytes && b < a + bytes) return true;
  }
  return false;
}

bool reads_device(cudaMemcpyKind kind) { return kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice; }
bool writes_device(cudaMemcpyKind kind) { return kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice; }

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (reads_device(kind) && !host_may_access(from, bytes, false)) return record(cudaErrorInvalidValue);
  if (writes_device(kind) && !host_may_access(to, bytes, true)) return record(cudaErrorInvalidValue);
  return record(enqueue(stream, cudaGraphNodeTypeMemcpy, [=] {
    ++engine.counters.copies;
    std::memmove(to, from, bytes);
    note_host_write(to, bytes);
  }));
}

cudaError_t fill(void* p, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!host_may_access(p, bytes, true)) return record(cudaErrorInvalidValue);
  return record(enqueue(stream, cudaGraphNodeTypeMemset, [=] {
    ++engine.counters.fills;
    std::memset(p, value, bytes);
    note_host_write(p, bytes);
  }));
}

}  // namespace
void break_switches(cudaError_t error, int after) {
  const Lock hold;
  switch_error = error, good_switches = after;
}

}  // namespace sic::simt

using namespace sic::simt;

cudaError_t cudaMalloc(void** p, size_t bytes) {
  const Lock hold;
  return allocate(p, bytes, "cudaMalloc memory", Contents::garbage);
}
cudaError_t cudaFree(void* p) {
  const Lock hold;
  ++engine.counters.synchronisations;
  return release(p);
}
// Graphs may hold allocations on a device. Here they may not: nothing in the library allocates while it captures.
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) {
  const Lock hold;
  return allocate(p, bytes, "cudaMallocAsync memory", Contents::garbage);
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t) {
  const Lock hold;
  return release(p);
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  const Lock hold;
  return allocate(p, bytes, "cudaHostAlloc memory", Contents::given);
}
cudaError_t cudaFreeHost(void* p) {
  const Lock hold;
  return release(p);
}
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned flags) {
  const Lock hold;
  const cudaError_t status = outside_capture();
  if (status != cudaSuccess) return record(status);
  if (!p || bytes == 0) return record(cudaErrorInvalidValue);
  if (any_registered(p, bytes)) return record(cudaErrorHostMemoryAlreadyRegistered);
  Offered offered(offer("registered host memory", p, bytes, Access::read_write, Contents::given));
  registered.emplace(p, Registered{{std::move(offered), bytes}, (flags & cudaHostRegisterMapped) != 0});
  engine.counters.live_bytes += bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  const Lock hold;
  const cudaError_t status = outside_capture();
  if (status != cudaSuccess) return record(status);
  const auto r = registered.find(p);
  if (r == registered.end()) return record(cudaErrorHostMemoryNotRegistered);
  engine.counters.live_bytes -= r->second.bytes;
  registered.erase(r);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  const Lock hold;
  const auto r = registered.find(host);
  *device = blocks.count(host) || (r != registered.end() && r->second.mapped) ? host : nullptr;
  return record(*device ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const Lock hold;
  return copy(to, from, bytes, kind, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const Lock hold;
  ++engine.counters.synchronisations;
  const cudaError_t status = outside_capture();
  return status == cudaSuccess ? copy(to, from, bytes, kind, nullptr) : record(status);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  const Lock hold;
  return fill(p, value, bytes, stream);
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  const Lock hold;
  const cudaError_t status = outside_capture();
  return status == cudaSuccess ? fill(p, value, bytes, nullptr) : record(status);
}

// ---- graphs ----

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  const Lock hold;
  if (nodes)
    for (size_t i = 0; i < *count && i < graph->nodes.size(); ++i) nodes[i] = graph->nodes[i].get();
  *count = nodes ? std::min(*count, graph->nodes.size()) : graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = node->type;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  const Lock hold;
  *exec = new CUgraphExec_st{graph->nodes, std::vector<bool>(graph->nodes.size(), true)};
  executables.insert(*exec);
  ++engine.counters.live_graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const Lock hold;
  if (!executables.count(exec) || !known(stream)) return record(cudaErrorInvalidResourceHandle);
  ++engine.counters.graph_launches;
  for (size_t i = 0; i < exec->nodes.size(); ++i) {
    if (!exec->enabled[i]) continue;
    const cudaError_t status = enqueue(stream, exec->nodes[i]->type, exec->nodes[i]->run);
    if (status != cudaSuccess) return record(status);
  }
  return cudaSuccess;
}

namespace {
// The position of a node of the graph in an executable made of it, or -1.
int position(cudaGraphExec_t exec, cudaGraphNode_t node) {
  for (size_t i = 0; i < exec->nodes.size(); ++i)
    if (exec->nodes[i].get() == node) return node->destroyed ? -1 : static_cast<int>(i);
  return -1;
}
}  // namespace

cudaError_t cudaGraphNodeSetEnabled(cudaGraphExec_t exec, cudaGraphNode_t node, unsigned enabled) {
  const Lock hold;
  if (!executables.count(exec)) return record(cudaErrorInvalidResourceHandle);
  const int i = position(exec, node);
  if (i < 0 || node->type == cudaGraphNodeTypeHost) return record(cudaErrorInvalidValue);
  if (switch_error != cudaSuccess && good_switches-- <= 0) return record(switch_error);
  exec->enabled[static_cast<size_t>(i)] = enabled != 0;
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetEnabled(cudaGraphExec_t exec, cudaGraphNode_t node, unsigned* enabled) {
  const Lock hold;
  if (!executables.count(exec)) return record(cudaErrorInvalidResourceHandle);
  const int i = position(exec, node);
  if (i < 0) return record(cudaErrorInvalidValue);
  *enabled = exec->enabled[static_cast<size_t>(i)];
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  const Lock hold;
  if (!executables.erase(exec)) return record(cudaErrorInvalidResourceHandle);
  --engine.counters.live_graphs;
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Lock hold;
  if (!graph) return record(cudaErrorInvalidValue);
  --engine.counters.live_graphs;
  for (const auto& node : graph->nodes) node->destroyed = true;
  delete graph;
  return cudaSuccess;
}
