// The mathematics: row states and ops, for host and device. No op knows the path that runs it.
//
// A state sums over a row's elements and merges with other states of the row. A keyed state sums
// relative to a reference, about the largest element of input 0:
//   kKeyed, key()      what the states of a row are rescaled to: the largest of their keys
//   expect(key)        raise the reference before anything is summed
//   raise(key)         raise it, online, if it lies too far below `key` (rescales the sum)
//   align(key)         rescale to exactly this reference
//   add(other)         other has the same reference
//   Message, message() what aligned states exchange; a state is made from it
// An op (over a Numerics of numerics.h) is, with values[kInputs][K], K a power of two:
//   kInputs, pad(i)    inputs of an element each, and the value of input i that leaves a state be
//   kFolded            the first so many are folded; 0: no element needs to know the others
//   kGiven             inputs of one number a row: statistics, then a cotangent if kPulled
//   kMaps              the output has an element for each of the inputs'; else one a row
//   kStats             the rows' statistics can be had beside the output
//   fold(state, values)            adds values; a kKeeps op leaves in values[0] what map_kept takes
//   finish(state, given) -> Row    what the map needs, once a row
//   Mapped, map(values, row)       one element of the output from values[kInputs]: an Acc, or what
//                                  can be multiplied before it becomes one
//   kept_factor(state, row), map_kept(kept, factor)   the same from what a lane's fold left
//   result(state), stats(state)    a row's output (not kMaps), its statistics (kStats)
//   kScaledInput, kScalesOutput    what a scale multiplies: an input as it is read (-1: none), or
//                                  what the map gives
//   masked()                       what the output has where a mask leaves an element out (kMaps)
#pragma once

#include "numerics.h"

namespace jaxsoftmax {

// (m, s) with s = sum of e^(x - m). m is a reference at most 32 below the largest element, not that
// element itself: online, s is rescaled only when it would otherwise hold terms above e^32, so that
// at most one rounding of a rescaling matters (with every rise rescaled, 1e6 zeros followed by ten
// steps of 1.04 err by 8 ulp). The identity is (-inf, 0).
//
// kLog: for the logarithm of s, which near 0 is right only relative to the largest element itself.
// That one is kept apart, in `top`, until states are merged, or is m where a Numerics has no slack.
template <class N, bool kLog = false>
struct MaxSum {
  using Acc = typename N::Acc;
  using Sum = typename N::Sum;
  static constexpr bool kKeyed = true;
  static constexpr int kSlack = kLog ? N::kSlack : 32;
  static constexpr bool kApart = kLog && kSlack > 0;
  Acc m = -infinity<Acc>(), top = -infinity<Acc>();
  Sum s;

  struct Message {
    Acc m;
    typename Sum::Merged s;
  };
  JAXSOFTMAX_HD MaxSum() {}
  JAXSOFTMAX_HD explicit MaxSum(const Message& from) : m(from.m), top(from.m), s(from.s) {}
  JAXSOFTMAX_HD Message message() const { return {m, s.merged()}; }

  JAXSOFTMAX_HD Acc key() const { return kApart ? top : m; }
  JAXSOFTMAX_HD void expect(Acc key) { m = top = larger(m, key); }
  JAXSOFTMAX_HD void raise(Acc key) {
    if constexpr (kApart) top = larger(top, key);
    if (!(key <= m + kSlack)) rescale(larger(m, key));  // a NaN stays
  }
  JAXSOFTMAX_HD void align(Acc to) {
    rescale(to);
    top = to;
  }
  JAXSOFTMAX_HD void add(const MaxSum& other) { s.add(other.s); }

