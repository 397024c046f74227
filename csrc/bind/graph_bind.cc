// Graphs of segments and their progress, for Python: sic_kernels/replay/graph_engine.py; under the emulator for tests
// too.
//
// Whatever may wait for the device does so without the GIL: what the device waits for may be a host function that needs
// it.
#include <memory>
#include <utility>

#include "bind/call.h"
#include "replay/graph_plan.h"
#include "replay/replay.h"
#if defined(SIC_SIMT)
#include "core/gpu.cuh"
#endif

namespace sic::bind {
namespace {

void* stream_of(uintptr_t handle) { return reinterpret_cast<void*>(handle); }

#if defined(SIC_SIMT)
// The emulator has no current stream that a caller could set: a graph brings its own. As torch's graphs do on a device,
// it keeps the memory that its calls used.
class Surroundings {
 public:
  Surroundings() {
    gpu::check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    memory_.stream = stream_;
  }
  ~Surroundings() { cudaStreamDestroy(stream_); }
  Surroundings(const Surroundings&) = delete;
  Surroundings& operator=(const Surroundings&) = delete;

  void* stream(uintptr_t) const { return stream_; }

  // While it lives, calls are captured.
  struct Entered {
    explicit Entered(Surroundings& around) {
      if (simt_capture()) Check("Graph").fail("functions", "a call while a graph is captured", "one capture at a time");
      simt_capture() = &around.memory_;
    }
    ~Entered() { simt_capture() = nullptr; }
  };

 private:
  SimtCapture memory_;
  cudaStream_t stream_ = nullptr;
};
#else
// On a device torch has both.
struct Surroundings {
  void* stream(uintptr_t given) const { return stream_of(given); }
  struct Entered {
    explicit Entered(Surroundings&) {}
  };
};
#endif

#if defined(SIC_SIMT)
// Part of the graph that is being captured, which must not outlive it.
void add_host_function(py::handle function) {
  if (!simt_capture()) Check("add_host_function").fail("function", "no capture", "a call while a graph is captured");
  const auto call = [](void* data) {
    const py::gil_scoped_acquire acquire;
    py::reinterpret_borrow<py::function>(static_cast<PyObject*>(data))();
  };
  const auto stream = static_cast<cudaStream_t>(simt_capture()->stream);
  gpu::check_cuda(cudaLaunchHostFunc(stream, call, function.ptr()), "host function");
}
#endif

class Graph {
 public:
  // functions: one for each segment, or a single one. stream: the current one, on which they will launch.
  Graph(const py::object& functions, uintptr_t stream) {
    const py::object all = PyCallable_Check(functions.ptr()) ? py::make_tuple(functions) : functions;
    [[maybe_unused]] const Surroundings::Entered entered(around_);
    const auto capture = replay::begin_capture(around_.stream(stream));
    for (const py::handle function : all) {
      function();
      capture->end_segment();
    }
    const py::gil_scoped_release release;
    graph_ = capture->end();
  }

  void replay(uintptr_t stream, int first) {
    const py::gil_scoped_release release;
    graph_->launch(around_.stream(stream), first);
  }

 private:
  Surroundings around_;
  std::unique_ptr<replay::SegmentGraph> graph_;
};

class Progress {
 public:
  // address: of a progress word in a page that `owner` keeps mapped.
  Progress(uintptr_t address, int device, py::object owner)
      : owner_(std::move(owner)), host_(reinterpret_cast<replay::Progress*>(address)) {
    const py::gil_scoped_release release;
    shared_ = replay::share_progress(host_, device);
  }
  ~Progress() {  // waits for what is under way
    const py::gil_scoped_release release;
    shared_.reset();
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void set(py::handle place, py::handle keys, py::handle words, py::handle positions, uint64_t epoch, uint64_t seed,
           int64_t position) const {
    Args in("set_step", py::none());
    replay::StepArgs a{in.out("place", place),
                       in.out("keys", keys),
                       in.out("words", words),
                       in.out("positions", positions),
                       epoch,
                       seed,
                       position};
    Call(in, place, a.place, py::none(), kCuda).run(replay::set_step, a, true, [] {});
  }
  void mark(py::handle words, int64_t layer) const {
    Args in("mark_step", py::none());
    replay::MarkArgs a{in("words", words), layer, shared_->word()};
    Call(in, words, a.words, py::none(), kCuda).run(replay::mark_step, a, true, [] {});
  }

  void launched(uintptr_t stream, uint64_t now) {
    const py::gil_scoped_release release;
    shared_->launched(stream_of(stream), now);
  }
  void wait(size_t most) {
    const py::gil_scoped_release release;
    shared_->wait(most);
  }
  void check_alive(uintptr_t stream) {
    const py::gil_scoped_release release;
    shared_->check_alive(stream_of(stream));
  }
  // (epoch, layer, position); None where no whole word is.
  py::object read() const {
    replay::Place p;
    if (!replay::unpack(host_->word.load(std::memory_order_acquire), &p)) return py::none();
    return py::make_tuple(p.epoch, p.layer, p.position);
  }

 private:
  py::object owner_;
  replay::Progress* host_;
  std::unique_ptr<replay::DeviceProgress> shared_;
};

}  // namespace

void bind_graph(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const replay::ContextLost& e) {
      const py::object type = py::module_::import("sic_kernels.replay.errors").attr("ContextPoisoned");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
  py::class_<Graph>(m, "Graph", "Graph(functions, stream): captures what calls of them launch; replay() runs it again")
      .def(py::init<py::object, uintptr_t>(), py::arg("functions"), py::arg("stream") = 0)
      .def("replay", &Graph::replay, py::arg("stream") = 0, py::arg("first") = 0);
  py::class_<Progress>(m, "DeviceProgress")
      .def(py::init<uintptr_t, int, py::object>())
      .def("set", &Progress::set)
      .def("mark", &Progress::mark)
      .def("launched", &Progress::launched)
      .def("wait", &Progress::wait)
      .def("check_alive", &Progress::check_alive)
      .def("read", &Progress::read);
  m.def("forget_errors", &replay::forget_errors);
#if defined(SIC_SIMT)
  m.def("add_host_function", &add_host_function);
#endif
}

}  // namespace sic::bind
