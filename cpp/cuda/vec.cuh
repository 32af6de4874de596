// Rows as 16-byte packs: conversion of a pack, and a row's window with masked ends.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../dtypes.h"
#include "../plan.h"

namespace jaxsoftmax::cuda {

using Pack = uint4;

template <class D>
inline constexpr int kPerPack = kPackBytes / sizeof(typename D::Storage);

// Pack <-> kPerPack<D> values of the accumulation type, and the largest of a pack. 16-bit types
// work in pairs.
template <class D>
struct Convert {
  using Acc = typename D::Numerics::Acc;
  static constexpr int kN = kPerPack<D>;

  __device__ static void unpack(const Pack& pack, Acc (&values)[kN]) {
    memcpy(values, &pack, sizeof pack);
  }
  __device__ static Pack pack(const Acc (&values)[kN]) {
    Pack out;
    memcpy(&out, values, sizeof out);
    return out;
  }
  __device__ static Acc largest(const Pack& pack) {
    Acc values[kN];
    unpack(pack, values);
    return tree(values, larger<Acc>);
  }
};

template <class Pair>
struct ConvertPairs {
  __device__ static void unpack(const Pack& pack, float (&values)[8]) {
    const unsigned words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Pair::widen(words[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
  __device__ static Pack pack(const float (&v)[8]) {
    return {Pair::narrow(v[0], v[1]), Pair::narrow(v[2], v[3]), Pair::narrow(v[4], v[5]),
            Pair::narrow(v[6], v[7])};
  }
  __device__ static float largest(const Pack& pack) {
    const unsigned word = Pair::larger(Pair::larger(pack.x, pack.y), Pair::larger(pack.z, pack.w));
    const float2 pair = Pair::widen(word);
    return fmaxf(pair.x, pair.y);
  }
};

struct HalfPair {
  __device__ static float2 widen(unsigned word) { return __half22float2(bit_cast<__half2>(word)); }
  __device__ static unsigned narrow(float a, float b) {
    return bit_cast<unsigned>(__floats2half2_rn(a, b));
  }
  __device__ static unsigned larger(unsigned a, unsigned b) {
    return bit_cast<unsigned>(__hmax2(bit_cast<__half2>(a), bit_cast<__half2>(b)));
  }
};

struct Bfloat16Pair {
  __device__ static float2 widen(unsigned word) {
    return {bit_cast<float>(word << 16), bit_cast<float>(word & 0xffff0000u)};
  }
  __device__ static unsigned narrow(float a, float b) {
    return bit_cast<unsigned>(__floats2bfloat162_rn(a, b));
  }
  __device__ static unsigned larger(unsigned a, unsigned b) {
    return bit_cast<unsigned>(__hmax2(bit_cast<__nv_bfloat162>(a), bit_cast<__nv_bfloat162>(b)));
  }
};

template <>
struct Convert<F16> : ConvertPairs<HalfPair> {};
template <>
struct Convert<BF16> : ConvertPairs<Bfloat16Pair> {};

// One row as packs (bases are 16-byte aligned). Pack 0 is the aligned pack that holds the row's
// first element; elements of the end packs that lie outside the row are read as pads and not
// written. Index counts a row's elements and packs: int where the plan bounds them. All divisors
// are powers of two, and unsigned, so that they are shifts and masks: short rows feel each
// instruction.
template <class D, class Index = std::int64_t>
class Window {
  using Storage = typename D::Storage;
  static constexpr unsigned kN = kPerPack<D>;

 public:
  __device__ Window(const Rows& rows, std::int64_t row) {
    const std::uint64_t offset = static_cast<std::uint64_t>(row * rows.cols);
    begin_ = static_cast<Index>(offset % kN);
    end_ = static_cast<Index>(rows.cols) + begin_;
    origin_ = (offset - begin_) * sizeof(Storage);
    packs_ = static_cast<Index>((static_cast<std::make_unsigned_t<Index>>(end_) + kN - 1) / kN);
    whole_from_ = begin_ > 0;
    whole_to_ = static_cast<Index>(static_cast<std::make_unsigned_t<Index>>(end_) / kN);
  }

  __device__ Index packs() const { return packs_; }
  // Whether a pack of the row reaches outside it.
  __device__ bool ragged() const { return whole_from_ > 0 || whole_to_ < packs_; }

  // The 16 aligned bytes of a pack that holds an element of the array are always readable. What
  // lies outside the row is for mask() to replace, apart from the load: a load whose mask waits for
  // it would hold back the loads after it.
  __device__ Pack load(const void* base, Index p) const {
    return __ldg(reinterpret_cast<const Pack*>(static_cast<const char*>(base) + origin_) + p);
  }

  __device__ void mask(Pack& pack, Index p, Storage pad) const {
    if (whole(p)) return;
    Storage elements[kN];
    memcpy(elements, &pack, sizeof pack);
#pragma unroll
    for (int j = 0; j < static_cast<int>(kN); ++j) {
      elements[j] = inside(p, j) ? elements[j] : pad;
    }
    memcpy(&pack, elements, sizeof pack);
  }

  __device__ void store(void* base, Index p, const Pack& pack) const {
    Pack* to = reinterpret_cast<Pack*>(static_cast<char*>(base) + origin_) + p;
    if (whole(p)) {
      __stwb(to, pack);  // a plain assignment is split into four stores
      return;
    }
    Storage elements[kN];
    memcpy(elements, &pack, sizeof pack);
#pragma unroll
    for (int j = 0; j < static_cast<int>(kN); ++j) {
      if (inside(p, j)) reinterpret_cast<Storage*>(to)[j] = elements[j];
    }
  }

 private:
  __device__ bool whole(Index p) const { return p >= whole_from_ && p < whole_to_; }
  __device__ bool inside(Index p, int j) const {
    const Index at = p * static_cast<Index>(kN) + j;
    return at >= begin_ && at < end_;
  }

  std::uint64_t origin_;                 // bytes from the array's start to pack 0
  Index begin_, end_;                    // the row's elements, counted from pack 0's start
  Index packs_, whole_from_, whole_to_;  // packs [whole_from_, whole_to_) lie inside the row
};

// One pack of each of an op's inputs.
template <class Op, class D>
struct Packs {
  using Acc = typename D::Numerics::Acc;
  static constexpr int kN = kPerPack<D>;
  using Values = Acc[Op::kInputs][kN];
  Pack raw[Op::kInputs];

  template <class Index>
  __device__ void load(const Rows& rows, const Window<D, Index>& window, Index p) {
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) raw[i] = window.load(rows.in[i], p);
  }
  template <class Index>
  __device__ void mask(const Window<D, Index>& window, Index p) {
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) window.mask(raw[i], p, D::from_acc(Op::pad(i)));
  }
  __device__ void unpack(Values& values) const {
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) Convert<D>::unpack(raw[i], values[i]);
  }
  template <class Index>
  __device__ void map(const Rows& rows, const Window<D, Index>& window, Index p,
                      const typename Op::Row& row) const {
    Values values;
    unpack(values);
    Acc mapped[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      Acc v[Op::kInputs];
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) v[i] = values[i][j];
      mapped[j] = Op::map(v, row);
    }
    window.store(rows.out, p, Convert<D>::pack(mapped));
  }
};

}  // namespace jaxsoftmax::cuda
