// Every kernel of the op logsumexp_bwd.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_logsumexp_bwd(DType dtype, const LoadedRows& rows, Layout layout, const Plan& plan,
                             Stage stage, cudaStream_t stream) {
  return launch<LogsumexpBwd>(dtype, rows, layout, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
