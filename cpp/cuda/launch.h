// What the handlers call: one launch function an op, defined in the op's .cu file. No XLA here.
#pragma once

#include <cuda_runtime_api.h>

#include "../plan.h"

namespace jaxsoftmax::cuda {

// `initialize` loads kernels and grants shared memory ahead of a capture; `execute` launches.
enum class Stage { initialize, execute };

// The largest cluster that device 0 can have of blocks with all its shared memory; 0 where the
// loaded code has no clusters.
int largest_cluster();

struct Failure {
  cudaError_t error = cudaSuccess;
  const char* kernel = "";
};

#define JAXSOFTMAX_OP(name, Op) \
  Failure launch_##name(DType, const LoadedRows&, Layout, const Plan&, Stage, cudaStream_t);
JAXSOFTMAX_OPS(JAXSOFTMAX_OP)
#undef JAXSOFTMAX_OP

}  // namespace jaxsoftmax::cuda
