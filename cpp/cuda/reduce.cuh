// Merges the states of the lanes that share a row: over a group of lanes, or over a block.
// Knows states (ops.h), not ops. Every lane ends with the same bits.
#pragma once

#include "../ops.h"

namespace jaxsoftmax::cuda {

template <class T>
__device__ T shuffle_xor(const T& value, int lane_mask, unsigned members) {
  static_assert(sizeof(T) % 4 == 0);
  constexpr int kWords = sizeof(T) / 4;
  unsigned words[kWords];
  memcpy(words, &value, sizeof value);
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(members, words[i], lane_mask);
  T out;
  memcpy(&out, words, sizeof out);
  return out;
}

// Over `lanes` (a power of two, at most 32) neighbouring lanes: first the common key, then one
// rescaling a lane, then the sum; pairwise merging would rescale five times.
template <class State>
__device__ void reduce_lanes(State& state, int lanes, unsigned members) {
  if constexpr (State::kKeyed) {
    auto key = state.key();
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
      key = larger(key, shuffle_xor(key, mask, members));
    }
    state.align(key);
  }
  auto sum = state.s.merged();
  for (int mask = lanes / 2; mask > 0; mask /= 2) sum.add(shuffle_xor(sum, mask, members));
  state.s = sum;
}

// Which of a block's rows a thread works on, and as which of the row's lanes: groups of a power of
// two of at most 32 lanes, or all of the block on one row.
struct Lanes {
  int count, group, lane;
  __device__ explicit Lanes(int count) : count(count) {
    const int tid = threadIdx.x;
    group = count <= 32 ? tid >> (31 - __clz(count)) : 0;
    lane = count <= 32 ? tid & (count - 1) : tid;
  }
};

// Shared memory for reduce_row: one state a warp, twice, so that the next row's reduction need not
// wait for the slowest reader of this one's.
template <class State>
struct Scratch {
  alignas(16) char bytes[2][32][sizeof(State)];
};

// Over the lanes of one row: groups of `lanes` <= 32 lanes, or the whole block of `lanes` threads.
// `turn` alternates from one call to the next. Every thread of the block must call it.
template <class State>
__device__ void reduce_row(State& state, int lanes, int turn, Scratch<State>& scratch) {
  const unsigned members = blockDim.x < 32 ? (1u << blockDim.x) - 1 : 0xffffffffu;
  if (lanes <= 32) return reduce_lanes(state, lanes, members);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  reduce_lanes(state, 32, members);
  char (*slots)[sizeof(State)] = scratch.bytes[turn & 1];
  if (lane == 0) memcpy(slots[warp], &state, sizeof state);
  __syncthreads();
  state = State();
  if (lane < static_cast<int>(blockDim.x) / 32) memcpy(&state, slots[lane], sizeof state);
  reduce_lanes(state, 32, members);
}

}  // namespace jaxsoftmax::cuda
