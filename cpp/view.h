// Where the elements of a call lie, and what is done to them as they are read: any axes, a mask, a
// scale, other dtypes. Plain structs, for host and device.
#pragma once

#include <cstdint>

#include "lists.h"
#include "sums.h"

namespace jaxsoftmax {

enum class DType {
#define JAXSOFTMAX_DTYPE(Tag) Tag,
  JAXSOFTMAX_DTYPES(JAXSOFTMAX_DTYPE)
#undef JAXSOFTMAX_DTYPE
};

inline constexpr int kMaxInputs = 2, kMaxGiven = 3;
inline constexpr int kMaxDims = 8;  // of an index, neighbours merged

// Division by a number that is known before the launch, as a multiplication: of n below 2^63, by
// fewer instructions where n and the number are below 2^31.
struct Divisor {
  std::int64_t by = 1;
  std::uint64_t factor = 0;
  std::uint32_t short_factor = 0;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(std::int64_t by) : by(by) {
    if (by < 2) return;
    while (std::int64_t{1} << shift < by && shift < 62) ++shift;
    factor = static_cast<std::uint64_t>(((Wide{1} << (63 + shift)) + by - 1) / by);
    if (by >> 31 == 0) {
      short_factor = static_cast<std::uint32_t>(((Wide{1} << (31 + shift)) + by - 1) / by);
    }
    --shift;
  }
  JAXSOFTMAX_HD std::int64_t quotient(std::int64_t n) const {
    if (by < 2) return n;
#if defined(__CUDA_ARCH__)
    if (short_factor != 0 && n >> 31 == 0) {
      return __umulhi(static_cast<unsigned>(n), short_factor) >> shift;
    }
    return static_cast<std::int64_t>(__umul64hi(n, factor) >> shift);
#else
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(n * Wide{factor} >> 64) >> shift);
#endif
  }

 private:
  __extension__ typedef unsigned __int128 Wide;
};

// From an index of several dimensions, the last of which varies fastest, to a place in memory.
struct Strides {
  int dims = 0;
  Divisor size[kMaxDims];
  std::int64_t stride[kMaxDims] = {};

  JAXSOFTMAX_HD std::int64_t offset(std::int64_t index) const {
    std::int64_t at = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int d = dims - 1; d > 0; --d) {
      const std::int64_t rest = size[d].quotient(index);
      at += (index - rest * size[d].by) * stride[d];
      index = rest;
    }
    return at + index * stride[0];
  }
  // Whether neighbours lie side by side; whether all are one element.
  JAXSOFTMAX_HD bool dense() const { return dims == 1 && stride[0] == 1; }
  JAXSOFTMAX_HD bool constant() const { return dims == 0; }
};

// How rows are read and written. The array is [outer, cols, inner]; row r = o * inner + i has its
// element c at x_outer(o) + x_cols(c) + i, in elements. Rows that lie side by side have inner = 1.
struct Loading {
  bool columns = false;  // a row's elements do not lie side by side
  std::int64_t outer = 0, inner = 1;
  Strides x_outer, x_cols;

  // Elements that count: mask[mask_outer(o) + mask_cols(c) + mask_inner(i)], null: all. Causal: and
  // of row r those up to r % queries.
  const std::uint8_t* mask = nullptr;
  Strides mask_outer, mask_cols, mask_inner;
  bool causal = false;
  Divisor queries;

  // One number, or one an outer index, in the type of arithmetic; null: 1.
  const void* scale = nullptr;
  Strides scale_outer;

  bool mixed = false;  // the dtypes below are not all that of the call, which then is F32
  DType in[kMaxInputs] = {}, out = {};

  bool plain() const { return !columns && !mask && !causal && !scale && !mixed; }
};

}  // namespace jaxsoftmax
