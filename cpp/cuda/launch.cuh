// The single switch from a dtype, a layout and a path to kernels, for any op.
#pragma once

#include "../ops.h"
#include "columns.cuh"
#include "one_pass.cuh"
#include "ring.cuh"
#include "split_k.cuh"
#include "two_pass.cuh"

namespace jaxsoftmax::cuda {

template <class Op, class D>
void launch_path(const RowsOf<D>& rows, const Plan& plan, Enqueue& enqueue) {
  if constexpr (!D::kLoaded) {
    if (plan.bulk()) return launch_ring<Op, D>(rows, plan, enqueue);
  }
  switch (plan.path) {
    case Path::one_pass:
      return launch_one_pass<Op, D>(rows, plan, enqueue);
    case Path::two_pass:
      return launch_two_pass<Op, D>(rows, plan, enqueue);
    case Path::split_k:
      return launch_split_k<Op, D>(rows, plan, enqueue);
  }
}

template <template <class> class Op, class D>
void launch_layout(const LoadedRows& rows, Layout layout, const Plan& plan, Enqueue& enqueue) {
  switch (layout) {
    case Layout::rows:
      return launch_path<Op<typename D::Numerics>, D>(rows, plan, enqueue);
    case Layout::loaded:
      return launch_path<Op<typename Loaded<D>::Numerics>, Loaded<D>>(rows, plan, enqueue);
    case Layout::columns:
      return launch_columns<Op<typename Loaded<D>::Numerics>, Loaded<D>>(rows, plan, enqueue);
  }
}

template <template <class> class Op>
Failure launch(DType dtype, const LoadedRows& rows, Layout layout, const Plan& plan, Stage stage,
               cudaStream_t stream) {
  Enqueue enqueue(stage, stream);
  switch (dtype) {
#define JAXSOFTMAX_DTYPE(Tag)                            \
  case DType::Tag:                                       \
    launch_layout<Op, Tag>(rows, layout, plan, enqueue); \
    break;
    JAXSOFTMAX_DTYPES(JAXSOFTMAX_DTYPE)
#undef JAXSOFTMAX_DTYPE
  }
  return enqueue.failure();
}

}  // namespace jaxsoftmax::cuda
