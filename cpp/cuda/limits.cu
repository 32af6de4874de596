// What the loaded code can do on this device, which may be less than the device: on a card newer
// than the build, the driver compiles PTX that may know no clusters.
#include "launch.h"

namespace jaxsoftmax::cuda {
namespace {

__global__ void probe() {}

}  // namespace

int largest_cluster() {
  int current = 0, shared = 0, largest = 0;
  cudaFuncAttributes code;
  if (cudaGetDevice(&current) == cudaSuccess && cudaSetDevice(0) == cudaSuccess &&
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) == cudaSuccess &&
      cudaFuncGetAttributes(&code, probe) == cudaSuccess && code.ptxVersion >= 90 &&
      cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) ==
          cudaSuccess &&
      cudaFuncSetAttribute(probe, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
          cudaSuccess) {
    for (int size = 1; size <= kMaxCluster; size *= 2) {
      cudaLaunchAttribute cluster;
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = size;
      config.blockDim = kMaxThreads;
      config.dynamicSmemBytes = shared;
      config.attrs = &cluster;
      config.numAttrs = 1;
      int active = 0;
      if (cudaOccupancyMaxActiveClusters(&active, probe, &config) != cudaSuccess || active == 0) {
        break;
      }
      largest = size;
    }
  }
  (void)cudaSetDevice(current);
  (void)cudaGetLastError();
  return largest;
}

}  // namespace jaxsoftmax::cuda
