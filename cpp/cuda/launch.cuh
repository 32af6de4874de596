// The single switch from a dtype and a path to kernels, for any op.
#pragma once

#include "../ops.h"
#include "one_pass.cuh"
#include "ring.cuh"
#include "split_k.cuh"
#include "two_pass.cuh"

namespace jaxsoftmax::cuda {

template <class Op, class D>
void launch_path(const Rows& rows, const Plan& plan, Enqueue& enqueue) {
  switch (plan.path) {
    case Path::one_pass:
      return plan.bulk() ? launch_ring<Op, D>(rows, plan, enqueue)
                         : launch_one_pass<Op, D>(rows, plan, enqueue);
    case Path::two_pass:
      return launch_two_pass<Op, D>(rows, plan, enqueue);
    case Path::split_k:
      return plan.bulk() ? launch_ring<Op, D>(rows, plan, enqueue)
                         : launch_split_k<Op, D>(rows, plan, enqueue);
  }
}

template <template <class> class Op>
Failure launch(DType dtype, const Rows& rows, const Plan& plan, Stage stage, cudaStream_t stream) {
  Enqueue enqueue(stage, stream);
  switch (dtype) {
#define JAXSOFTMAX_DTYPE(Tag)                                          \
  case DType::Tag:                                                     \
    launch_path<Op<typename Tag::Numerics>, Tag>(rows, plan, enqueue); \
    break;
    JAXSOFTMAX_DTYPES(JAXSOFTMAX_DTYPE)
#undef JAXSOFTMAX_DTYPE
  }
  return enqueue.failure();
}

}  // namespace jaxsoftmax::cuda
