// One-pass: a row is read once and stays on chip, in registers or in registers + shared memory.
// A row is handled by `lanes` threads: a sub-warp or warp (several rows a block), or the block.
#pragma once

#include "../ops.h"
#include "enqueue.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace jaxsoftmax::cuda {

// A lane's packs in registers, k of them, as they are between the fold and the map: what the fold
// kept of each element (one multiplication from the output), or the packs as loaded where the
// values would take too many registers. Measured on an H200, kept against loaded: float32
// 32768 x 8192 646 against 781 us, 262144 x 128 75 against 93 us; float16 with 4 packs a lane
// 2048 x 4096 13.9 against 12.9 us, so 16-bit values are kept for at most 2 packs.
template <class Op, class D, int kRegs>
struct Held {
  using Acc = typename D::Numerics::Acc;
  using Values = typename Packs<Op, D>::Values;
  static constexpr int kRaw = kRegs * Op::kInputs * 4;  // registers
  static constexpr int kValues = kRaw * static_cast<int>(sizeof(Acc) / sizeof(typename D::Storage));
  static constexpr bool kKept =
      Op::kKeeps && sizeof(Acc) == 4 && kValues <= (sizeof(typename D::Storage) == 4 ? 32 : 16);
  // Blocks of the most threads that an SM's registers must have room for. Left alone, the compiler
  // takes 95 registers for 8 packs of float16, and 16384 x 16384 goes from 288 to over 345 us.
  static constexpr int kWords = kKept ? kValues : kRaw;
  static constexpr int kBlocks = sizeof(Acc) == 8         ? 1
                                 : kRegs <= 4             ? (kWords <= 16 ? 2 : 1)
                                 : kWords <= 32 && !kKept ? 3
                                 : kWords <= 64           ? 2
                                                          : 1;

  Packs<Op, D> packs[kRegs];
  Values values[kKept ? kRegs : 1];  // of one pack at a time where they are not kept

  __device__ Values& unpack(int k) {
    Values& to = values[kKept ? k : 0];
    packs[k].unpack(to);
    return to;
  }
};

// `value`, but the compiler does not know: what is computed from it is computed anew. Kept since
// the loads, addresses and masks of the packs would cost the registers that the row needs.
__device__ inline int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// kRegs and smem_packs count packs of each input. All loads into registers are
// issued before the first use.
template <class Op, class D, int kRegs>
__global__ void __launch_bounds__(one_pass_threads(kRegs), Held<Op, D, kRegs>::kBlocks)
    one_pass(Rows rows, int rows_per_block, int lanes_a_row, int smem_packs) {
  using State = typename Op::State;
  using Values = typename Packs<Op, D>::Values;
  using Acc = typename D::Numerics::Acc;
  __shared__ Scratch<State> scratch;
  extern __shared__ Pack shared[];  // [smem_packs][inputs][threads]
  const Lanes mine(lanes_a_row);
  const int lanes = mine.count, group = mine.group, lane = mine.lane;

  int turn = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * rows_per_block;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * rows_per_block;
       first < rows.rows; first += stride, ++turn) {
    const std::int64_t row = first + group;
    const Window<D, int> window(rows, row);
    const int packs = row < rows.rows ? window.packs() : 0;

    // visit(k, p) for the packs p that this lane holds in registers; in shared memory
    const auto in_registers = [&](int lane, const auto& visit) {
#pragma unroll
      for (int k = 0; k < kRegs; ++k) {
        if (lane + k * lanes < packs) visit(k, lane + k * lanes);
      }
    };
    const auto in_shared = [&](int lane, const auto& visit) {
      for (int k = 0; k < smem_packs; ++k) {
        const int p = lane + (kRegs + k) * lanes;
        if (p >= packs) break;
        visit(shared + k * Op::kInputs * blockDim.x + threadIdx.x, p);
      }
    };
    const auto fetch = [&](const Pack* slot) {
      Packs<Op, D> kept;
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) kept.raw[i] = slot[i * blockDim.x];
      return kept;
    };

    Held<Op, D, kRegs> held;
    in_registers(lane, [&](int k, int p) { held.packs[k].load(rows, window, p); });
    in_shared(lane, [&](Pack* slot, int p) {
      Packs<Op, D> loaded;
      loaded.load(rows, window, p);
      loaded.mask(window, p);
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) slot[i * blockDim.x] = loaded.raw[i];
    });

    if (window.ragged()) {
      in_registers(lane, [&](int k, int p) { held.packs[k].mask(window, p); });
    }

    State state;
    if constexpr (State::kKeyed) {  // the whole lane's key first: nothing is ever rescaled
      const auto expect = [&](const Pack& pack) { state.expect(Convert<D>::largest(pack)); };
      in_registers(lane, [&](int k, int) { expect(held.packs[k].raw[0]); });
      in_shared(lane, [&](const Pack* slot, int) { expect(*slot); });
    }
    in_registers(lane, [&](int k, int) { Op::fold(state, held.unpack(k)); });
    in_shared(lane, [&](const Pack* slot, int) {
      Values values;
      fetch(slot).unpack(values);
      Op::fold(state, values);
    });

    const State of_lane = state;
    reduce_row(state, lanes, turn, scratch);
    const typename Op::Row finished = Op::finish(state);
    const int again = anew(lane);
    if constexpr (held.kKept) {
      const auto factor = Op::kept_factor(of_lane, finished);
      in_registers(again, [&](int k, int p) {
        Acc mapped[kPerPack<D>];
#pragma unroll
        for (int j = 0; j < kPerPack<D>; ++j)
          mapped[j] = Op::map_kept(held.values[k][0][j], factor);
        window.store(rows.out, p, Convert<D>::pack(mapped));
      });
    } else {
      in_registers(again, [&](int k, int p) { held.packs[k].map(rows, window, p, finished); });
    }
    in_shared(again, [&](const Pack* slot, int p) { fetch(slot).map(rows, window, p, finished); });
  }
}

template <class Op, class D, int kRegs = 1>
void launch_one_pass(const Rows& rows, const Plan& plan, Enqueue& enqueue) {
  if (plan.reg_packs == kRegs * Op::kInputs) {
    enqueue.operator()<one_pass<Op, D, kRegs>>(
        "one_pass", grid_for(pieces(rows.rows, plan.rows_per_block)), plan.threads,
        plan.threads * plan.smem_packs * kPackBytes, rows, plan.rows_per_block, plan.lanes(),
        plan.smem_packs / Op::kInputs);
  } else if constexpr (2 * kRegs * Op::kInputs <= 32) {
    launch_one_pass<Op, D, 2 * kRegs>(rows, plan, enqueue);
  }
}

}  // namespace jaxsoftmax::cuda
