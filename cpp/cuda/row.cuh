// The numbers that belong to a row: those an op is given, and what a row leaves beside its
// elements.
#pragma once

#include "../dtypes.h"
#include "../ops.h"
#include "../plan.h"
#include "loaded.cuh"

namespace jaxsoftmax::cuda {

// A number of the first input's dtype.
template <class D>
__device__ typename D::Numerics::Acc pulled(const RowsOf<D>& rows, const void* base,
                                            std::int64_t row) {
  using Each = Elements<D, 1>;
  if constexpr (D::kLoaded) {
    const DType dtype = rows.loading.in[0];
    const bool narrow = Each::narrow(rows.loading, dtype);
    typename D::Numerics::Acc number[1];
    Each::unpack(Each::load(base, row, narrow), narrow, dtype, number);
    return number[0];
  } else {
    return D::to_acc(__ldg(static_cast<const typename D::Storage*>(base) + row));
  }
}

// The op's given numbers of a row. Where rows are short, to be loaded beside their elements.
template <class Op, class D>
__device__ Given<typename Op::Acc, Op::kGiven> given(const RowsOf<D>& rows, std::int64_t row) {
  using Acc = typename Op::Acc;
  Given<Acc, Op::kGiven> numbers{};
  if constexpr (Op::kGiven > 0) {
    if (row >= rows.rows) return numbers;
#pragma unroll
    for (int i = 0; i < Op::kGiven; ++i) {
      if (Op::kPulled && i == Op::kGiven - 1) {
        numbers.at[i] = pulled<D>(rows, rows.given[i], row);
      } else {
        numbers.at[i] = __ldg(static_cast<const Acc*>(rows.given[i]) + row);
      }
    }
  }
  return numbers;
}

// By one lane of a row, once its state is complete.
template <class Op, class D>
__device__ void leave(const Rows& rows, std::int64_t row, const typename Op::State& state) {
  using Acc = typename Op::Acc;
  if constexpr (!Op::kMaps) {
    static_cast<typename D::Storage*>(rows.out)[row] = D::from_acc(Op::result(state));
  }
  if constexpr (Op::kStats) {
    if (rows.stats[0] != nullptr) {
      const Stats<Acc> stats = Op::stats(state);
      static_cast<Acc*>(rows.stats[0])[row] = stats.max;
      static_cast<Acc*>(rows.stats[1])[row] = stats.sum;
    }
  }
}

}  // namespace jaxsoftmax::cuda
