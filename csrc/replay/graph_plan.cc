// replay/graph_plan.h for builds without CUDA kernels; graph_plan_cuda.cu has the other one.
#if !defined(SIC_CUDA) && !defined(SIC_SIMT)
#include "replay/graph_plan.h"

namespace sic::replay {
namespace {
[[noreturn]] void fail() { throw Error("this build has no CUDA kernels"); }
}  // namespace

std::unique_ptr<SegmentCapture> begin_capture(void*) { fail(); }
std::unique_ptr<DeviceProgress> share_progress(Progress*, int) { fail(); }
std::string forget_errors() { fail(); }

}  // namespace sic::replay
#endif
