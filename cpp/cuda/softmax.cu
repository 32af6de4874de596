// Every kernel of the op softmax.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_softmax(DType dtype, const LoadedRows& rows, Layout layout, const Plan& plan,
                       Stage stage, cudaStream_t stream) {
  return launch<Softmax>(dtype, rows, layout, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