 private:
  // A state that has seen only -inf scales by 0, not by e^(-inf - -inf); a NaN in s stays.
  JAXSOFTMAX_HD void rescale(Acc to) {
    s.scale(m == -infinity<Acc>() ? Acc(0) : N::rescaling(m, to));
    m = to;
  }
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

// The rows' statistics: what a gradient needs of a row beside its elements.
template <class Acc>
struct Stats {
  Acc max, sum;  // sum of e^(x - max)
};

// Numbers of a row.
template <class Acc, int N>
struct Given {
  Acc at[N];
};
template <class Acc>
struct Given<Acc, 0> {};

// What the ops over one input x share: they sum e^(x - m).
template <class N, bool kLog>
struct SumOfExp {
  using Acc = typename N::Acc;
  using Mapped = Acc;
  using State = MaxSum<N, kLog>;
  static constexpr int kInputs = 1, kFolded = 1, kGiven = 0, kScaledInput = 0;
  static constexpr bool kScalesOutput = false;

  JAXSOFTMAX_HD static Acc pad(int) { return -infinity<Acc>(); }

  template <int K>
  JAXSOFTMAX_HD static void fold(State& state, Acc (&x)[1][K]) {
    const typename N::Reference from(state.m == -infinity<Acc>() ? Acc(0) : state.m);  // e^-inf: 0
#pragma unroll
    for (int j = 0; j < K; ++j) x[0][j] = N::term(x[0][j], from);
    N::add_terms(state.s, x[0]);
  }
};

// x -> e^(x - m) / s
template <class N>
struct Softmax : SumOfExp<N, false> {
  using Acc = typename N::Acc;
  using State = MaxSum<N>;
  static constexpr bool kMaps = true, kStats = false, kKeeps = true, kPulled = false;
  struct Row {
    Acc m;
    typename N::Reciprocal r;
  };

