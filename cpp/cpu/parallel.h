// Runs independent items on XLA's thread pool, the calling thread among the workers.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "../plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsoftmax::cpu {

// fn(item) for every item of [0, items). A worker takes blocks of items from a counter until none
// is left; the caller does so too and then waits only for blocks that somebody is working on, so
// it cannot deadlock in a pool whose every thread waits like this. What fn throws reaches the
// caller.
template <class Fn>
void parallel_for(xla::ffi::ThreadPool* pool, std::int64_t items, std::int64_t bytes,
                  const Fn& fn) {
  constexpr std::int64_t kSmall = 1
                                  << 16;  // bytes below which waking a thread costs more; estimate
  const std::int64_t threads = pool ? pool->num_threads() : 1;
  if (threads <= 1 || items <= 1 || bytes <= kSmall) {
    for (std::int64_t i = 0; i < items; ++i) fn(i);
    return;
  }
  struct Shared {
    std::atomic<std::int64_t> next{0};
    std::int64_t done = 0;
    std::exception_ptr error;
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto shared = std::make_shared<Shared>();
  const std::int64_t block = pieces(items, 4 * threads);
  const auto work = [shared, items, block, &fn] {
    for (;;) {
      const std::int64_t from = shared->next.fetch_add(block);
      if (from >= items) return;  // a task that starts late ends here and never touches fn
      const std::int64_t to = from + block < items ? from + block : items;
      std::exception_ptr error;
      try {
        for (std::int64_t i = from; i < to; ++i) fn(i);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard<std::mutex> lock(shared->mutex);
      if (error) shared->error = error;
      shared->done += to - from;
      if (shared->done == items) shared->finished.notify_all();
    }
  };
  const std::int64_t helpers = std::min(threads, pieces(items, block)) - 1;
  for (std::int64_t i = 0; i < helpers; ++i) {
    auto task = work;
    pool->Schedule(std::move(task));
  }
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->finished.wait(lock, [&] { return shared->done == items; });
  if (shared->error) std::rethrow_exception(shared->error);
}

}  // namespace jaxsoftmax::cpu
