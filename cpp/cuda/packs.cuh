// A pack of each of an op's inputs: loaded, folded, mapped, stored; plain rows as they lie, others
// through their Loading (loaded.cuh).
#pragma once

#include "../ops.h"
#include "loaded.cuh"
#include "vec.cuh"

namespace jaxsoftmax::cuda {

template <class D, class Index = std::int64_t, bool kWhole = false, bool kEvery = false>
using WindowOf =
    std::conditional_t<D::kLoaded, LoadedWindow<D, Index, kWhole, kEvery>, Window<D, Index>>;

template <class Op, class D>
struct Packs {
  using Acc = typename D::Numerics::Acc;
  using Convert = cuda::Convert<typename D::Base>;
  static constexpr int kN = kPerPack<D>;
  using Values = Acc[Op::kInputs][kN];
  Pack raw[Op::kInputs];
  Counts<D> counts;  // of loaded rows

  template <class Window, class Index>
  __device__ void load(const RowsOf<D>& rows, const Window& window, Index p) {
    if constexpr (D::kLoaded) {
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) raw[i] = window.load(rows.in[i], p, i);
      counts.load(window, p);
    } else {
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) raw[i] = window.load(rows.in[i], p);
    }
  }
  // A pack that is not read.
  __device__ void skip() {
    if constexpr (D::kLoaded) counts.word = 0;
  }
  // What does not count becomes a pad: at once, or, where there is a mask, as it is unpacked.
  template <class Window, class Index>
  __device__ void mask(const Window& window, Index p) {
    if constexpr (D::kLoaded) {
      if (!window.every()) counts.decide(window, p);
    } else {
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) window.mask(raw[i], p, D::from_acc(Op::pad(i)));
    }
  }

  template <class Window>
  __device__ void unpack(const Window& window, int i, Acc (&values)[kN]) const {
    if constexpr (D::kLoaded) {
      window.unpack(raw[i], i, values);
      if (i == Op::kScaledInput) {
#pragma unroll
        for (int j = 0; j < kN; ++j) values[j] *= window.scale();
      }
      if (!window.every() && !counts.all()) {
#pragma unroll
        for (int j = 0; j < kN; ++j) values[j] = counts.has(j) ? values[j] : Op::pad(i);
      }
    } else {
      Convert::unpack(raw[i], values);
    }
  }
  template <class Window>
  __device__ void unpack(const Window& window, Values& values) const {
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) unpack(window, i, values[i]);
  }
  template <class Window>
  __device__ Acc largest(const Window& window) const {
    if constexpr (D::kLoaded) {
      Acc values[kN];
      unpack(window, 0, values);
      return tree(values, larger<Acc>);
    } else {
      return Convert::largest(raw[0]);
    }
  }

  template <bool kWhole = false, class Window, class Index>
  __device__ void store(const RowsOf<D>& rows, const Window& window, Index p, Acc (&mapped)[kN],
                        bool passing = false) const {
    if constexpr (D::kLoaded) {
      if (!window.every() && !counts.all()) {
#pragma unroll
        for (int j = 0; j < kN; ++j) mapped[j] = counts.has(j) ? mapped[j] : Op::masked();
      }
      window.store(rows.out, p, mapped);
    } else {
      window.template store<kWhole>(rows.out, p, Convert::pack(mapped), passing);
    }
  }
  template <bool kWhole = false, class Window, class Index, class Row>
  __device__ void map(const RowsOf<D>& rows, const Window& window, Index p, const Row& row,
                      bool passing = false) const {
    Values values;
    unpack(window, values);
    typename Op::Mapped mapped[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      Acc v[Op::kInputs];
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) v[i] = values[i][j];
      mapped[j] = Op::map(v, row);
    }
    if constexpr (D::kLoaded && Op::kScalesOutput) {
#pragma unroll
      for (int j = 0; j < kN; ++j) mapped[j] = mapped[j] * window.scale();
    }
    if constexpr (std::is_same_v<typename Op::Mapped, Acc>) {
      store<kWhole>(rows, window, p, mapped, passing);
    } else {
      Acc rounded[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) rounded[j] = static_cast<Acc>(mapped[j]);
      store<kWhole>(rows, window, p, rounded, passing);
    }
  }
};

// Folds `count` packs of a lane online, of which `together` share an addition to the state.
template <class Op, class D, int count, int together = count, class Window>
__device__ void fold_packs(typename Op::State& state, const Window& window,
                           const Packs<Op, D> (&packs)[count]) {
  constexpr int kN = kPerPack<D>;
  using Acc = typename D::Numerics::Acc;
  if constexpr (Op::State::kKeyed) {
    Acc key = packs[0].largest(window);
#pragma unroll
    for (int u = 1; u < count; ++u) key = larger(key, packs[u].largest(window));
    state.raise(key);
  }
#pragma unroll
  for (int from = 0; from < count; from += together) {
    Acc values[Op::kInputs][together * kN];
#pragma unroll
    for (int u = 0; u < together; ++u) {
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) {
        packs[from + u].unpack(window, i, *reinterpret_cast<Acc(*)[kN]>(&values[i][u * kN]));
      }
    }
    Op::fold(state, values);
  }
}

}  // namespace jaxsoftmax::cuda
