// Every kernel of the op logsumexp.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_logsumexp(DType dtype, const Rows& rows, const Plan& plan, Stage stage,
                         cudaStream_t stream) {
  return launch<Logsumexp>(dtype, rows, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
