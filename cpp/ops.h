// The mathematics: row states and ops, for host and device. No op knows the path that runs it.
//
// A state sums over a row's elements and merges with other states of the row. A keyed state sums
// relative to a reference, its key, about the largest element of input 0:
//   kKeyed, key()      the reference
//   expect(key)        raise it before anything is summed
//   raise(key)         raise it, online, if it lies too far below `key` (rescales the sum)
//   align(key)         rescale to exactly this reference
//   add(other)         other has the same key
//   Message, message() what states exchange; a state is made from it
// An op (over a Numerics of numerics.h) is, with values[kInputs][K], K a power of two:
//   kInputs, pad(i)    element inputs, and the value of input i that leaves a state as it is
//   fold(state, values)            adds values; a kKeeps op leaves in values[0] what map_kept takes
//   finish(state) -> Row           what the map needs, once a row
//   map(values, row)               one element of the output from values[kInputs]
//   kept_factor(state, row), map_kept(kept, factor)   the same from what a lane's fold left
#pragma once

#include "numerics.h"

namespace jaxsoftmax {

// (m, s) with s = sum of e^(x - m). m is a reference at most 32 below the largest element, not that
// element itself: online, s is rescaled only when it would otherwise hold terms above e^32, so that
// at most one rounding of a rescaling matters (with every rise rescaled, 1e6 zeros followed by ten
// steps of 1.04 err by 8 ulp). The identity is (-inf, 0).
template <class N>
struct MaxSum {
  using Acc = typename N::Acc;
  using Sum = typename N::Sum;
  static constexpr bool kKeyed = true;
  Acc m = -infinity<Acc>();
  Sum s;

  struct Message {
    Acc m;
    typename Sum::Merged s;
  };
  JAXSOFTMAX_HD MaxSum() {}
  JAXSOFTMAX_HD explicit MaxSum(const Message& from) : m(from.m), s(from.s) {}
  JAXSOFTMAX_HD Message message() const { return {m, s.merged()}; }

  JAXSOFTMAX_HD Acc key() const { return m; }
  JAXSOFTMAX_HD void expect(Acc key) { m = larger(m, key); }
  JAXSOFTMAX_HD void raise(Acc key) {
    if (key > m + 32) align(key);
  }
  // A state that has seen only -inf scales by 0, not by e^(-inf - -inf); a NaN in s stays.
  JAXSOFTMAX_HD void align(Acc to) {
    s.scale(m == -infinity<Acc>() ? Acc(0) : N::rescaling(m, to));
    m = to;
  }
  JAXSOFTMAX_HD void add(const MaxSum& other) { s.add(other.s); }
};

template <class N>
struct PlainSum {
  using Sum = typename N::Sum;
  static constexpr bool kKeyed = false;
  Sum s;

  using Message = typename Sum::Merged;
  JAXSOFTMAX_HD PlainSum() {}
  JAXSOFTMAX_HD explicit PlainSum(const Message& from) : s(from) {}
  JAXSOFTMAX_HD Message message() const { return s.merged(); }

  JAXSOFTMAX_HD void add(const PlainSum& other) { s.add(other.s); }
};

// Merges the states at(0) ... at(count - 1) of one row. Every state is rescaled once, straight to
// the common key: pairwise merging would round a slowly rising row's sum once a state.
template <class State, class At>
JAXSOFTMAX_HD State merge_states(int count, const At& at) {
  State merged;
  if constexpr (State::kKeyed) {
    auto key = merged.key();
    for (int i = 0; i < count; ++i) key = larger(key, at(i).key());
    merged.align(key);
    for (int i = 0; i < count; ++i) {
      State state = at(i);
      state.align(key);
      merged.add(state);
    }
  } else {
    for (int i = 0; i < count; ++i) merged.add(at(i));
  }
  return merged;
}

// x -> e^(x - m) / sum of e^(x - m)
template <class N>
struct Softmax {
  using Acc = typename N::Acc;
  using State = MaxSum<N>;
  static constexpr int kInputs = 1;
  static constexpr bool kKeeps = true;
  struct Row {
    Acc m;
    typename N::Reciprocal r;
  };

  JAXSOFTMAX_HD static Acc pad(int) { return -infinity<Acc>(); }

  template <int K>
  JAXSOFTMAX_HD static void fold(State& state, Acc (&x)[1][K]) {
    const typename N::Reference from(state.m == -infinity<Acc>() ? Acc(0) : state.m);  // e^-inf: 0
#pragma unroll
    for (int j = 0; j < K; ++j) x[0][j] = N::term(x[0][j], from);
    N::add_terms(state.s, x[0]);
  }
  JAXSOFTMAX_HD static Row finish(const State& state) {
    return {state.m, N::reciprocal(state.s, state.m)};
  }
  JAXSOFTMAX_HD static Acc map(const Acc (&x)[1], const Row& row) {
    return N::exp_diff_over(x[0], row.m, row.r);
  }
  JAXSOFTMAX_HD static auto kept_factor(const State& state, const Row& row) {
    return N::factor(state.m, row.m, row.r);
  }
  template <class Factor>
  JAXSOFTMAX_HD static Acc map_kept(Acc kept, const Factor& factor) {
    return N::times(kept, factor);
  }
};

// y, dy -> y * (dy - t), t = sum of y * dy
template <class N>
struct SoftmaxBwd {
  using Acc = typename N::Acc;
  using State = PlainSum<N>;
  static constexpr int kInputs = 2;
  static constexpr bool kKeeps = false;
  struct Row {
    Acc t;
  };

  JAXSOFTMAX_HD static Acc pad(int) { return Acc(0); }

  template <int K>
  JAXSOFTMAX_HD static void fold(State& state, const Acc (&v)[2][K]) {
    N::add_products(state.s, v[0], v[1]);
  }
  JAXSOFTMAX_HD static Row finish(const State& state) {
    return {static_cast<Acc>(state.s.total())};
  }
  JAXSOFTMAX_HD static Acc map(const Acc (&v)[2], const Row& row) { return v[0] * (v[1] - row.t); }
};

}  // namespace jaxsoftmax
