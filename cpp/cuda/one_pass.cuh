// One-pass: a row is read once and stays on chip, in registers or in registers + shared memory.
// A row is handled by a sub-warp or warp (several rows a block), a block, or a cluster of blocks.
#pragma once

#include "../ops.h"
#include "enqueue.cuh"
#include "packs.cuh"
#include "reduce.cuh"
#include "row.cuh"

namespace jaxsoftmax::cuda {

// A lane's packs in registers, k of them, as they are between the fold and the map: what the fold
// kept of each element (one multiplication from the output), or the packs as loaded where the
// values would take too many registers. Measured on an H200, kept against loaded: float32
// 32768 x 8192 646 against 781 us, 262144 x 128 75 against 93 us; float16 with 4 packs a lane
// 2048 x 4096 13.9 against 12.9 us, so 16-bit values are kept for at most 2 packs; for 4 in a
// cluster, where rows are few and occupancy hardly counts.
template <class Op, class D, int kRegs, bool kCluster>
struct Held {
  using Acc = typename D::Numerics::Acc;
  using Values = typename Packs<Op, D>::Values;
  static constexpr int kRaw = kRegs * Op::kInputs * 4;  // registers
  static constexpr int kValues = kRaw * static_cast<int>(sizeof(Acc) / sizeof(typename D::Storage));
  static constexpr bool kWide = kCluster || sizeof(typename D::Storage) == 4;
  static constexpr bool kKept =
      Op::kKeeps && sizeof(Acc) == 4 && kValues <= (D::kLoaded || kWide ? 32 : 16);
  // Blocks of the most threads that an SM's registers must have room for. Left alone, the compiler
  // takes 95 registers for 8 packs of float16, and 16384 x 16384 goes from 288 to over 345 us.
  static constexpr int kWords = kKept ? kValues : kRaw;
  static constexpr int kBlocks = sizeof(Acc) == 8 || Op::kFolded == 0 ? 1
                                 : D::kLoaded                         ? 2
                                 : kRegs <= 4                         ? (kWords <= 16 ? 2 : 1)
                                 : kWords <= 32 && !kKept             ? 3
                                 : kWords <= 64                       ? 2
                                                                      : 1;

  Packs<Op, D> packs[kRegs];
  Values values[kKept ? kRegs : 1];  // of one pack at a time where they are not kept

