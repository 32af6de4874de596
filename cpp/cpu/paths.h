// The three paths on the CPU, over any op, dtype and loader.
//
//   one_pass  a row is copied into scratch memory of the plan's capacity while it is folded
//   two_pass  a row is folded, then read again and mapped
//   split_k   a row's pieces are folded into the workspace, then each merges them and maps itself
//
// An op that only folds or only maps reads what it needs once in each.
//
// What a row's elements are, and which of them count, is the loader's (loaders.h).
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "chunk.h"
#include "parallel.h"

namespace jaxsoftmax::cpu {

template <class Op, class D, class Loader>
class Paths {
  using State = typename Op::State;
  using Storage = typename D::Storage;
  using Lines = decltype(std::declval<const Loader&>().lines(0));
  using Batch = Chunk<Op, D, Lines>;
  static_assert(sizeof(State) <= kStateBytes);
  struct States {
    State of[Lines::kRows];
  };

 public:
  Paths(const Rows& rows, const Plan& plan, const Loader& loader, xla::ffi::ThreadPool* pool)
      : rows_(rows), plan_(plan), loader_(loader), pool_(pool) {}

  void run() const {
    switch (plan_.path) {
      case Path::one_pass:
        return each(1, [this](const Lines& lines, int) { one_pass(lines, scratch()); });
      case Path::two_pass:
        return each(1, [this](const Lines& lines, int) {
          States states;
          fold(lines, 0, rows_.cols, states);
          for (int g = 0; g < lines.count; ++g) states.of[g] = complete(states.of[g]);
          finish(lines, states, 0, rows_.cols);
        });
      case Path::split_k:
        return split_k();
    }
  }

 private:
  // fn(lines, part) for each part of each group of rows.
  template <class Fn>
  void each(std::int64_t parts, const Fn& fn) const {
    parallel_for(pool_, loader_.size() * parts,
                 rows_.rows * rows_.cols * static_cast<int>(sizeof(Storage)),
                 [&](std::int64_t item) {
                   fn(loader_.lines(item / parts), static_cast<int>(item % parts));
                 });
  }

  // visit(offset in the row, elements) over the columns [from, to), a chunk at a time.
  template <class Visit>
  static void chunks(std::int64_t from, std::int64_t to, const Visit& visit) {
    for (std::int64_t at = from; at < to; at += kBatch) {
      visit(at, static_cast<int>(std::min<std::int64_t>(kBatch, to - at)));
    }
  }

