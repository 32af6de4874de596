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
    return tree(values, jaxsoftmax::larger<Acc>);
  }
  // Of each element.
  __device__ static Pack larger(const Pack& a, const Pack& b) {
    Acc of_a[kN], of_b[kN];
    unpack(a, of_a);
    unpack(b, of_b);
#pragma unroll
    for (int j = 0; j < kN; ++j) of_a[j] = jaxsoftmax::larger(of_a[j], of_b[j]);
    return pack(of_a);
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
    return jaxsoftmax::larger(pair.x, pair.y);
  }
  __device__ static Pack larger(const Pack& a, const Pack& b) {
    return {Pair::larger(a.x, b.x), Pair::larger(a.y, b.y), Pair::larger(a.z, b.z),
            Pair::larger(a.w, b.w)};
  }
};

struct HalfPair {
  __device__ static float2 widen(unsigned word) { return __half22float2(bit_cast<__half2>(word)); }
  __device__ static unsigned narrow(float a, float b) {
    return bit_cast<unsigned>(__floats2half2_rn(a, b));
  }
  __device__ static unsigned larger(unsigned a, unsigned b) {
    return bit_cast<unsigned>(__hmax2_nan(bit_cast<__half2>(a), bit_cast<__half2>(b)));
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
    return bit_cast<unsigned>(
        __hmax2_nan(bit_cast<__nv_bfloat162>(a), bit_cast<__nv_bfloat162>(b)));
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
template <class D, class Index = std::int64_t, int kAlign = 1>
class Window {
  using Storage = typename D::Storage;
  using Unsigned = std::make_unsigned_t<Index>;

 public:
  static constexpr unsigned kN = kPerPack<D>;
  __device__ Window(const Rows& rows, std::int64_t row) {
    const std::uint64_t offset = static_cast<std::uint64_t>(row * rows.cols);
    const Index begin = static_cast<Index>(offset % (kAlign * kN));
    origin_ = (offset - begin) * sizeof(Storage);
    set(begin, static_cast<Index>(rows.cols) + begin);
  }

  // The packs [from, from + size) of a row as a window of their own. It is empty past the row's
  // end.
  __device__ Window<D, int, kAlign> piece(std::int64_t from, int size) const {
    Window<D, int, kAlign> cut;
    const std::int64_t begin = begin_ - from * kN, end = end_ - from * kN;
    const std::int64_t most = static_cast<std::int64_t>(size) * kN;
    cut.origin_ = origin_ + from * kPackBytes;
    cut.set(static_cast<int>(begin > 0 ? begin : 0), static_cast<int>(end > most ? most
                                                                      : end > 0  ? end
                                                                                 : 0));
    return cut;
  }

  // Packs of the row, and the first so many that are read.
  __device__ Index packs() const { return static_cast<Index>((Unsigned(end_) + kN - 1) / kN); }
  __device__ Index read() const { return packs(); }
  // Whether none of the packs [from, to) reaches outside the row.
  __device__ bool whole(Index from, Index to) const {
    const Index first = kAlign == 1 ? begin_ > 0 : (Unsigned(begin_) + kN - 1) / kN;
    return from >= first && to <= static_cast<Index>(Unsigned(end_) / kN);
  }
  // Whether a pack of the row reaches outside it.
  __device__ bool ragged() const { return begin_ > 0 || Unsigned(end_) % kN != 0; }

  // The 16 aligned bytes of a pack that holds an element of the array are always readable. What
  // lies outside the row is for mask() to replace, apart from the load: a load whose mask waits for
  // it would hold back the loads after it.
  __device__ Pack load(const void* base, Index p) const { return __ldg(address(base, p)); }
  __device__ const Pack* address(const void* base, Index p) const {
    return reinterpret_cast<const Pack*>(static_cast<const char*>(base) + origin_) + p;
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

  // `passing`: L2 need not keep what is stored.
  template <bool kWhole = false>
  __device__ void store(void* base, Index p, const Pack& pack, bool passing = false) const {
    Pack* to = reinterpret_cast<Pack*>(static_cast<char*>(base) + origin_) + p;
    if (kWhole || whole(p)) {  // a plain assignment is split into four stores
      if (passing) {
        __stcs(to, pack);
      } else {
        __stwb(to, pack);
      }
      return;
    }
    Storage elements[kN];
    memcpy(elements, &pack, sizeof pack);
#pragma unroll
    for (int j = 0; j < static_cast<int>(kN); ++j) {
      if (inside(p, j)) reinterpret_cast<Storage*>(to)[j] = elements[j];
    }
  }

 protected:
  template <class, class, int>
  friend class Window;
  __device__ Window() {}
  __device__ void set(Index begin, Index end) {
    begin_ = begin;
    end_ = end;
  }

  __device__ bool whole(Index p) const { return whole(p, p + 1); }
  __device__ bool inside(Index p, int j) const {
    const Index at = p * static_cast<Index>(kN) + j;
    return at >= begin_ && at < end_;
  }

  std::uint64_t origin_;  // bytes from the array's start to pack 0
  Index begin_, end_;     // the row's elements, counted from pack 0's start
};

}  // namespace jaxsoftmax::cuda
