// Every kernel of the op log_softmax.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_log_softmax(DType dtype, const LoadedRows& rows, Layout layout, const Plan& plan,
                           Stage stage, cudaStream_t stream) {
  return launch<LogSoftmax>(dtype, rows, layout, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