  JAXSOFTMAX_HD static Acc masked() { return Acc(0); }
  JAXSOFTMAX_HD static Row finish(const State& state, const Given<Acc, 0>&) {
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

// x -> (x - m) - log s
template <class N>
struct LogSoftmax : SumOfExp<N, true> {
  using Acc = typename N::Acc;
  using State = MaxSum<N, true>;
  static constexpr bool kMaps = true, kStats = true, kKeeps = false, kPulled = false;
  struct Row {
    Acc m, log;
  };

  JAXSOFTMAX_HD static Acc masked() { return -infinity<Acc>(); }
  JAXSOFTMAX_HD static Row finish(const State& state, const Given<Acc, 0>&) {
    return {state.m, N::log_total(state.s, state.m)};
  }
  JAXSOFTMAX_HD static Acc map(const Acc (&x)[1], const Row& row) {
    return (x[0] - row.m) - row.log;
  }
  JAXSOFTMAX_HD static Stats<Acc> stats(const State& state) {
    return {state.m, N::total(state.s, state.m)};
  }
};

// x -> m + log s, one a row. A row with +inf and no NaN gives +inf, though its s is NaN.
template <class N>
struct Logsumexp : SumOfExp<N, true> {
  using Acc = typename N::Acc;
  using State = MaxSum<N, true>;
  static constexpr bool kMaps = false, kStats = true, kKeeps = false, kPulled = false;

  JAXSOFTMAX_HD static bool infinite(const State& state) {
    return state.m == infinity<Acc>() || state.m == -infinity<Acc>();
  }
  JAXSOFTMAX_HD static Acc result(const State& state) {
    return infinite(state) ? state.m : state.m + N::log_total(state.s, state.m);
  }
  JAXSOFTMAX_HD static Stats<Acc> stats(const State& state) {
    return {state.m, infinite(state) ? Acc(1) : N::total(state.s, state.m)};
  }
};

// y, dy -> y * (dy - t), t = sum of y * dy
template <class N>
struct SoftmaxBwd {
  using Acc = typename N::Acc;
  using Mapped = typename N::Fine;
  using State = PlainSum<N>;
  static constexpr int kInputs = 2, kFolded = 2, kGiven = 0, kScaledInput = -1;
  static constexpr bool kMaps = true, kStats = false, kKeeps = false, kPulled = false;
  static constexpr bool kScalesOutput = true;
  struct Row {
    Mapped t;
  };

  JAXSOFTMAX_HD static Acc pad(int) { return Acc(0); }
  JAXSOFTMAX_HD static Acc masked() { return Acc(0); }

  template <int K>
  JAXSOFTMAX_HD static void fold(State& state, const Acc (&v)[2][K]) {
    N::add_products(state.s, v[0], v[1]);
  }
  JAXSOFTMAX_HD static Row finish(const State& state, const Given<Acc, 0>&) {
    return {N::whole(state.s)};
  }
  JAXSOFTMAX_HD static Mapped map(const Acc (&v)[2], const Row& row) {
    return v[0] * (v[1] - row.t);
  }
};

// e^(x - max) / sum * by for a row's x, with |by| / sum as one factor: a rounding less. What is not
// finite stays apart, so that 0 * inf is NaN.
template <class N>
struct Scaled {
  using Acc = typename N::Acc;
  using Sum = typename N::Sum;
  Acc m, a;
  typename N::Ratio r;
  JAXSOFTMAX_HD Scaled(Acc max, Acc sum, const Sum& by)
      : m(max), a(apart(static_cast<Acc>(by.total()))), r(N::ratio(a - a == 0 ? by : one(), sum)) {}
  JAXSOFTMAX_HD typename N::Fine operator()(Acc x) const { return N::exp_diff_over(x, m, r) * a; }

 private:
  JAXSOFTMAX_HD static Acc apart(Acc by) { return by - by != 0 ? by : by < 0 ? Acc(-1) : Acc(1); }
  JAXSOFTMAX_HD static Sum one() {
    Sum sum;
    sum.add(Acc(1));
    return sum;
  }
};

// dy, x, (max, sum) -> dy - e^(x - max) / sum * t, t = sum of dy
template <class N>
struct LogSoftmaxBwd {
  using Acc = typename N::Acc;
  using Mapped = typename N::Fine;
  using State = PlainSum<N>;
  using Row = Scaled<N>;
  static constexpr int kInputs = 2, kFolded = 1, kGiven = 2, kScaledInput = 1;
  static constexpr bool kMaps = true, kStats = false, kKeeps = false, kPulled = false;
  static constexpr bool kScalesOutput = true;

  JAXSOFTMAX_HD static Acc pad(int) { return Acc(0); }
  JAXSOFTMAX_HD static Acc masked() { return Acc(0); }

  template <int K>
  JAXSOFTMAX_HD static void fold(State& state, const Acc (&v)[2][K]) {
    N::add_terms(state.s, v[0]);
  }
  JAXSOFTMAX_HD static Row finish(const State& state, const Given<Acc, 2>& row) {
    return Row(row.at[0], row.at[1], state.s);
  }
  JAXSOFTMAX_HD static Mapped map(const Acc (&v)[2], const Row& row) { return v[0] - row(v[1]); }
};

// x, (max, sum, g) -> e^(x - max) / sum * g
template <class N>
struct LogsumexpBwd {
  using Acc = typename N::Acc;
  using Mapped = typename N::Fine;
  using State = PlainSum<N>;
  using Row = Scaled<N>;
  static constexpr int kInputs = 1, kFolded = 0, kGiven = 3, kScaledInput = 0;
  static constexpr bool kMaps = true, kStats = false, kKeeps = false, kPulled = true;
  static constexpr bool kScalesOutput = true;

  JAXSOFTMAX_HD static Acc pad(int) { return Acc(0); }
  JAXSOFTMAX_HD static Acc masked() { return Acc(0); }

  JAXSOFTMAX_HD static Row finish(const State&, const Given<Acc, 3>& row) {
    typename N::Sum g;
    g.add(row.at[2]);
    return Row(row.at[0], row.at[1], g);
  }
  JAXSOFTMAX_HD static Mapped map(const Acc (&x)[1], const Row& row) { return row(x[0]); }
};

}  // namespace jaxsoftmax
