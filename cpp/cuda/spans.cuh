// Folds or maps a span of a row's packs straight from device memory: the loop that two_pass and
// split_k share.
#pragma once

#include "../ops.h"
#include "vec.cuh"

namespace jaxsoftmax::cuda {

// Packs of every input that a lane has in flight.
template <class Op>
inline constexpr int kInFlight = 4 / Op::kInputs;

// Blocks of kMaxThreads that the registers of a streaming kernel must leave room for on an SM.
template <class D>
inline constexpr int kStreamBlocks = sizeof(typename D::Numerics::Acc) == 8 ? 1 : 2;

// visit(pack, its index) for this lane's share of the packs [from, to), in either order.
template <class Op, class D, bool kBackwards, class Visit>
__device__ void stream(const Rows& rows, const Window<D>& window, std::int64_t from,
                       std::int64_t to, int lane, int lanes, const Visit& visit) {
  const std::int64_t count = to - from;
  const auto at = [&](std::int64_t i) { return kBackwards ? to - 1 - i : from + i; };
  for (std::int64_t i = lane; i < count; i += kInFlight<Op> * lanes) {
    Packs<Op, D> packs[kInFlight<Op>];
#pragma unroll
    for (int u = 0; u < kInFlight<Op>; ++u) {
      if (i + u * lanes < count) packs[u].load(rows, window, at(i + u * lanes));
    }
#pragma unroll
    for (int u = 0; u < kInFlight<Op>; ++u) {
      if (i + u * lanes < count) {
        packs[u].mask(window, at(i + u * lanes));
        visit(packs[u], at(i + u * lanes));
      }
    }
  }
}

template <class Op, class D>
__device__ void fold_span(const Rows& rows, const Window<D>& window, std::int64_t from,
                          std::int64_t to, int lane, int lanes, typename Op::State& state) {
  stream<Op, D, false>(
      rows, window, from, to, lane, lanes,
      [&](const Packs<Op, D>& packs, std::int64_t) { fold_packs<Op, D, 1>(state, {packs}); });
}

// Backwards: what the fold read last is what L2 still holds.
template <class Op, class D>
__device__ void map_span(const Rows& rows, const Window<D>& window, std::int64_t from,
                         std::int64_t to, int lane, int lanes, const typename Op::Row& row) {
  stream<Op, D, true>(
      rows, window, from, to, lane, lanes,
      [&](const Packs<Op, D>& packs, std::int64_t p) { packs.map(rows, window, p, row); });
}

}  // namespace jaxsoftmax::cuda
