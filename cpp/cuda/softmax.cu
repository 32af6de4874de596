// Every kernel of the op softmax.
#include "launch.cuh"

namespace jaxsoftmax::cuda {

Failure launch_softmax(DType dtype, const Rows& rows, const Plan& plan, Stage stage,
                       cudaStream_t stream) {
  return launch<Softmax>(dtype, rows, plan, stage, stream);
}

}  // namespace jaxsoftmax::cuda
