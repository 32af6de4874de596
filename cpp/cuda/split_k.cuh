// Split-k: a row is cut over `splits` blocks. A first kernel folds each piece into the workspace, a
// second merges a row's states in every block that maps a piece of it, or in one if none is mapped.
// An op that only maps needs the second alone.
#pragma once

#include "enqueue.cuh"
#include "reduce.cuh"
#include "row.cuh"
#include "spans.cuh"

namespace jaxsoftmax::cuda {

// The packs [from, to) of piece `index` of a row that is cut into `count`.
struct Piece {
  std::int64_t from, to;
  __device__ Piece(std::int64_t packs, int count, int index) {
    const std::int64_t size = (packs + count - 1) / count;
    from = index * size < packs ? index * size : packs;
    to = from + size < packs ? from + size : packs;
  }
};

template <class Op, class D>
__global__ void __launch_bounds__(kMaxThreads, kStreamBlocks<D>)
    split_k_fold(const __grid_constant__ RowsOf<D> rows, int splits) {
  using State = typename Op::State;
  __shared__ Scratch<State> scratch;
  start_dependents();
  int turn = 0;
  for (std::int64_t item = blockIdx.x; item < rows.rows * splits; item += gridDim.x, ++turn) {
    const WindowOf<D> window(rows, item / splits);
    const Piece piece(window.read(), splits, static_cast<int>(item % splits));
    State state;
    fold_span<Op, D, true>(rows, window, piece.from, piece.to, threadIdx.x, blockDim.x, state);
    reduce_row(state, blockDim.x, turn, scratch);
    if (threadIdx.x == 0) Slot<State>::at(rows, item).put(state);
  }
}

template <class Op, class D>
__global__ void __launch_bounds__(kMaxThreads, kStreamBlocks<D>)
    split_k_map(const __grid_constant__ RowsOf<D> rows, int splits) {
  using State = typename Op::State;
  __shared__ Scratch<State> scratch;
  const int parts = Op::kMaps ? splits : 1;
  int turn = 0;
  for (std::int64_t item = blockIdx.x; item < rows.rows * parts; item += gridDim.x, ++turn) {
    const std::int64_t row = item / parts;
    const int part = static_cast<int>(item % parts), lane = threadIdx.x, lanes = blockDim.x;
    const auto merge = [&] {
      State state;
      if constexpr (Op::kFolded > 0) {
        if (turn == 0) wait_for_dependence();
        state = collect_slots<State>(rows, row, splits, lane, lanes, false);
        reduce_row(state, lanes, turn, scratch);
      }
      if (lane == 0 && part == 0) leave<Op, D>(rows, row, state);
      return state;
    };
    if constexpr (Op::kMaps) {
      const WindowOf<D> window(rows, row);
      const Piece piece(window.packs(), splits, part);
      const auto known = given<Op, D>(rows, row);
      load_and_map_span<Op, D>(rows, window, piece.from, piece.to, lane, lanes,
                               [&] { return Op::finish(merge(), known); });
    } else {
      merge();
    }
  }
}

template <class Op, class D>
void launch_split_k(const RowsOf<D>& rows, const Plan& plan, Enqueue& enqueue) {
  const std::int64_t blocks = rows.rows * plan.splits;
  Launch launch{plan.threads};
  if constexpr (Op::kFolded > 0) {
    enqueue.operator()<split_k_fold<Op, D>>("split_k_fold", blocks, launch, rows, plan.splits);
    launch.dependent = true;  // the second launch overlaps the fold
  }
  enqueue.operator()<split_k_map<Op, D>>("split_k_map", Op::kMaps ? blocks : rows.rows, launch,
                                         rows, plan.splits);
}

}  // namespace jaxsoftmax::cuda
