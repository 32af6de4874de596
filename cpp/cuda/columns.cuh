// Columns: rows whose elements do not lie side by side, in an array seen as [outer, cols, inner] of
// any strides. A block has a tile of them (tile.cuh), which it keeps in shared memory, alone or as
// one of a cluster, or streams: in one launch, or, cut over blocks, in two.
#pragma once

#include "enqueue.cuh"
#include "row.cuh"
#include "tile.cuh"
#include "tile_merge.cuh"

namespace jaxsoftmax::cuda {

// Blocks of kColumnThreads that an SM's registers must have room for, held and streamed.
template <class D>
inline constexpr int kHeldBlocks = sizeof(typename D::Numerics::Acc) == 8 ? 1 : 3;
template <class D>
inline constexpr int kStreamedBlocks = sizeof(typename D::Numerics::Acc) == 8 ? 1 : 2;

// Elements of a lane's rows that are folded together.
template <class Op, class D, int kVec>
inline constexpr int kCells = (kVec == 8 ? 8 : 4) / Op::kInputs;

// What a lane's rows leave beside their elements, and what their maps need.
template <class Op, class D, int kVec>
__device__ void leave_all(const LoadedRows& rows, const Lane<D, kVec>& lane,
                          const typename Op::State (&states)[kVec]) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) leave<Op, D>(rows, lane.row() + j, states[j]);
}
template <class Op, class D, int kVec>
struct Finished {
  typename Op::Row rows[kVec];
  template <std::size_t... j>
  __device__ Finished(const LoadedRows& all, std::int64_t row,
                      const typename Op::State (&states)[kVec], std::index_sequence<j...>)
      : rows{Op::finish(states[j], given<Op, D>(all, row + j))...} {}
  __device__ Finished(const LoadedRows& all, std::int64_t row,
                      const typename Op::State (&states)[kVec])
      : Finished(all, row, states, std::make_index_sequence<kVec>()) {}
};

// The tile stays in shared memory, `packs` of each input a lane. Its loads are asynchronous and
// wait for nobody, and the loops over it need not be unrolled, as they would be over registers.
template <class Op, class D, int kVec>
__global__ void __launch_bounds__(kColumnThreads, kHeldBlocks<D>)
    held_columns(const __grid_constant__ LoadedRows rows, const __grid_constant__ Tiling tiling,
                 int packs, int blocks) {
  using State = typename Op::State;
  using Raw = typename Elements<D, kVec>::Raw;
  constexpr int kAtOnce = kCells<Op, D, kVec>, kUnroll = kVec > 1 ? 4 : 2;
  extern __shared__ Pack shared[];  // [packs][inputs][threads], then what a merge needs
  const int threads = blockDim.x, rank = blockIdx.x % blocks;
  const int lanes = threads / tiling.width * blocks;
  const int lane = threadIdx.x / tiling.width + threads / tiling.width * rank;
  Raw* const slots = reinterpret_cast<Raw*>(shared) + threadIdx.x;
  const int held = packs * Op::kInputs * threads * static_cast<int>(sizeof(Raw));
  TileMerge<State, kVec> merge(shared + (held + kPackBytes - 1) / kPackBytes, tiling.width, blocks,
                               rank);
  int turn = 0;
  for (std::int64_t tile = blockIdx.x / blocks; tile < tiling.tiles;
       tile += gridDim.x / blocks, ++turn) {
    const Lane<D, kVec> part(rows, tiling, tile);
    const int cols = part.valid() ? static_cast<int>(rows.cols) : 0;
    const int count = cols > lane ? (cols - lane + lanes - 1) / lanes : 0;  // of this lane's cells
#pragma unroll kUnroll
    for (int k = 0; k < count; ++k) {
      Cell<Op, D, kVec>::copy(slots + k * Op::kInputs * threads, threads, rows, part,
                              lane + k * lanes);
    }
    if (turn == 0 && blocks > 1 && Op::kFolded > 0) merge.open();
    wait_for_copies();
    const auto fetch = [&](int k) {
      Cell<Op, D, kVec> cell;
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) cell.raw[i] = slots[(k * Op::kInputs + i) * threads];
      if (kVec == 1) cell.counts = part.counts(lane + k * lanes);
      return cell;
    };

    State states[kVec];
    if constexpr (State::kKeyed) {  // first, so that no state rescales
      typename Op::Acc keys[kVec];
      Keys<Op, D, kVec> top;
#pragma unroll kUnroll
      for (int k = 0; k < count; ++k) top.add(rows, part, fetch(k));
      top.get(keys);
      merge.share(keys);
#pragma unroll
      for (int j = 0; j < kVec; ++j) states[j].expect(keys[j]);
    }
    if constexpr (Op::kFolded > 0) {
#pragma unroll 1
      for (int k = 0; k < count; k += kAtOnce) {
        Cell<Op, D, kVec> cells[kAtOnce];
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          if (k + u < count) {
            cells[u] = fetch(k + u);
          } else {
            cells[u].pad();
          }
        }
        fold_cells(states, rows, part, cells);
      }
      merge.template lanes<true>(states, turn);
    }
    if (!part.valid()) continue;
    if (lane == 0) leave_all<Op>(rows, part, states);
    if constexpr (Op::kMaps) {
      const Finished<Op, D, kVec> finished(rows, part.row(), states);
#pragma unroll kUnroll / 2
      for (int k = 0; k < count; ++k) fetch(k).map(rows, part, lane + k * lanes, finished.rows);
    }
  }
}

// What a launch of the streaming kernel does. A piece of the rows is a block's; with `blocks` these
// are a cluster's, so that L2 still has what they read again.
enum class Part { all, fold, map };

