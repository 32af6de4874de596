// A batch of columns of some rows on the CPU, between their lines (loaders.h) and an op.
#pragma once

#include <cstdint>

#include "../ops.h"
#include "loaders.h"

namespace jaxsoftmax::cpu {

template <class Op, class D, class Lines>
struct Chunk {
  using Acc = typename D::Numerics::Acc;
  using Storage = typename D::Storage;
  alignas(64) Storage raw[Lines::kRows][Op::kInputs][kBatch] = {};
  alignas(64) Storage mapped[Lines::kRows][kBatch];
  alignas(64) Acc values[Op::kInputs][kBatch];  // of one row
  alignas(64) std::uint8_t kept[kBatch];        // of one row, if that is loaded

  void load(const Lines& lines, int inputs, std::int64_t at, int n) {
    for (int i = 0; i < inputs; ++i) lines.load(i, at, n, raw[0][i], Op::kInputs * kBatch);
  }

  // Converts `n` raw elements of the first inputs of the g-th row; pads the rest, and what is
  // masked.
  void unpack(const Lines& lines, int g, int inputs, std::int64_t at, int n) {
    if constexpr (Lines::kLoaded) lines.keep(g, at, n, kept);
    for (int i = 0; i < inputs; ++i) {
      for (int j = 0; j < kBatch; ++j) values[i][j] = D::to_acc(raw[g][i][j]);
      if constexpr (Lines::kLoaded) {
        const Acc scale = i == Op::kScaledInput ? lines.scale : Acc(1);
        for (int j = 0; j < kBatch; ++j) {
          values[i][j] = kept[j] ? values[i][j] * scale : Op::pad(i);
        }
      } else {
        for (int j = n; j < kBatch; ++j) values[i][j] = Op::pad(i);
      }
    }
  }

  template <class State>
  void fold(State& state) {
    if constexpr (State::kKeyed) state.raise(tree(values[0], larger<Acc>));
    Op::fold(state, values);
  }

  template <class Row>
  void map(const Lines& lines, int g, const Row& row) {
    for (int j = 0; j < kBatch; ++j) {
      Acc v[Op::kInputs];
      for (int i = 0; i < Op::kInputs; ++i) v[i] = values[i][j];
      typename Op::Mapped fine = Op::map(v, row);
      if constexpr (Lines::kLoaded && Op::kScalesOutput) fine = fine * lines.scale;
      Acc out = static_cast<Acc>(fine);
      if constexpr (Lines::kLoaded) out = kept[j] ? out : Op::masked();
      mapped[g][j] = D::from_acc(out);
    }
  }
  // The map of elements none of which counts.
  void leave_out(const Lines& lines) {
    for (int g = 0; g < lines.count; ++g) {
      for (int j = 0; j < kBatch; ++j) mapped[g][j] = D::from_acc(Op::masked());
    }
  }
  void store(const Lines& lines, std::int64_t at, int n) const { lines.store(at, n, mapped[0]); }
};

}  // namespace jaxsoftmax::cpu