  // What is kept of loaded packs is unpacked as soon as it is known what counts.
  template <class Window>
  __device__ void mask(const Window& window, int k, int p) {
    packs[k].mask(window, p);
    if constexpr (kKept && D::kLoaded) packs[k].unpack(window, values[k]);
  }
  template <class Window>
  __device__ Acc largest(const Window& window, int k) const {
    if constexpr (kKept && D::kLoaded) return tree(values[k][0], larger<Acc>);
    return packs[k].largest(window);
  }
  template <class Window>
  __device__ Values& unpack(const Window& window, int k) {
    Values& to = values[kKept ? k : 0];
    if constexpr (!(kKept && D::kLoaded)) packs[k].unpack(window, to);
    return to;
  }
};

// `value`, but the compiler does not know: what is computed from it is computed anew. Kept since
// the loads, addresses and masks of the packs would cost the registers that the row needs.
__device__ inline int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The states that a block of a cluster sends: those of its warps, which saves a reduction in the
// block, if they are few in all. On an H200, 4 x 16384 takes 2.0 us by warp, 2.5 by block; with 256
// of them 4 x 262144 takes 5.9, and 5.7 by block.
inline constexpr int kMostSent = 64;
__host__ __device__ constexpr int senders(int warps, int blocks) {
  return warps * blocks <= kMostSent ? warps : 1;
}

// What a kernel is compiled for. Rows of which every lane has all its packs need no checks, which
// short rows feel: float16 1048576 x 64 takes 65.8 us instead of 69.8, 2048 x 4096 10.8 instead of
// 11.0. And only a cluster needs its code: with it 1048576 x 64 took 72.0 us instead of 70.2.
// Of loaded rows all elements may count, of every row: these need no bits.
enum class For { any, whole, cluster, every };
inline constexpr int kWholePacks = 8;  // compiled for whole rows up to so many packs a lane

// Loaded whole rows of one input in 80 registers, or 64: with 87, 29 % of the warps hid too little.
template <class Op, class D, int kRegs, For kFor>
inline constexpr int kBlocksOf =
    D::kLoaded && sizeof(typename D::Storage) * kRegs <= 16 && Op::kInputs == 1 && kRegs >= 4 &&
            (kFor == For::whole || (kFor == For::every && kRegs == 4))
        ? (kFor == For::every ? 4 : 3)
        : Held<Op, D, kRegs, kFor == For::cluster>::kBlocks;

// kRegs and smem_packs count packs of each input. All loads into registers are issued before the
// first use.
template <class Op, class D, int kRegs, For kFor>
__global__ void __launch_bounds__(one_pass_threads(kRegs, D::kLoaded),
                                  kBlocksOf<Op, D, kRegs, kFor>)
    one_pass(const __grid_constant__ RowsOf<D> rows, int rows_per_block, int lanes_a_block,
             int smem_packs, int blocks) {
  constexpr bool kCluster = kFor == For::cluster, kEvery = kFor == For::every;
  constexpr bool kWhole = kFor == For::whole || kEvery;
  constexpr bool kFolds = Op::kFolded > 0;
  using State = typename Op::State;
  using Values = typename Packs<Op, D>::Values;
  using Acc = typename D::Numerics::Acc;
  __shared__ Scratch<State> scratch;
  extern __shared__ Pack shared[];  // [smem_packs][inputs][threads], then the mailbox
  const Lanes mine(lanes_a_block);
  const int doublings = kCluster ? __ffs(blocks) - 1 : 0;  // from a block to the cluster
  const int group = mine.group, rank = kCluster ? blockIdx.x & (blocks - 1) : 0;
  const int lanes = mine.count << doublings, lane = mine.lane + rank * mine.count;
  const int warps = lanes_a_block / 32;  // in a cluster, whole ones
  const int a_block = senders(warps, blocks);
  Mailbox<State> mailbox(shared + smem_packs * Op::kInputs * blockDim.x, a_block << doublings);

  int turn = 0;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x >> doublings) * rows_per_block;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x >> doublings) * rows_per_block;
       first < rows.rows; first += stride, ++turn) {
    const std::int64_t row = first + group;
    const WindowOf<D, int, kWhole, kEvery> window(rows, row);
    const auto known = given<Op, D>(rows, row);
    const int packs = kWhole ? kRegs * lanes : row < rows.rows ? window.packs() : 0;
    const int read = D::kLoaded && !kEvery ? min(packs, window.read()) : packs;

    // visit(k, p) for the packs p below `packs` that this lane has in registers; in shared memory
    const auto in_registers = [&](int lane, int packs, const auto& visit) {
#pragma unroll
      for (int k = 0; k < kRegs; ++k) {
        if ((kWhole && (!D::kLoaded || kEvery)) || lane + k * lanes < packs)
          visit(k, lane + k * lanes);
      }
    };
    const auto in_shared = [&](int lane, int packs, const auto& visit) {
      for (int k = 0; !kWhole && !D::kLoaded && k < smem_packs; ++k) {
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

    Held<Op, D, kRegs, kCluster> held;
#pragma unroll
    for (int k = 0; k < kRegs; ++k) held.packs[k].skip();
    in_registers(lane, read, [&](int k, int p) { held.packs[k].load(rows, window, p); });
    in_shared(lane, read, [&](Pack* slot, int p) {
      Packs<Op, D> loaded;
      loaded.load(rows, window, p);
      loaded.mask(window, p);
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) slot[i * blockDim.x] = loaded.raw[i];
    });

    if (kCluster && kFolds && turn == 0) {  // beside the first loads
      if (threadIdx.x == 0) mailbox.open();
      __syncwarp();
      arrive_at_cluster();
    }
    if ((!kWhole || D::kLoaded) && window.ragged()) {
      in_registers(lane, read, [&](int k, int p) { held.mask(window, k, p); });
    }

    State state;
    if constexpr (State::kKeyed) {  // the key of the warp's lanes first: they never rescale
      in_registers(lane, read, [&](int k, int) { state.expect(held.largest(window, k)); });
      in_shared(lane, read, [&](const Pack* slot, int) {
        state.expect(Convert<typename D::Base>::largest(*slot));
      });
      state.expect(largest_of_lanes(state.key(), min(lanes_a_block, 32), members_of_warp()));
    }
    if constexpr (kFolds) {
      in_registers(lane, read, [&](int k, int) { Op::fold(state, held.unpack(window, k)); });
      in_shared(lane, read, [&](const Pack* slot, int) {
        Values values;
        fetch(slot).unpack(window, values);
        Op::fold(state, values);
      });
    }

    const State of_lane = state;
    if constexpr (kCluster && kFolds) {
      const int warp = threadIdx.x / 32;
      if (a_block == 1) {
        reduce_row<0, true>(state, lanes_a_block, turn, scratch);
      } else {
        reduce_lanes<true>(state, 32, kWarp);
      }
      if (turn == 0) wait_for_cluster();  // until every mailbox is open
      if (warp < a_block) mailbox.send(state, rank * a_block + warp, blocks, turn);
      state = mailbox.collect(turn);
    } else if constexpr (kFolds) {
      reduce_row<0, true>(state, lanes_a_block, turn, scratch);
    }
    if (lane == 0 && row < rows.rows) leave<Op, D>(rows, row, state);
    if constexpr (Op::kMaps) {
      const typename Op::Row finished = Op::finish(state, known);
      const int again = anew(lane);
      if constexpr (held.kKept) {
        const auto factor = Op::kept_factor(of_lane, finished);
        in_registers(again, packs, [&](int k, int p) {
          Acc mapped[kPerPack<D>];
#pragma unroll
          for (int j = 0; j < kPerPack<D>; ++j)
            mapped[j] = Op::map_kept(held.values[k][0][j], factor);
          held.packs[k].template store<kWhole>(rows, window, p, mapped);
        });
      } else {
        in_registers(again, packs, [&](int k, int p) {
          held.packs[k].template map<kWhole>(rows, window, p, finished);
        });
      }
      in_shared(again, packs,
                [&](const Pack* slot, int p) { fetch(slot).map(rows, window, p, finished); });
    }
  }
}