  // The map of a row, from what an op is given of it.
  auto finished(const Lines& lines, std::int64_t row, const State& state) const {
    Given<typename Op::Acc, Op::kGiven> given{};
    if constexpr (Op::kGiven > 0) {
      for (int i = 0; i < Op::kGiven; ++i) {
        const bool pulled = Op::kPulled && i == Op::kGiven - 1;
        given.at[i] = pulled ? lines.pulled(i, row)
                             : static_cast<const typename Op::Acc*>(rows_.given[i])[row];
      }
    }
    return Op::finish(state, given);
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

  // Maps the columns [from, to) of rows; who has their first columns leaves their numbers.
  void finish(const Lines& lines, const States& states, std::int64_t from, std::int64_t to) const {
    if (from == 0) {
      for (int g = 0; g < lines.count; ++g) leave(lines.first + g, states.of[g]);
    }
    if constexpr (Op::kMaps) map(lines, states, from, to);
  }

  JAXSOFTMAX_CLONES void fold(const Lines& lines, std::int64_t from, std::int64_t to,
                              States& states) const {
    if constexpr (Op::kFolded > 0) {
      Batch chunk;
      chunks(from, std::min(to, lines.end), [&](std::int64_t at, int n) {
        chunk.load(lines, Op::kFolded, at, n);
        for (int g = 0; g < lines.count; ++g) {
          chunk.unpack(lines, g, Op::kFolded, at, n);
          chunk.fold(states.of[g]);
        }
      });
    }
  }

  JAXSOFTMAX_CLONES void map(const Lines& lines, const States& states, std::int64_t from,
                             std::int64_t to) const {
    Batch chunk;
    map(lines, states, from, to, chunk,
        [&](std::int64_t at, int n) { chunk.load(lines, Op::kInputs, at, n); });
  }

  // The same, with load(at, n) to fill the chunk.
  template <class Load>
  void map(const Lines& lines, const States& states, std::int64_t from, std::int64_t to,
           Batch& chunk, const Load& load) const {
    std::optional<typename Op::Row> rows[Lines::kRows];
    for (int g = 0; g < lines.count; ++g) {
      rows[g].emplace(finished(lines, lines.first + g, states.of[g]));
    }
    chunks(from, std::min(to, lines.end), [&](std::int64_t at, int n) {
      load(at, n);
      for (int g = 0; g < lines.count; ++g) {
        chunk.unpack(lines, g, Op::kInputs, at, n);
        chunk.map(lines, g, *rows[g]);
      }
      chunk.store(lines, at, n);
    });
    if (lines.end >= to) return;
    chunk.leave_out(lines);
    chunks(std::max(from, lines.end), to,
           [&](std::int64_t at, int n) { chunk.store(lines, at, n); });
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
    const std::int64_t needed = capacity() * Lines::kRows;
    if (held < needed) {
      memory.reset();
      held = 0;
      memory.reset(new std::byte[needed]);
      held = needed;
    }
    return memory.get();
  }

  JAXSOFTMAX_CLONES void one_pass(const Lines& lines, std::byte* memory) const {
    const std::int64_t stride = capacity() / Op::kInputs;
    const auto kept = [&](int g, int i, std::int64_t at) {
      return memory + (g * Op::kInputs + i) * stride + at * static_cast<int>(sizeof(Storage));
    };
    Batch chunk;
    States states;
    chunks(0, lines.end, [&](std::int64_t at, int n) {
      chunk.load(lines, Op::kInputs, at, n);
      for (int g = 0; g < lines.count; ++g) {
        for (int i = 0; i < Op::kInputs; ++i) copy<Storage>(kept(g, i, at), chunk.raw[g][i], n);
      }
      if constexpr (Op::kFolded > 0) {
        for (int g = 0; g < lines.count; ++g) {
          chunk.unpack(lines, g, Op::kFolded, at, n);
          chunk.fold(states.of[g]);
        }
      }
    });
    for (int g = 0; g < lines.count; ++g) {
      states.of[g] = complete(states.of[g]);
      leave(lines.first + g, states.of[g]);
    }
    if constexpr (Op::kMaps) {
      map(lines, states, 0, rows_.cols, chunk, [&](std::int64_t at, int n) {
        for (int g = 0; g < lines.count; ++g) {
          for (int i = 0; i < Op::kInputs; ++i) copy<Storage>(chunk.raw[g][i], kept(g, i, at), n);
        }
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
      each(splits, [&](const Lines& lines, int split) {
        const auto [from, to] = span(split);
        States states;
        fold(lines, from, to, states);
        for (int g = 0; g < lines.count; ++g) {
          std::memcpy(slot(lines.first + g, split), &states.of[g], sizeof(State));
        }
      });
    }
    each(Op::kMaps ? splits : 1, [&](const Lines& lines, int part) {
      States states;
      if constexpr (Op::kFolded > 0) {
        for (int g = 0; g < lines.count; ++g) {
          states.of[g] = merge_states<State>(plan_.splits, [&](int split) {
            State other;
            std::memcpy(&other, slot(lines.first + g, split), sizeof other);
            return other;
          });
        }
      }
      const auto [from, to] = span(part);
      finish(lines, states, from, to);
    });
  }

  const Rows& rows_;
  const Plan& plan_;
  const Loader& loader_;
  xla::ffi::ThreadPool* pool_;
};

template <class Op, class D, class Loader>
void run_paths(const Rows& rows, const Plan& plan, const Loader& loader,
               xla::ffi::ThreadPool* pool) {
  Paths<Op, D, Loader>(rows, plan, loader, pool).run();
}

}  // namespace jaxsoftmax::cpu
