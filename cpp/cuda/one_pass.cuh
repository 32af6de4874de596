// One-pass: a row is read once and stays on chip, in registers or in registers + shared memory.
// A row is handled by `lanes` threads: a sub-warp or warp (several rows a block), or the block.
#pragma once

#include "enqueue.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace jaxsoftmax::cuda {

// kRegs and smem_packs count packs of each input. All loads are issued before the first fold.
template <class Op, class D, int kRegs>
__global__ void __launch_bounds__(one_pass_threads(kRegs* Op::kInputs), 1)
    one_pass(Rows rows, int rows_per_block, int smem_packs) {
  using State = typename Op::State;
  __shared__ Scratch<State> scratch;
  extern __shared__ Pack shared[];  // [smem_packs][inputs][threads]
  const int lanes = blockDim.x / rows_per_block;
  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const auto slot = [&](int k, int i) -> Pack& {
    return shared[(k * Op::kInputs + i) * blockDim.x + threadIdx.x];
  };

  int turn = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * rows_per_block;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * rows_per_block;
       first < rows.rows; first += stride, ++turn) {
    const std::int64_t row = first + group;
    const Window<D, int> window(rows, row);
    const int packs = row < rows.rows ? window.packs() : 0;

    Packs<Op, D> regs[kRegs];
#pragma unroll
    for (int k = 0; k < kRegs; ++k) {
      if (lane + k * lanes < packs) regs[k].load(rows, window, lane + k * lanes);
    }
    for (int k = 0; k < smem_packs; ++k) {
      const int p = lane + (kRegs + k) * lanes;
      if (p >= packs) break;
      Packs<Op, D> loaded;
      loaded.load(rows, window, p);
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) slot(k, i) = loaded.raw[i];
    }

    // visit(packs, index) for this lane's packs, wherever they are kept
    const auto each = [&](int lane, const auto& visit) {
#pragma unroll
      for (int k = 0; k < kRegs; ++k) {
        if (lane + k * lanes < packs) visit(regs[k], lane + k * lanes);
      }
      for (int k = 0; k < smem_packs; ++k) {
        const int p = lane + (kRegs + k) * lanes;
        if (p >= packs) break;
        Packs<Op, D> kept;
#pragma unroll
        for (int i = 0; i < Op::kInputs; ++i) kept.raw[i] = slot(k, i);
        visit(kept, p);
      }
    };
    State state;
    each(lane, [&](const Packs<Op, D>& p, int) { p.fold(state); });
    reduce_row(state, lanes, turn, scratch);
    const typename Op::Row finished = Op::finish(state);
    // Addresses and masks of the stores are computed anew: kept since the loads, they would cost
    // the registers that the row needs (123 instead of 78 at 8 packs of float16).
    int again = lane;
    asm volatile("" : "+r"(again));
    each(again, [&](const Packs<Op, D>& p, int at) { p.map(rows, window, at, finished); });
  }
}

template <class Op, class D, int kRegs = 1>
void launch_one_pass(const Rows& rows, const Plan& plan, Enqueue& enqueue) {
  if (plan.reg_packs == kRegs * Op::kInputs) {
    enqueue.operator()<one_pass<Op, D, kRegs>>(
        "one_pass", grid_for(pieces(rows.rows, plan.rows_per_block)), plan.threads,
        plan.threads * plan.smem_packs * kPackBytes, rows, plan.rows_per_block,
        plan.smem_packs / Op::kInputs);
  } else if constexpr (2 * kRegs * Op::kInputs <= 32) {
    launch_one_pass<Op, D, 2 * kRegs>(rows, plan, enqueue);
  }
}

}  // namespace jaxsoftmax::cuda
