// Every kernel of the op log_softmax_bwd.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_log_softmax_bwd(DType dtype, const LoadedRows& rows, Layout layout, const Plan& plan,
                               Stage stage, cudaStream_t stream) {
  return launch<LogSoftmaxBwd>(dtype, rows, layout, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
