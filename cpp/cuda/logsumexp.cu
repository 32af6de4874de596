// Every kernel of the op logsumexp.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_logsumexp(DType dtype, const LoadedRows& rows, Layout layout, const Plan& plan,
                         Stage stage, cudaStream_t stream) {
  return launch<Logsumexp>(dtype, rows, layout, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
