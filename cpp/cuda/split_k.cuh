// Split-k: a row is cut over `splits` blocks. A first kernel folds each piece into the workspace, a
// second merges a row's states in every block that maps a piece of it.
#pragma once

#include "enqueue.cuh"
#include "reduce.cuh"
#include "spans.cuh"

namespace jaxsoftmax::cuda {

// The packs [from, to) of piece `split`.
struct Piece {
  std::int64_t from, to;
  __device__ Piece(std::int64_t packs, int splits, int split) {
    const std::int64_t size = (packs + splits - 1) / splits;
    from = split * size < packs ? split * size : packs;
    to = from + size < packs ? from + size : packs;
  }
};

// Where piece `item` of the rows keeps its state; slots are whole packs, so that it moves in words.
template <class State>
__device__ State& slot(const Rows& rows, std::int64_t item) {
  static_assert(sizeof(State) <= kStateBytes && kStateBytes % alignof(State) == 0);
  return *reinterpret_cast<State*>(rows.workspace + item * kStateBytes);
}

template <class Op, class D>
__global__ void __launch_bounds__(kMaxThreads, kStreamBlocks<D>)
    split_k_fold(Rows rows, int splits) {
  using State = typename Op::State;
  __shared__ Scratch<State> scratch;
  int turn = 0;
  for (std::int64_t item = blockIdx.x; item < rows.rows * splits; item += gridDim.x, ++turn) {
    const Window<D> window(rows, item / splits);
    const Piece piece(window.packs(), splits, static_cast<int>(item % splits));
    State state;
    fold_span<Op>(rows, window, piece.from, piece.to, threadIdx.x, blockDim.x, state);
    reduce_row(state, blockDim.x, turn, scratch);
    if (threadIdx.x == 0) slot<State>(rows, item) = state;
  }
}

template <class Op, class D>
__global__ void __launch_bounds__(kMaxThreads, kStreamBlocks<D>)
    split_k_map(Rows rows, int splits) {
  using State = typename Op::State;
  __shared__ Scratch<State> scratch;
  int turn = 0;
  for (std::int64_t item = blockIdx.x; item < rows.rows * splits; item += gridDim.x, ++turn) {
    const std::int64_t row = item / splits;
    const int lane = threadIdx.x, lanes = blockDim.x;
    const int mine = lane < splits ? (splits - lane + lanes - 1) / lanes : 0;
    State state = merge_states<State>(
        mine, [&](int i) { return slot<State>(rows, row * splits + lane + i * lanes); });
    reduce_row(state, lanes, turn, scratch);
    const Window<D> window(rows, row);
    const Piece piece(window.packs(), splits, static_cast<int>(item % splits));
    map_span<Op>(rows, window, piece.from, piece.to, lane, lanes, Op::finish(state));
  }
}

template <class Op, class D>
void launch_split_k(const Rows& rows, const Plan& plan, Enqueue& enqueue) {
  const unsigned grid = grid_for(rows.rows * plan.splits);
  enqueue.operator()<split_k_fold<Op, D>>("split_k_fold", grid, plan.threads, 0, rows, plan.splits);
  enqueue.operator()<split_k_map<Op, D>>("split_k_map", grid, plan.threads, 0, rows, plan.splits);
}

}  // namespace jaxsoftmax::cuda
