// The three paths on the CPU, over any op, dtype and loader.
//
//   one_pass  a row is copied into scratch memory of the plan's capacity while it is folded
//   two_pass  a row is folded, then read again and mapped
//   split_k   a row's pieces are folded into the workspace, then each merges them and maps itself
//
// An op that only folds or only maps reads what it needs once in each.
//
// A loader gives `count` elements of input `i` from element `at` on (an offset in the whole array):
// copy(i, at, count, to). It is the only reader of the inputs, so a loader that counts sees all.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "../dtypes.h"
#include "../ops.h"
#include "parallel.h"

namespace jaxsoftmax::cpu {

template <class D>
struct PlainLoader {
  using Storage = typename D::Storage;
  const Rows& rows;
  void copy(int i, std::int64_t at, int count, Storage* to) const {
    std::memcpy(to, static_cast<const Storage*>(rows.in[i]) + at, count * sizeof(Storage));
  }
};

inline constexpr int kBatch = 64;  // elements folded at once: a few registers of any vector width

// The loops over a row, compiled for several instruction sets, the best of which the loader picks:
// float32 forward takes 1.6 instead of 3.8 ns an element with AVX-512. flatten inlines what they
// call, so that it is compiled for the same set. Nothing in them may throw: GCC takes calls of a
// function with clones for calls that cannot.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define JAXSOFTMAX_CLONES \
  __attribute__((flatten, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JAXSOFTMAX_CLONES
#endif

template <class Op, class D>
struct Chunk {
  using Acc = typename D::Numerics::Acc;
  using Storage = typename D::Storage;
  alignas(64) Storage raw[Op::kInputs][kBatch];
  alignas(64) Acc values[Op::kInputs][kBatch];

  // Converts `count` raw elements of the first inputs and pads the rest.
  void unpack(int inputs, int count) {
    for (int i = 0; i < inputs; ++i) {
      for (int j = 0; j < kBatch; ++j) values[i][j] = D::to_acc(raw[i][j]);
      for (int j = count; j < kBatch; ++j) values[i][j] = Op::pad(i);
    }
  }
  template <class Row>
  void map(const Row& row, int count, Storage* out) const {
    alignas(64) Storage mapped[kBatch];
    for (int j = 0; j < kBatch; ++j) {
      Acc v[Op::kInputs];
      for (int i = 0; i < Op::kInputs; ++i) v[i] = values[i][j];
      mapped[j] = D::from_acc(Op::map(v, row));
    }
    std::memcpy(out, mapped, count * sizeof(Storage));
  }
};

template <class Op, class D, class Loader>
class Paths {
  using State = typename Op::State;
  using Storage = typename D::Storage;
  static_assert(sizeof(State) <= kStateBytes);

 public:
  Paths(const Rows& rows, const Plan& plan, const Loader& loader, xla::ffi::ThreadPool* pool)
      : rows_(rows), plan_(plan), loader_(loader), pool_(pool) {}

  void run() const {
    switch (plan_.path) {
      case Path::one_pass:
        return each(rows_.rows, [this](std::int64_t row) { one_pass(row, scratch()); });
      case Path::two_pass:
        return each(rows_.rows, [this](std::int64_t row) {
          State state;
          fold(row, 0, rows_.cols, state);
          finish(row, complete(state), 0, rows_.cols);
        });
      case Path::split_k:
        return split_k();
    }
  }

 private:
  template <class Fn>
  void each(std::int64_t items, const Fn& fn) const {
    parallel_for(pool_, items, rows_.rows * rows_.cols * static_cast<int>(sizeof(Storage)), fn);
  }

  // visit(offset in the row, elements) over the columns [from, to), a chunk at a time.
  template <class Visit>
  static void chunks(std::int64_t from, std::int64_t to, const Visit& visit) {
    for (std::int64_t at = from; at < to; at += kBatch) {
      visit(at, static_cast<int>(std::min<std::int64_t>(kBatch, to - at)));
    }
  }

  void load(int inputs, std::int64_t row, std::int64_t at, int count, Chunk<Op, D>& chunk) const {
    for (int i = 0; i < inputs; ++i) {
      loader_.copy(i, row * rows_.cols + at, count, chunk.raw[i]);
    }
    chunk.unpack(inputs, count);
  }

  static void fold_chunk(State& state, Chunk<Op, D>& chunk) {
    if constexpr (State::kKeyed)
      state.raise(tree(chunk.values[0], larger<typename Chunk<Op, D>::Acc>));
    Op::fold(state, chunk.values);
  }

  // What an op is given of a row.
  auto given(std::int64_t row) const {
    Given<typename Op::Acc, Op::kGiven> numbers{};
    if constexpr (Op::kGiven > 0) {
      for (int i = 0; i < Op::kGiven; ++i) {
        const bool pulled = Op::kPulled && i == Op::kGiven - 1;
        numbers.at[i] = pulled ? D::to_acc(static_cast<const Storage*>(rows_.given[i])[row])
                               : static_cast<const typename Op::Acc*>(rows_.given[i])[row];
      }
    }
    return numbers;
  }

  // What a row leaves beside its elements.
  void leave(std::int64_t row, const State& state) const {
    if constexpr (!Op::kMaps)
      static_cast<Storage*>(rows_.out)[row] = D::from_acc(Op::result(state));
    if constexpr (Op::kStats) {
      if (rows_.stats[0] == nullptr) return;
      const auto stats = Op::stats(state);
      static_cast<typename Op::Acc*>(rows_.stats[0])[row] = stats.max;
      static_cast<typename Op::Acc*>(rows_.stats[1])[row] = stats.sum;
    }
  }

  // The state of a whole row, aligned to its key.
  static State complete(const State& state) {
    return merge_states<State>(1, [&](int) { return state; });
  }

  // Maps the columns [from, to) of a row; who has its first columns leaves its numbers.
  void finish(std::int64_t row, const State& state, std::int64_t from, std::int64_t to) const {
    if (from == 0) leave(row, state);
    if constexpr (Op::kMaps) map(row, from, to, Op::finish(state, given(row)));
  }

  Storage* out(std::int64_t row, std::int64_t at) const {
    return static_cast<Storage*>(rows_.out) + row * rows_.cols + at;
  }

  JAXSOFTMAX_CLONES void fold(std::int64_t row, std::int64_t from, std::int64_t to,
                              State& state) const {
    if constexpr (Op::kFolded > 0) {
      Chunk<Op, D> chunk{};
      chunks(from, to, [&](std::int64_t at, int count) {
        load(Op::kFolded, row, at, count, chunk);
        fold_chunk(state, chunk);
      });
    }
  }

  template <class Row>
  JAXSOFTMAX_CLONES void map(std::int64_t row, std::int64_t from, std::int64_t to,
                             const Row& finished) const {
    Chunk<Op, D> chunk{};
    chunks(from, to, [&](std::int64_t at, int count) {
      load(Op::kInputs, row, at, count, chunk);
      chunk.map(finished, count, out(row, at));
    });
  }

  // The scratch holds what the plan says, not what the row needs: the plan is checked to hold it.
  std::int64_t capacity() const {
    return static_cast<std::int64_t>(plan_.lanes()) * (plan_.reg_packs + plan_.smem_packs) *
           kPackBytes;
  }

  // This thread's scratch; it may throw, and so is not part of a cloned function.
  std::byte* scratch() const {
    static thread_local std::unique_ptr<std::byte[]> memory;
    static thread_local std::int64_t held = 0;
    if (held < capacity()) {
      memory.reset();
      held = 0;
      memory.reset(new std::byte[capacity()]);
      held = capacity();
    }
    return memory.get();
  }

  JAXSOFTMAX_CLONES void one_pass(std::int64_t row, std::byte* memory) const {
    const std::int64_t stride = capacity() / Op::kInputs;
    const auto kept = [&](int i, std::int64_t at) {
      return memory + i * stride + at * static_cast<int>(sizeof(Storage));
    };
    Chunk<Op, D> chunk{};
    State state;
    chunks(0, rows_.cols, [&](std::int64_t at, int count) {
      load(Op::kInputs, row, at, count, chunk);
      for (int i = 0; i < Op::kInputs; ++i) {
        std::memcpy(kept(i, at), chunk.raw[i], count * sizeof(Storage));
      }
      if constexpr (Op::kFolded > 0) fold_chunk(state, chunk);
    });
    state = complete(state);
    leave(row, state);
    if constexpr (Op::kMaps) {
      const auto finished = Op::finish(state, given(row));
      chunks(0, rows_.cols, [&](std::int64_t at, int count) {
        for (int i = 0; i < Op::kInputs; ++i) {
          std::memcpy(chunk.raw[i], kept(i, at), count * sizeof(Storage));
        }
        chunk.unpack(Op::kInputs, count);
        chunk.map(finished, count, out(row, at));
      });
    }
  }

  void split_k() const {
    const std::int64_t splits = plan_.splits, piece = pieces(rows_.cols, splits);
    const auto slot = [&](std::int64_t row, std::int64_t split) {
      return rows_.workspace + (row * splits + split) * kStateBytes;
    };
    const auto span = [&](std::int64_t split) {
      return std::pair(std::min(split * piece, rows_.cols),
                       std::min((split + 1) * piece, rows_.cols));
    };
    if constexpr (Op::kFolded > 0) {
      each(rows_.rows * splits, [&](std::int64_t item) {
        const auto [from, to] = span(item % splits);
        State state;
        fold(item / splits, from, to, state);
        std::memcpy(slot(item / splits, item % splits), &state, sizeof state);
      });
    }
    const std::int64_t parts = Op::kMaps ? splits : 1;
    each(rows_.rows * parts, [&](std::int64_t item) {
      const std::int64_t row = item / parts;
      State state;
      if constexpr (Op::kFolded > 0) {
        state = merge_states<State>(plan_.splits, [&](int split) {
          State other;
          std::memcpy(&other, slot(row, split), sizeof other);
          return other;
        });
      }
      const auto [from, to] = span(item % parts);
      finish(row, state, from, to);
    });
  }

  const Rows& rows_;
  const Plan& plan_;
  const Loader& loader_;
  xla::ffi::ThreadPool* pool_;
};

}  // namespace jaxsoftmax::cpu
