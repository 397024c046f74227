// Segments as graphs: what a capture keeps apart, launches without what is done, marks on the device, and what is left
// of failures.
#include <sys/mman.h>

#include <memory>
#include <string>
#include <tuple>

#include "replay/graph_plan.h"
#include "replay/replay.h"
#include "simt_testing.h"

namespace sic::simt {
namespace {

using replay::begin_capture;
using replay::Place;
using replay::Progress;
using replay::SegmentGraph;

__global__ void append(int* log, int digit) { *log = 10 * *log + digit; }
__global__ void write_past(int* log) { log[1] = 0; }

// A progress word in a page of its own.
class Page {
 public:
  Page() : memory_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Page() { munmap(memory_, kBytes); }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;
  Progress* progress() const { return reinterpret_cast<Progress*>(static_cast<char*>(memory_) + 64); }

 private:
  static constexpr size_t kBytes = 4096;
  void* memory_;
};

class SimtReplay : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  void TearDown() override {
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    cudaGetLastError();
  }
  void write(int digit) { gpu::launch(append, 1, 1, 0, stream_, log_.data(), digit); }

  // Segments that write 1, then 2 and 3, then 4 after a fill of something else.
  std::unique_ptr<SegmentGraph> three_segments() {
    const auto capture = begin_capture(stream_);
    write(1), capture->end_segment();
    write(2), write(3), capture->end_segment();
    gpu::memset_async(other_.data(), 0, 4, stream_), write(4), capture->end_segment();
    return capture->end();
  }
  int launch(SegmentGraph& graph, int first) {
    log_[0] = 0;
    graph.launch(stream_, first);
    return log_[0];
  }

  cudaStream_t stream_ = nullptr;
  Buffer<int> log_{1, "log"}, other_{1, "other"};
};

TEST_F(SimtReplay, ALaunchLeavesOutWhatIsDone) {
  log_[0] = 0;
  const auto graph = three_segments();
  EXPECT_EQ(log_[0], 0);  // captured, not run
  EXPECT_EQ(graph->segments(), 3);
  EXPECT_EQ(launch(*graph, 0), 1234);
  EXPECT_EQ(launch(*graph, 1), 234);
  EXPECT_EQ(launch(*graph, 0), 1234);  // everything is on again
  EXPECT_EQ(launch(*graph, 2), 4);
  for (int wrong : {-1, 3})
    EXPECT_NE(fault_of([&] { graph->launch(stream_, wrong); }).find("expected one of the segments"), std::string::npos);
}

TEST_F(SimtReplay, AFaultIsALostContextAndSwitchesNothingForGood) {
  const auto capture = begin_capture(stream_);
  write(1), capture->end_segment();
  write(2), capture->end_segment();
  gpu::launch(write_past, 1, 1, 0, stream_, log_.data());
  capture->end_segment();
  const auto graph = capture->end();
  for (int first : {0, 1, 0}) {
    log_[0] = 0;
    EXPECT_THROW(graph->launch(stream_, first), replay::ContextLost);
    EXPECT_EQ(log_[0], first == 0 ? 12 : 2);
  }
}

// Otherwise a later chunk would skip segments that its last mark calls done.
TEST_F(SimtReplay, AGraphWhoseNodesStayOffIsRefused) {
  // One node is switched off, the launch runs without it, and it cannot be switched on again; or two, of which the
  // second cannot even be switched off.
  for (const auto& [first, good, ran] : {std::tuple{1, 1, 234}, std::tuple{2, 1, 0}}) {
    const auto graph = three_segments();
    break_switches(cudaErrorInvalidValue, good);
    log_[0] = 0;
    const std::string refused = fault_of([&] { graph->launch(stream_, first); });
    break_switches(cudaSuccess);
    EXPECT_EQ(refused, ran ? "" : "switching off a graph node: invalid argument");
    EXPECT_EQ(log_[0], ran);
    for (int again : {0, 2})
      EXPECT_EQ(fault_of([&] { graph->launch(stream_, again); }),
                "switching on a graph node after an earlier launch: the graph may lack segments: invalid argument");
    EXPECT_EQ(log_[0], ran);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  }
}

TEST_F(SimtReplay, ErrorsThatLoseTheContext) {
  for (cudaError_t error : {cudaErrorContained, cudaErrorTensorMemoryLeak, cudaErrorExternalDevice, cudaErrorUnknown,
                            cudaErrorECCUncorrectable, cudaErrorLaunchFailure}) {
    const auto graph = three_segments();
    break_switches(error);
    EXPECT_THROW(graph->launch(stream_, 1), replay::ContextLost) << error;
    break_switches(cudaSuccess);
    EXPECT_THROW(graph->launch(stream_, 0), replay::ContextLost) << error;
  }
}

TEST_F(SimtReplay, WhatCannotBeSwitchedOffNeedsAGraphOfItsOwn) {
  const auto captured = [&](int segments) {
    const auto capture = begin_capture(stream_);
    for (int i = 0; i < segments; ++i) {
      write(1);
      cudaLaunchHostFunc(stream_, [](void*) {}, nullptr);
      capture->end_segment();
    }
    return capture->end();
  };
  EXPECT_EQ(launch(*captured(1), 0), 1);
  const uint64_t live = counters().live_graphs;
  EXPECT_EQ(fault_of([&] { captured(2); }),
            "segment 0: a graph node of type 3 cannot be switched off: use one graph for each segment");
  EXPECT_EQ(counters().live_graphs, live);
}

TEST_F(SimtReplay, FailedCapturesLeaveNothing) {
  const Counters before = counters();
  for (int i = 0; i < 100; ++i) {
    {
      const auto given_up = begin_capture(stream_);
      write(1), given_up->end_segment();
    }
    const auto spoiled = begin_capture(stream_);
    write(1);
    cudaStreamSynchronize(stream_);
    EXPECT_NE(fault_of([&] { spoiled->end_segment(); }).find("made its capture void"), std::string::npos);
    EXPECT_NE(fault_of([&] { spoiled->end(); }).find("ending a capture"), std::string::npos);
    EXPECT_NE(fault_of([&] { begin_capture(nullptr); }).find("beginning a capture"), std::string::npos);
  }
  EXPECT_EQ(counters().live_graphs, before.live_graphs);
  EXPECT_EQ(counters().live_bytes, before.live_bytes);
  log_[0] = 0;
  write(7);  // the stream is as it was
  EXPECT_EQ(log_[0], 7);
}

// ---- marks ----

struct Step {
  static constexpr int kLayers = 3, kCount = 5;
  Buffer<int64_t> place{2, "place"}, keys{3 * kLayers, "keys"}, words{kLayers, "words"}, positions{kCount, "positions"};

