// Every kernel of the op softmax_bwd.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_softmax_bwd(DType dtype, const LoadedRows& rows, Layout layout, const Plan& plan,
                           Stage stage, cudaStream_t stream) {
  return launch<SoftmaxBwd>(dtype, rows, layout, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
