// Every kernel of the op logsumexp_bwd.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_logsumexp_bwd(DType dtype, const Rows& rows, const Plan& plan, Stage stage,
                             cudaStream_t stream) {
  return launch<LogsumexpBwd>(dtype, rows, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