  void set(uint64_t epoch, uint64_t seed, int64_t position, void* stream) const {
    replay::StepArgs a{view_of(place.data(), DType::i64, 2),
                       view_of(keys.data(), DType::i64, kLayers, 3),
                       word_view(),
                       view_of(positions.data(), DType::i64, kCount),
                       epoch,
                       seed,
                       position};
    for (TensorView* v : {&a.place, &a.keys, &a.words, &a.positions}) v->device = Device::cuda;
    replay::set_step(a, exec(stream));
  }
  void mark(int64_t layer, const replay::DeviceProgress& progress, void* stream) const {
    replay::mark_step({word_view(), layer, progress.word()}, exec(stream));
  }

 private:
  TensorView word_view() const {
    TensorView v = view_of(words.data(), DType::i64, kLayers);
    v.device = Device::cuda;
    return v;
  }
  static Exec exec(void* stream) {
    Exec e;
    e.device = Device::cuda, e.device_id = 0, e.stream = stream;
    return e;
  }
};

void expect_at(const Page& page, uint64_t epoch, uint64_t layer, uint64_t position) {
  Place p;
  ASSERT_TRUE(replay::unpack(page.progress()->word.load(), &p));
  EXPECT_EQ(p.epoch, epoch);
  EXPECT_EQ(p.layer, layer);
  EXPECT_EQ(p.position, position);
}

TEST_F(SimtReplay, WhatAStepIsTold) {
  in_every_schedule([&] {
    const Step step;
    step.set(9, ~uint64_t{0}, 100, stream_);
    EXPECT_EQ(std::vector<int64_t>(step.place.begin(), step.place.end()), (std::vector<int64_t>{100, 105}));
    EXPECT_EQ(std::vector<int64_t>(step.keys.begin(), step.keys.end()),
              (std::vector<int64_t>{-1, 100, 0, -1, 100, 1, -1, 100, 2}));
    EXPECT_EQ(std::vector<int64_t>(step.positions.begin(), step.positions.end()),
              (std::vector<int64_t>{100, 101, 102, 103, 104}));
  });
  const Step step;
  EXPECT_NE(fault_of([&] { step.set(1, 0, (int64_t{1} << 28) - Step::kCount, stream_); }).find("set_step: position"),
            std::string::npos);
}

TEST_F(SimtReplay, MarksFollowTheStep) {
  const Page page;
  const auto progress = replay::share_progress(page.progress(), 0);
  const Step step;
  const auto capture = begin_capture(stream_);
  for (int layer = 0; layer < Step::kLayers; ++layer) {
    write(layer);
    step.mark(layer, *progress, stream_);
    capture->end_segment();
  }
  const auto graph = capture->end();
  EXPECT_EQ(page.progress()->word.load(), 0u);
  // The same graph at other places and in other runs; after its last segment the next chunk begins.
  for (const auto& [epoch, position] : {std::pair<uint64_t, int64_t>{1, 0}, {2, 5}, {4095, 1 << 20}}) {
    step.set(epoch, 3, position, stream_);
    for (int layer = 0; layer < Step::kLayers; ++layer) {
      step.mark(layer, *progress, stream_);  // as after a segment that was not captured
      if (layer + 1 < Step::kLayers)
        expect_at(page, epoch, static_cast<uint64_t>(layer + 1), static_cast<uint64_t>(position));
    }
    graph->launch(stream_, 1);
    expect_at(page, epoch, 0, static_cast<uint64_t>(position) + Step::kCount);
  }
  EXPECT_NE(fault_of([&] { step.mark(3, *progress, stream_); }).find("mark_step: layer: got 3"), std::string::npos);
}

// The page belongs to the device while anyone shares it, and no longer.
TEST_F(SimtReplay, AMarkNeedsMemoryThatTheDeviceKnows) {
  const Counters before = counters();
  const Page page;
  const Step step;
  step.set(1, 0, 0, stream_);
  auto first = replay::share_progress(page.progress(), 0), second = replay::share_progress(page.progress(), 0);
  EXPECT_EQ(counters().live_bytes - before.live_bytes, 4096u);
  uint64_t* const word = first->word();
  first.reset();
  step.mark(0, *second, stream_);
  expect_at(page, 1, 1, 0);
  second.reset();
  EXPECT_EQ(counters().live_bytes, before.live_bytes);
  struct Stale final : replay::DeviceProgress {
    explicit Stale(uint64_t* word) : word_(word) {}
    uint64_t* word() const override { return word_; }
    void launched(void*, uint64_t) override {}
    void wait(size_t) override {}
    void check_alive(void*) override {}
    uint64_t* word_;
  };
  EXPECT_NE(fault_of([&] { step.mark(1, Stale(word), stream_); }).find("outside of every buffer"), std::string::npos);
  expect_at(page, 1, 1, 0);
  // Where the caller has registered the page it is left so.
  void* const start = reinterpret_cast<char*>(page.progress()) - 64;
  ASSERT_EQ(cudaHostRegister(start, 4096, cudaHostRegisterMapped), cudaSuccess);
  replay::share_progress(page.progress(), 0);
  EXPECT_EQ(cudaHostUnregister(start), cudaSuccess);
}

TEST_F(SimtReplay, WaitingAndALostDevice) {
  const Page page;
  const auto progress = replay::share_progress(page.progress(), 0);
  const uint64_t waits = counters().synchronisations;
  for (uint64_t i = 1; i <= 5; ++i) progress->launched(stream_, i);
  EXPECT_EQ(page.progress()->stamp.load(), 5u);
  progress->wait(5);
  EXPECT_EQ(counters().synchronisations, waits);
  progress->wait(2);
  EXPECT_EQ(counters().synchronisations, waits + 3);
  progress->wait(0), progress->wait(0);
  EXPECT_EQ(counters().synchronisations, waits + 5);

  EXPECT_EQ(cudaStreamDestroy(reinterpret_cast<cudaStream_t>(this)), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(replay::forget_errors(), "invalid resource handle");
  EXPECT_EQ(replay::forget_errors(), "");
  progress->check_alive(stream_);
  EXPECT_NE(fault_of([&] { gpu::launch(write_past, 1, 1, 0, stream_, log_.data()); }), "");
  EXPECT_THROW(progress->check_alive(stream_), replay::ContextLost);
}

}  // namespace
}  // namespace sic::simt
