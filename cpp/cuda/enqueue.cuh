// Puts a kernel on a stream, or prepares it before a stream is captured into a graph.
#pragma once

#include <map>
#include <mutex>
#include <tuple>

#include "launch.h"

namespace jaxsoftmax::cuda {

// How a kernel runs. `unit` neighbouring blocks share rows; as a cluster if `cluster`.
struct Launch {
  int threads, smem = 0, unit = 1;
  bool cluster = false;
  bool cooperative = false;  // its blocks wait for each other: all must be resident
  bool persistent = false;   // a grid of what is resident strides over the work
  bool dependent = false;    // may start while the kernel before it ends, and waits by itself
  bool hopper = false;       // its code is empty for architectures before Hopper
};

class Enqueue {
 public:
  Enqueue(Stage stage, cudaStream_t stream) : stage_(stage), stream_(stream) {}

  // The first failure; later kernels of the call are then left out.
  const Failure& failure() const { return failure_; }

  // `blocks` of work, a multiple of the unit; kernels stride over what a grid cannot hold.
  template <auto kernel, class... Args>
  void operator()(const char* name, std::int64_t blocks, const Launch& how, const Args&... args) {
    if (failure_.error != cudaSuccess) return;
    failure_.kernel = name;
    Prepared prepared;
    failure_.error = prepare<kernel>(how, &prepared);
    if (failure_.error != cudaSuccess || stage_ == Stage::initialize) return;
    std::int64_t most = ((std::int64_t{1} << 31) - 1) / how.unit * how.unit;
    if (how.persistent) most = prepared.resident;
    Launch granted = how;
    granted.dependent &= prepared.hopper;  // older code does not wait for the kernel before it
    Config config(granted, static_cast<unsigned>(blocks < most ? blocks : most), stream_);
    failure_.error = taken(cudaLaunchKernelEx(&config.launch, kernel, args...));
  }

  void zero(void* memory, std::size_t bytes) {
    if (failure_.error != cudaSuccess || stage_ == Stage::initialize) return;
    failure_.kernel = "memset";
    failure_.error = taken(cudaMemsetAsync(memory, 0, bytes, stream_));
  }

 private:
  struct Prepared {
    int resident = 0;     // blocks on the device at one time
    bool hopper = false;  // whether the loaded code was compiled for Hopper or later
  };

  struct Config {
    cudaLaunchConfig_t launch{};
    cudaLaunchAttribute attributes[3];

    Config(const Launch& how, unsigned grid, cudaStream_t stream) {
      launch.gridDim = grid;
      launch.blockDim = how.threads;
      launch.dynamicSmemBytes = how.smem;
      launch.stream = stream;
      launch.attrs = attributes;
      if (how.cluster) {
        add(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(how.unit), 1,
                                                               1};
      }
      if (how.cooperative) add(cudaLaunchAttributeCooperative).cooperative = 1;
      if (how.dependent) {
        add(cudaLaunchAttributeProgrammaticStreamSerialization)
            .programmaticStreamSerializationAllowed = 1;
      }
    }
    Config(const Config&) = delete;

    cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
      attributes[launch.numAttrs].id = id;
      return attributes[launch.numAttrs++].val;
    }
  };

  // Loads the kernel, grants what it needs and counts the blocks that can be resident, once a
  // device and way of launching: none of it is wanted during capture.
  template <auto kernel>
  static cudaError_t prepare(const Launch& how, Prepared* found) {
    static std::mutex preparing;
    static std::map<std::tuple<int, int, int, int>, Prepared> prepared;
    static std::map<int, int> granted;  // a grant is the kernel's: it must only grow
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return taken(error);
    const std::lock_guard<std::mutex> lock(preparing);
    const auto key = std::make_tuple(device, how.threads, how.smem, how.cluster ? how.unit : 0);
    if (const auto known = prepared.find(key); known != prepared.end()) {
      *found = known->second;
    } else {
      error = grant(kernel, how, granted[device], &found->hopper);
      if (error == cudaSuccess) error = count_resident(kernel, how, device, &found->resident);
      if (error != cudaSuccess) return taken(error);
      prepared[key] = *found;
    }
    found->resident -= found->resident % how.unit;
    if (found->resident == 0 && how.cooperative) return cudaErrorCooperativeLaunchTooLarge;
    return found->resident == 0 && how.cluster ? cudaErrorInvalidClusterSize : cudaSuccess;
  }

  template <class Kernel>
  static cudaError_t grant(Kernel* kernel, const Launch& how, int& granted, bool* hopper) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    *hopper = attributes.ptxVersion >= 90;
    if ((how.cluster || how.hopper) && !*hopper) return cudaErrorNoKernelImageForDevice;
    if (how.smem > granted) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.smem);
      if (error == cudaSuccess) granted = how.smem;
    }
    if (error == cudaSuccess && how.cluster && how.unit > 8) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    return error;
  }

  template <class Kernel>
  static cudaError_t count_resident(Kernel* kernel, const Launch& how, int device, int* resident) {
    int sms = 0, count = 0;
    if (how.cluster) {
      Config config(how, how.unit, nullptr);
      const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &config.launch);
      *resident = count * how.unit;
      return error;
    }
    cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, how.threads, how.smem);
    }
    *resident = count * sms;
    return error;
  }

  // Clears the error that CUDA keeps, so that nobody else's next call reports it.
  static cudaError_t taken(cudaError_t error) {
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error;
  }

  Stage stage_;
  cudaStream_t stream_;
  Failure failure_{};
};

}  // namespace jaxsoftmax::cuda
