// How the CPU reads and writes rows: some neighbours at once, where their elements lie closer than
// those of a row. A loader has size() groups of them; lines(k) is a group:
//
//   first, count                 its rows, at most kRows
//   load(i, at, n, to, pitch)    n elements of input i of each row from column `at` on, as D stores
//                                them, rows `pitch` elements apart
//   store(at, n, from)           as many of the output, rows kBatch elements apart
//   pulled(i, row)               a row's number in given[i], of the inputs' dtype
//   end                          the columns from here on are masked: nobody reads them
// and those that are kLoaded
//   keep(g, at, n, to)           which elements of the g-th row count (0 or 1); 0 up to kBatch
//   scale                        1 without one
//
// Lines are the only readers of the inputs, so a loader that counts sees all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../dtypes.h"
#include "../plan.h"

namespace jaxsoftmax::cpu {

inline constexpr int kBatch = 64;  // elements folded at once: a few registers of any vector width

// The loops over a row, compiled for several instruction sets, the best of which the loader picks:
// float32 forward takes 1.6 instead of 3.8 ns an element with AVX-512. flatten inlines what they
// call, so that it is compiled for the same set; what many of them call has clones of its own
// (SHARED). Nothing in them may throw: GCC takes calls of a function with clones for calls that
// cannot.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define JAXSOFTMAX_CLONES \
  __attribute__((flatten, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define JAXSOFTMAX_SHARED __attribute__((noinline)) JAXSOFTMAX_CLONES
#else
#define JAXSOFTMAX_CLONES
#define JAXSOFTMAX_SHARED
#endif

// memcpy of up to kBatch elements. A size the compiler knows is a few moves of registers; for
// others it sets up string instructions, at what the arithmetic of dozens of elements takes.
template <class T>
void copy(void* to, const void* from, int n) {
  n == kBatch ? std::memcpy(to, from, kBatch * sizeof(T)) : std::memcpy(to, from, n * sizeof(T));
}

// A row of those that lie side by side, all of whose elements count.
template <class D>
struct PlainLines {
  using Storage = typename D::Storage;
  static constexpr bool kLoaded = false;
  static constexpr int kRows = 1, count = 1;
  const Rows& rows;
  std::int64_t first, end;

  PlainLines(const Rows& rows, std::int64_t row) : rows(rows), first(row), end(rows.cols) {}
  void load(int i, std::int64_t at, int n, Storage* to, int) const {
    copy<Storage>(to, static_cast<const Storage*>(rows.in[i]) + first * rows.cols + at, n);
  }
  void store(std::int64_t at, int n, const Storage* from) const {
    copy<Storage>(static_cast<Storage*>(rows.out) + first * rows.cols + at, from, n);
  }
  auto pulled(int i, std::int64_t row) const {
    return D::to_acc(static_cast<const Storage*>(rows.given[i])[row]);
  }
};

template <class D>
struct PlainLoader {
  const Rows& rows;
  std::int64_t size() const { return rows.rows; }
  PlainLines<D> lines(std::int64_t k) const { return {rows, k}; }
};

// visit(first, length, offset, step) over `n` indices from `at` on: as few runs as there are whose
// places in memory are `step` apart.
template <class Visit>
void runs(const Strides& strides, std::int64_t at, int n, const Visit& visit) {
  const int last = strides.dims - 1;
  const std::int64_t step = last < 0 ? 0 : strides.stride[last];
  if (last < 1) return visit(0, n, at * step, step);
  for (int j = 0; j < n;) {
    const std::int64_t size = strides.size[last].by, left = size - (at + j) % size;
    const int length = static_cast<int>(std::min<std::int64_t>(n - j, left));
    visit(j, length, strides.offset(at + j), step);
    j += length;
  }
}

// Rows of any Loading; neighbours are those of one outer index. D is the dtype of the call:
// elements of another one become floats.
template <class D>
class LoadedLines {
  using Storage = typename D::Storage;
  using Acc = typename D::Numerics::Acc;

 public:
  static constexpr bool kLoaded = true;
  static constexpr int kRows = 16;  // a line of the cache, of float32
  static std::int64_t groups(const Loading& loading) { return pieces(loading.inner, kRows); }

  LoadedLines(const LoadedRows& rows, std::int64_t k) : end(rows.cols), rows_(rows) {
    const std::int64_t outer = k / groups(loading_);
    inner_ = k % groups(loading_) * kRows;
    first = outer * loading_.inner + inner_;
    count = static_cast<int>(std::min<std::int64_t>(kRows, loading_.inner - inner_));
    x_ = loading_.x_outer.offset(outer) + inner_;
    if (loading_.mask) mask_ = loading_.mask + loading_.mask_outer.offset(outer);
    if (loading_.causal) end = std::min(end, first % loading_.queries.by + 1);
    if (loading_.scale) {
      scale = static_cast<const Acc*>(loading_.scale)[loading_.scale_outer.offset(outer)];
    }
  }

  JAXSOFTMAX_SHARED void load(int i, std::int64_t at, int n, Storage* to, int pitch) const {
    runs(loading_.x_cols, at, n, [&](int j, int length, std::int64_t offset, std::int64_t step) {
      as(loading_.in[i], [&](auto from) {
        read<decltype(from)>(rows_.in[i], x_ + offset, step, length, to + j, pitch);
      });
    });
  }
  JAXSOFTMAX_SHARED void store(std::int64_t at, int n, const Storage* from) const {
    runs(loading_.x_cols, at, n, [&](int j, int length, std::int64_t offset, std::int64_t step) {
      as(loading_.out,
         [&](auto to) { write<decltype(to)>(from + j, length, rows_.out, x_ + offset, step); });
    });
  }
  Acc pulled(int i, std::int64_t row) const {
    Acc number{};
    as(loading_.in[0], [&](auto from) {
      using From = decltype(from);
      number = From::to_acc(static_cast<const typename From::Storage*>(rows_.given[i])[row]);
    });
    return number;
  }
  JAXSOFTMAX_SHARED void keep(int g, std::int64_t at, int n, std::uint8_t (&to)[kBatch]) const {
    std::memset(to, 1, kBatch);
    for (int j = n; j < kBatch; ++j) to[j] = 0;
    if (!mask_) return;
    const std::uint8_t* mask = mask_ + loading_.mask_inner.offset(inner_ + g);
    runs(loading_.mask_cols, at, n, [&](int j, int length, std::int64_t offset, std::int64_t step) {
      if (step == 1) {
        copy<std::uint8_t>(to + j, mask + offset, length);
      } else {
        for (int k = 0; k < length; ++k) to[j + k] = mask[offset + k * step];
      }
    });
  }

  std::int64_t first, end;
  int count;
  Acc scale = 1;

 private:
  // fn(a dtype's struct). Only float32 calls have others than their own.
  template <class Fn>
  static void as(DType dtype, const Fn& fn) {
    if constexpr (std::is_same_v<D, F32>) {
      if (dtype == DType::F16) return fn(F16{});
      if (dtype == DType::BF16) return fn(BF16{});
    }
    fn(D{});
  }
  template <class From>
  void read(const void* memory, std::int64_t at, std::int64_t step, int n, Storage* to,
            int pitch) const {
    const auto* from = static_cast<const typename From::Storage*>(memory) + at;
    const auto each = [&](const auto& convert) {
      if (count == 1) {
        for (int j = 0; j < n; ++j) to[j] = convert(from[j * step]);
      } else {
        for (int j = 0; j < n; ++j) {
          for (int g = 0; g < count; ++g) to[g * pitch + j] = convert(from[j * step + g]);
        }
      }
    };
    if constexpr (!std::is_same_v<From, D>) {
      each([](auto v) { return From::to_acc(v); });
    } else if (count == 1 && step == 1) {
      copy<Storage>(to, from, n);
    } else {
      each([](auto v) { return v; });
    }
  }
  template <class To>
  void write(const Storage* from, int n, void* memory, std::int64_t at, std::int64_t step) const {
    auto* to = static_cast<typename To::Storage*>(memory) + at;
    const auto each = [&](const auto& convert) {
      if (count == 1) {
        for (int j = 0; j < n; ++j) to[j * step] = convert(from[j]);
      } else {
        for (int j = 0; j < n; ++j) {
          for (int g = 0; g < count; ++g) to[j * step + g] = convert(from[g * kBatch + j]);
        }
      }
    };
    if constexpr (!std::is_same_v<To, D>) {
      each([](auto v) { return To::from_acc(v); });
    } else if (count == 1 && step == 1) {
      copy<Storage>(to, from, n);
    } else {
      each([](auto v) { return v; });
    }
  }

  const LoadedRows& rows_;
  const Loading& loading_ = rows_.loading;
  std::int64_t inner_, x_;
  const std::uint8_t* mask_ = nullptr;
};

template <class D>
struct LoadedLoader {
  const LoadedRows& rows;
  std::int64_t size() const { return rows.loading.outer * LoadedLines<D>::groups(rows.loading); }
  LoadedLines<D> lines(std::int64_t k) const { return {rows, k}; }
};

}  // namespace jaxsoftmax::cpu
