#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>
#endif

namespace sic {
namespace {

constexpr int kMaxThreads = 256;

// Every thread begins with a range of its own and then helps the others. The same thread gets the same tasks from step
// to step of an op and from call to call, so what one step wrote is still in its cache: moving lines between cores
// costs more than many steps compute.
struct Job {
  TaskFn fn;
  void* context;
  int threads;
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  } ranges[kMaxThreads];

  Job(TaskFn f, void* c, int64_t tasks, int n) : fn(f), context(c), threads(n) {
    for (int i = 0; i < n; ++i) {
      ranges[i].next.store(tasks * i / n, std::memory_order_relaxed);
      ranges[i].end = tasks * (i + 1) / n;
    }
  }
  void work(int thread) {
    for (int k = 0; k < threads; ++k) {
      Range& r = ranges[(thread + k) % threads];
      for (int64_t i; (i = r.next.fetch_add(1, std::memory_order_relaxed)) < r.end;) run_task(i);
    }
  }
  // The first exception of a task (memory may run out) waits for the caller; nothing may unwind through the pool.
  void run_task(int64_t i) noexcept {
    try {
      fn(context, i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
  std::atomic<bool> failed{false};
  std::exception_ptr error;
};

// The OpenMP runtime that somebody else loaded, reached through the entry that GCC's code calls (LLVM's and Intel's
// runtimes answer to it too).
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*max_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
  int (*thread)() = nullptr;
  std::string name;

  void find() {
#if defined(__linux__)
    std::string path;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
          const std::string file = info->dlpi_name ? info->dlpi_name : "";
          const auto base = file.substr(file.rfind('/') + 1);
          const bool is_openmp =
              base.rfind("libgomp", 0) == 0 || base.rfind("libomp", 0) == 0 || base.rfind("libiomp", 0) == 0;
          if (is_openmp) *static_cast<std::string*>(out) = file;
          return is_openmp ? 1 : 0;
        },
        &path);
    if (path.empty()) return;
    void* library = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_NOW);
    if (!library) return;
    auto run = reinterpret_cast<decltype(parallel)>(dlsym(library, "GOMP_parallel"));
    max_threads = reinterpret_cast<int (*)()>(dlsym(library, "omp_get_max_threads"));
    in_parallel = reinterpret_cast<int (*)()>(dlsym(library, "omp_in_parallel"));
    thread = reinterpret_cast<int (*)()>(dlsym(library, "omp_get_thread_num"));
    if (run && max_threads && in_parallel && thread)
      parallel = run, name = "openmp (" + path.substr(path.rfind('/') + 1) + ")";
#endif
  }
};

class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }

  static bool& inside() {
    static thread_local bool flag = false;
    return flag;
  }

  // One job at a time; a caller that finds the pool busy does its work alone.
  void run(Job& job, int threads) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner || threads <= 1) return job.work(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(threads_.size()) < threads - 1)
        threads_.emplace_back([this, index = static_cast<int>(threads_.size()) + 1] { loop(index); });
      job_ = &job;
      wanted_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    inside() = true;
    job.work(0);
    inside() = false;
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;
    done_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
  }

 private:
  void loop(int index) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || (wanted_ > 0 && generation_ != seen); });
      if (stop_) return;
      seen = generation_;
      --wanted_;
      ++running_;
      Job* job = job_;
      lock.unlock();
      inside() = true;
      job->work(index);
      inside() = false;
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  int wanted_ = 0, running_ = 0;
  uint64_t generation_ = 0;
  bool stop_ = false;
};

struct Threads {
  OpenMp openmp;
  std::atomic<int> wanted{0};
  std::unique_ptr<Pool> pool = std::make_unique<Pool>();
#if defined(__linux__)
  const pid_t pid = getpid();
  pid_t pool_pid = pid;
#endif

  Threads() { openmp.find(); }

  // In a child of fork() the runtime waits for threads that are gone; a pool of our own does not.
  bool shares_openmp() const {
#if defined(__linux__)
    return openmp.parallel && pid == getpid();
#else
    return openmp.parallel;
#endif
  }
  // Called from inside a parallel region: its threads are all taken.
  bool busy() const { return Pool::inside() || (shares_openmp() && openmp.in_parallel()); }

  // Threads do not survive fork(): the child starts a pool of its own and leaves the parent's alone.
  Pool& own_pool() {
#if defined(__linux__)
    if (pool_pid != getpid()) {
      pool.release();
      pool = std::make_unique<Pool>();
      pool_pid = getpid();
    }
#endif
    return *pool;
  }
};

Threads& threads() {
  static Threads& instance = *new Threads;  // never destroyed: no join at exit, when other threads may already be gone
  return instance;
}

}  // namespace

void parallel_run(int64_t tasks, TaskFn fn, void* context) {
  Threads& t = threads();
  const int n = static_cast<int>(std::min<int64_t>({num_threads(), tasks, kMaxThreads}));
  if (n <= 1 || t.busy()) {
    for (int64_t i = 0; i < tasks; ++i) fn(context, i);
    return;
  }
  Job job(fn, context, tasks, n);
  if (t.shares_openmp()) {
    const auto member = [](void* j) { static_cast<Job*>(j)->work(threads().openmp.thread()); };
    t.openmp.parallel(member, &job, static_cast<unsigned>(n), 0);
  } else {
    t.own_pool().run(job, n);
  }
  if (job.error) std::rethrow_exception(job.error);
}

int num_threads() {
  Threads& t = threads();
  if (const int n = t.wanted.load(std::memory_order_relaxed)) return n;
  if (t.openmp.max_threads) return t.openmp.max_threads();
  const int n = static_cast<int>(std::thread::hardware_concurrency());
  return n > 0 ? n : 1;
}

void set_num_threads(int n) { threads().wanted = n; }

const char* thread_pool_name() { return threads().openmp.parallel ? threads().openmp.name.c_str() : "own"; }

}  // namespace sic