template <class Op, class D, int kVec, Part kPart>
__global__ void __launch_bounds__(kColumnThreads, kStreamedBlocks<D>)
    streamed_columns(const __grid_constant__ LoadedRows rows, const __grid_constant__ Tiling tiling,
                     int splits, int blocks) {
  using State = typename Op::State;
  constexpr int kAtOnce = 4 / Op::kInputs;
  extern __shared__ Pack shared[];
  const int lanes = blockDim.x / tiling.width, lane = threadIdx.x / tiling.width;
  TileMerge<State, kVec> merge(shared, tiling.width, blocks, blockIdx.x % blocks);
  if constexpr (kPart == Part::fold) start_dependents();
  if (kPart == Part::all && blocks > 1 && Op::kFolded > 0) merge.open();
  int turn = 0;
  for (std::int64_t item = blockIdx.x; item < tiling.tiles * splits; item += gridDim.x, ++turn) {
    const Lane<D, kVec> part(rows, tiling, item / splits);
    const int piece = static_cast<int>(item % splits);
    const std::int64_t cols = part.valid() ? rows.cols : 0, size = (cols + splits - 1) / splits;
    const std::int64_t from = min(piece * size, cols), to = min(from + size, cols);
    Cell<Op, D, kVec> cells[kAtOnce];
    // Of kAtOnce elements from c on, each `step` lanes from the last.
    const auto fetch = [&](std::int64_t c, int step) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const std::int64_t at = c + u * step;
        if (at >= from && at < to) {
          cells[u].load(rows, part, at);
        } else {
          cells[u].pad();
        }
      }
    };
    State states[kVec];
    if constexpr (Op::kFolded > 0 && kPart != Part::map) {
      for (std::int64_t c = from + lane; c < to; c += kAtOnce * lanes) {
        fetch(c, lanes);
        if constexpr (State::kKeyed) {
          typename Op::Acc keys[kVec];
          Keys<Op, D, kVec> top;
#pragma unroll
          for (int u = 0; u < kAtOnce; ++u) top.add(rows, part, cells[u]);
          top.get(keys);
#pragma unroll
          for (int j = 0; j < kVec; ++j) states[j].raise(keys[j]);
        }
        fold_cells(states, rows, part, cells);
      }
      merge.template lanes<false>(states, turn);
    }
    if constexpr (kPart == Part::fold) {
      if (lane == 0 && part.valid()) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          Slot<State>::at(rows, (part.row() + j) * splits + piece).put(states[j]);
        }
      }
      continue;
    }
    if constexpr (Op::kFolded > 0 && kPart == Part::map) {
      if (turn == 0) wait_for_dependence();
      const std::int64_t first = part.row() - part.beside();
      merge.slots(states, splits, turn, [&](int row, int i) {
        if (part.beyond(row)) return State();
        return Slot<State>::at(rows, (first + row) * splits + i).get(false);
      });
    }
    if (!part.valid()) continue;
    if (lane == 0 && piece == 0) leave_all<Op>(rows, part, states);
    if constexpr (Op::kMaps) {  // backwards: what the fold read last is what L2 still holds
      const Finished<Op, D, kVec> finished(rows, part.row(), states);
      for (std::int64_t c = to - 1 - lane; c >= from; c -= kAtOnce * lanes) {
        fetch(c, -lanes);
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const std::int64_t at = c - u * lanes;
          if (at >= from) cells[u].map(rows, part, at, finished.rows);
        }
      }
    }
  }
}

template <class Op, class D, int kVec>
void launch_tiles(const LoadedRows& rows, const Plan& plan, Enqueue& enqueue) {
  using State = typename Op::State;
  const int width = plan.rows_per_block;
  const std::int64_t across = pieces(rows.loading.inner, kVec * width);
  const Tiling tiling{width, Divisor(across), rows.loading.outer * across};
  const std::int64_t items = tiling.tiles * plan.splits;
  Launch launch{plan.threads};
  const auto shared = [&](int blocks) {
    return TileMerge<State, kVec>::bytes(plan.threads, width, blocks);
  };
  if (plan.path == Path::one_pass) {
    launch.unit = plan.splits;
    launch.cluster = plan.splits > 1;
    constexpr int kSlot = sizeof(typename Elements<D, kVec>::Raw);
    launch.smem = shared(plan.splits) +
                  pieces(plan.threads * plan.smem_packs * kSlot, kPackBytes) * kPackBytes;
    enqueue.operator()<held_columns<Op, D, kVec>>("held_columns", tiling.tiles * plan.splits,
                                                  launch, rows, tiling,
                                                  plan.smem_packs / Op::kInputs, plan.splits);
    return;
  }
  launch.smem = shared(1);
  if (plan.path == Path::two_pass) {
    launch.smem = shared(plan.splits);
    launch.unit = plan.splits;
    launch.cluster = plan.splits > 1;
    enqueue.operator()<streamed_columns<Op, D, kVec, Part::all>>(
        "streamed_columns", items, launch, rows, tiling, plan.splits, plan.splits);
    return;
  }
  if constexpr (Op::kFolded > 0) {
    enqueue.operator()<streamed_columns<Op, D, kVec, Part::fold>>("streamed_columns", items, launch,
                                                                  rows, tiling, plan.splits, 1);
    launch.dependent = true;
  }
  enqueue.operator()<streamed_columns<Op, D, kVec, Part::map>>("streamed_columns", items, launch,
                                                               rows, tiling, plan.splits, 1);
}

template <class Op, class D>
void launch_columns(const LoadedRows& rows, const Plan& plan, Enqueue& enqueue) {
  if (in_packs<D>(rows)) {
    launch_tiles<Op, D, kPerPack<D>>(rows, plan, enqueue);
  } else {
    launch_tiles<Op, D, 1>(rows, plan, enqueue);
  }
}

}  // namespace jaxsoftmax::cuda
