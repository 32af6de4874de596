// The kernels that the studies vary: the library's loops without what no study asks about (ragged
// rows, several rows a block), so that one thing changes at a time. float16, whole packs.
#pragma once

#include "../../cpp/cuda/vec.cuh"
#include "../../cpp/ops.h"

namespace studies {

using namespace jaxsoftmax;
using cuda::Pack;
using Half = cuda::Convert<F16>;
using Op = Softmax<FastFloat>;
using State = Op::State;

constexpr int kThreads = 256;  // of every block here; a block works on one row at a time

// When the running sum is rescaled: at every pack, where the maximum rises, where it rises by more
// than the library's slack, or never, because the maximum is found first.
enum class Fold { every_pack, every_rise, lagging, separate };

template <Fold kFold>
__device__ void fold(State& state, const Pack& pack) {
  const float most = Half::largest(pack);
  float values[1][8];
  Half::unpack(pack, values[0]);
  if constexpr (kFold == Fold::every_pack) state.align(larger(state.m, most));
  if constexpr (kFold == Fold::every_rise) {
    if (most > state.m) state.align(most);
  }
  if constexpr (kFold == Fold::lagging) state.raise(most);
  Op::fold(state, values);
}

__device__ Pack map(const Pack& pack, const Op::Row& row) {
  float values[8];
  Half::unpack(pack, values);
#pragma unroll
  for (float& value : values) value = Op::map({value}, row);
  return Half::pack(values);
}

__device__ void merge_warp(State& state) {
  float key = state.m;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    key = larger(key, __shfl_xor_sync(0xffffffffu, key, mask));
  }
  state.align(key);
  float sum = state.s.total();
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  state.s = FastSum::Merged{sum};
}

// Over the block; `turn` alternates, so that one barrier a row is enough.
__device__ Op::Row merge_block(State state, int turn) {
  __shared__ float2 warps[2][kThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  merge_warp(state);
  if (lane == 0) warps[turn & 1][warp] = {state.m, state.s.total()};
  __syncthreads();
  state = State();
  if (lane < kThreads / 32) {
    state.m = warps[turn & 1][lane].x;
    state.s = FastSum::Merged{warps[turn & 1][lane].y};
  }
  merge_warp(state);
  return Op::finish(state);
}

// One-pass: a row of at most kPacks packs a thread stays in registers.
template <int kPacks, int kBlocks, Fold kFold>
__global__ void __launch_bounds__(kThreads, kBlocks)
    resident(const Pack* in, Pack* out, int packs) {
  in += std::int64_t{blockIdx.x} * packs;
  out += std::int64_t{blockIdx.x} * packs;
  Pack held[kPacks];
  const auto each = [&](int lane, const auto& visit) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (lane + k * kThreads < packs) visit(held[k], lane + k * kThreads);
    }
  };
  int lane = threadIdx.x;
  each(lane, [&](Pack& pack, int p) { pack = __ldg(in + p); });
  State state;
  if constexpr (kFold == Fold::separate) {
    each(lane, [&](const Pack& pack, int) { state.expect(Half::largest(pack)); });
  }
  each(lane, [&](const Pack& pack, int) { fold<kFold>(state, pack); });
  const Op::Row row = merge_block(state, 0);
  asm volatile("" : "+r"(lane));  // as the library does: addresses are computed anew, not kept
  each(lane, [&](const Pack& pack, int p) { __stwb(out + p, map(pack, row)); });
}

// visit(pack, index) for a row's packs, kUnroll of them in flight a thread.
template <int kUnroll, bool kPastL1, class Visit>
__device__ void stream(const Pack* row, int packs, bool backwards, const Visit& visit) {
#pragma unroll 1
  for (int i = threadIdx.x; i < packs; i += kUnroll * kThreads) {
    Pack loaded[kUnroll];
    const auto index = [&](int u) {
      const int at = i + u * kThreads;
      return backwards ? packs - 1 - at : at;
    };
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * kThreads < packs) {
        loaded[u] = kPastL1 ? __ldcg(row + index(u)) : __ldg(row + index(u));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * kThreads < packs) visit(loaded[u], index(u));
    }
  }
}

enum class Second { none, forward, reversed };

// Two-pass: each block folds a row, reads it again and maps it. Without the second pass it leaves
// a pack a row, for the fold not to be optimised away.
template <int kUnroll, Fold kFold, bool kPastL1>
__global__ void __launch_bounds__(kThreads, kPastL1 ? 4 : 1)
    streaming(const Pack* in, Pack* out, std::int64_t rows, int packs, Second second) {
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x, ++turn) {
    const Pack* from = in + row * packs;
    Pack* to = out + row * packs;
    State state;
    if constexpr (kFold == Fold::separate) {
      stream<kUnroll, kPastL1>(from, packs, false,
                               [&](const Pack& pack, int) { state.expect(Half::largest(pack)); });
    }
    stream<kUnroll, kPastL1>(from, packs, false,
                             [&](const Pack& pack, int) { fold<kFold>(state, pack); });
    const Op::Row finished = merge_block(state, turn);
    if (second == Second::none) {
      if (threadIdx.x == 0) *to = {bit_cast<unsigned>(finished.m), bit_cast<unsigned>(finished.r)};
      continue;
    }
    stream<kUnroll, kPastL1>(from, packs, second == Second::reversed,
                             [&](const Pack& pack, int p) { __stwb(to + p, map(pack, finished)); });
  }
}

}  // namespace studies
