// Two-pass: a row of any length is folded, then read again (from L2 when it can) and mapped; an op
// that only folds or only maps reads it once.
// A row is handled by `lanes` threads: a sub-warp or warp (several rows a block), or the block.
#pragma once

#include "enqueue.cuh"
#include "reduce.cuh"
#include "row.cuh"
#include "spans.cuh"

namespace jaxsoftmax::cuda {

template <class Op, class D>
__global__ void __launch_bounds__(kMaxThreads, kStreamBlocks<D>)
    two_pass(const __grid_constant__ RowsOf<D> rows, int rows_per_block, int lanes_a_row) {
  using State = typename Op::State;
  __shared__ Scratch<State> scratch;
  const Lanes mine(lanes_a_row);
  const int lanes = mine.count, group = mine.group, lane = mine.lane;
  int turn = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * rows_per_block;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * rows_per_block;
       first < rows.rows; first += stride, ++turn) {
    const std::int64_t row = first + group;
    const WindowOf<D> window(rows, row);
    const std::int64_t packs = row < rows.rows ? window.packs() : 0;
    const std::int64_t read = row < rows.rows ? window.read() : 0;
    State state;
    if constexpr (Op::kFolded > 0) {
      fold_span<Op, D, !Op::kMaps>(rows, window, 0, read, lane, lanes, state);
      reduce_row(state, lanes, turn, scratch);
    }
    if (lane == 0 && row < rows.rows) leave<Op, D>(rows, row, state);
    if constexpr (Op::kMaps) {
      const auto finish = [&] { return Op::finish(state, given<Op, D>(rows, row)); };
      if constexpr (Op::kFolded == 0) {
        load_and_map_span<Op, D>(rows, window, 0, packs, lane, lanes, finish);
      } else {
        map_span<Op, D>(rows, window, 0, packs, lane, lanes, finish());
      }
    }
  }
}

template <class Op, class D>
void launch_two_pass(const RowsOf<D>& rows, const Plan& plan, Enqueue& enqueue) {
  enqueue.operator()<two_pass<Op, D>>("two_pass", pieces(rows.rows, plan.rows_per_block),
                                      Launch{plan.threads}, rows, plan.rows_per_block,
                                      plan.lanes());
}

}  // namespace jaxsoftmax::cuda
