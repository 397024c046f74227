// Threads of the CPU backend.
//
// Tasks are independent and their boundaries never depend on the thread count, so results do not either.
// Inside a process that already runs an OpenMP runtime (torch ships one) its threads are used: two pools on the same
// cores would spin against each other. Otherwise the library keeps a small pool of its own.
#pragma once
#include <cstdint>
#include <type_traits>

namespace sic {

using TaskFn = void (*)(void* context, int64_t task);

// Runs fn(context, 0..tasks-1), each exactly once, on up to num_threads() threads; returns when all are done.
// An exception of fn is rethrown here, after all tasks have run or been skipped.
void parallel_run(int64_t tasks, TaskFn fn, void* context);

template <class F>
void parallel_for(int64_t tasks, F&& body) {
  parallel_run(
      tasks, [](void* context, int64_t task) { (*static_cast<std::remove_reference_t<F>*>(context))(task); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

int num_threads();
// 0: as many as the process's OpenMP runtime uses, or one per core.
void set_num_threads(int n);
// "openmp (<library file>)" or "own".
const char* thread_pool_name();

}  // namespace sic