template <class Op, class D, int kRegs = D::kLoaded ? 2 : 1>
void launch_one_pass(const RowsOf<D>& rows, const Plan& plan, Enqueue& enqueue) {
  // Loaded rows of one pack a lane have a kernel's room for two, which costs them nothing.
  if (plan.reg_packs > kRegs * Op::kInputs ||
      (!D::kLoaded && plan.reg_packs < kRegs * Op::kInputs)) {
    if constexpr (2 * kRegs * (D::kLoaded ? 32 / kLoadedPacks : Op::kInputs) <= 32) {
      launch_one_pass<Op, D, 2 * kRegs>(rows, plan, enqueue);
    }
    return;
  }
  const auto run = [&](auto compiled) {
    constexpr For kFor = decltype(compiled)::value;
    Launch launch{plan.threads, plan.threads * plan.smem_packs * kPackBytes, plan.splits};
    launch.cluster = kFor == For::cluster;
    if (launch.cluster) {
      const int states = senders(plan.threads / 32, plan.splits) * plan.splits;
      launch.smem += Mailbox<typename Op::State>::bytes(states);
    }
    enqueue.operator()<one_pass<Op, D, kRegs, kFor>>(
        "one_pass", pieces(rows.rows, plan.rows_per_block) * plan.splits, launch, rows,
        plan.rows_per_block, plan.lanes(), plan.smem_packs / Op::kInputs, plan.splits);
  };
  if (plan.splits > 1) {
    if constexpr (kRegs <= kClusterPacks) run(std::integral_constant<For, For::cluster>());
    return;
  }
  if constexpr (kRegs <= kWholePacks) {
    bool whole = rows.cols == std::int64_t{kRegs} * plan.lanes() * kPerPack<D> &&
                 rows.rows % plan.rows_per_block == 0;
    if constexpr (D::kLoaded) {
      whole = whole && whole_packs<D>(rows);
      if (whole && !rows.loading.mask && !rows.loading.causal) {
        return run(std::integral_constant<For, For::every>());
      }
    }
    if (whole) {
      return run(std::integral_constant<For, For::whole>());
    }
  }
  run(std::integral_constant<For, For::any>());
}

}  // namespace jaxsoftmax::cuda
