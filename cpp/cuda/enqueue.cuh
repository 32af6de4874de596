// Puts a kernel on a stream, or prepares it before a stream is captured into a graph.
#pragma once

#include <atomic>
#include <mutex>

#include "launch.h"

namespace jaxsoftmax::cuda {

// Blocks of a grid: enough for `items`; kernels stride over what a grid of 2^31 - 1 cannot hold.
inline unsigned grid_for(std::int64_t items) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  return static_cast<unsigned>(items < kMost ? items : kMost);
}

class Enqueue {
 public:
  Enqueue(Stage stage, cudaStream_t stream) : stage_(stage), stream_(stream) {}

  // The first failure; later kernels of the call are then left out.
  const Failure& failure() const { return failure_; }

  template <auto kernel, class... Args>
  void operator()(const char* name, unsigned grid, int threads, int smem, const Args&... args) {
    if (failure_.error != cudaSuccess) return;
    failure_.kernel = name;
    failure_.error = prepare<kernel>(smem);
    if (failure_.error != cudaSuccess || stage_ == Stage::initialize) return;
    kernel<<<grid, threads, smem, stream_>>>(args...);
    failure_.error = cudaGetLastError();
  }

 private:
  // Loads the kernel and grants its dynamic shared memory, once a device and size: neither is
  // wanted during capture. Grants only grow, and one at a time.
  template <auto kernel>
  static cudaError_t prepare(int smem) {
    constexpr int kDevices = 64;
    static std::atomic<int> granted[kDevices];  // bytes + 1; 0 before the first call
    static std::mutex granting;
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return taken(error);
    if (device >= kDevices) return cudaErrorInvalidDevice;
    if (granted[device].load() > smem) return cudaSuccess;
    const std::lock_guard<std::mutex> lock(granting);
    if (granted[device].load() > smem) return cudaSuccess;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    if (error != cudaSuccess) return taken(error);
    granted[device].store(smem + 1);
    return cudaSuccess;
  }

  // Clears the error that CUDA keeps, so that nobody else's next call reports it.
  static cudaError_t taken(cudaError_t error) {
    (void)cudaGetLastError();
    return error;
  }

  Stage stage_;
  cudaStream_t stream_;
  Failure failure_{};
};

}  // namespace jaxsoftmax::cuda
