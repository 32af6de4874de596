// Folds or maps a span of a row's packs straight from device memory: the loop that two_pass and
// split_k share.
#pragma once

#include "../ops.h"
#include "vec.cuh"

namespace jaxsoftmax::cuda {

// Packs of every input that a lane has in flight.
inline constexpr int kInFlight = 4;

// visit(pack, its index) for the packs from + lane, from + lane + lanes, ... below `to`.
template <class Op, class D, class Visit>
__device__ void stream(const Rows& rows, const Window<D>& window, std::int64_t from,
                       std::int64_t to, int lane, int lanes, const Visit& visit) {
  for (std::int64_t p = from + lane; p < to; p += kInFlight * lanes) {
    Packs<Op, D> packs[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (p + u * lanes < to) packs[u].load(rows, window, p + u * lanes);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (p + u * lanes < to) visit(packs[u], p + u * lanes);
    }
  }
}

template <class Op, class D>
__device__ void fold_span(const Rows& rows, const Window<D>& window, std::int64_t from,
                          std::int64_t to, int lane, int lanes, typename Op::State& state) {
  stream<Op>(rows, window, from, to, lane, lanes, [&](const Packs<Op, D>& packs, std::int64_t) {
    typename Packs<Op, D>::Values values;
    packs.unpack(values);
    fold_online<Op>(state, values);
  });
}

template <class Op, class D>
__device__ void map_span(const Rows& rows, const Window<D>& window, std::int64_t from,
                         std::int64_t to, int lane, int lanes, const typename Op::Row& row) {
  stream<Op>(rows, window, from, to, lane, lanes,
             [&](const Packs<Op, D>& packs, std::int64_t p) { packs.map(rows, window, p, row); });
}

}  // namespace jaxsoftmax::cuda
