// What the Loading of view.h means to a lane: elements of other dtypes, the scale, and which
// elements of a pack count. Kinds of loading are branches at run time, the same for all lanes.
#pragma once

#include "../dtypes.h"
#include "../plan.h"
#include "vec.cuh"

namespace jaxsoftmax::cuda {

template <class D>
using RowsOf = std::conditional_t<D::kLoaded, LoadedRows, Rows>;

// kCount neighbouring elements, a pack or a single one, in the storage that an array has. An array
// of a mixed call (D is F32) may be of 16 bits: a pack's elements then are half a pack.
template <class D, int kCount>
struct Elements {
  using Acc = typename D::Numerics::Acc;
  using Storage = typename D::Storage;
  using Base = typename D::Base;
  static constexpr bool kMixes = std::is_same_v<Base, F32>;
  using Raw = std::conditional_t<kCount == 1, Storage, Pack>;

  __device__ static bool narrow(const Loading& loading, DType dtype) {
    return kMixes && loading.mixed && dtype != DType::F32;
  }
  // Elements from `at` on.
  __device__ static Raw load(const void* base, std::int64_t at, bool narrow) {
    const char* bytes = static_cast<const char*>(base);
    if (!narrow) return __ldg(reinterpret_cast<const Raw*>(bytes + at * sizeof(Storage)));
    if constexpr (kMixes && kCount > 1) {
      const uint2 half = __ldg(reinterpret_cast<const uint2*>(bytes + at * 2));
      return {half.x, half.y, 0, 0};
    } else if constexpr (kMixes) {
      return bit_cast<float>(unsigned{__ldg(reinterpret_cast<const std::uint16_t*>(bytes) + at)});
    }
    return Raw();
  }
  // All of one value.
  __device__ static Raw filled(Acc value) {
    Acc values[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = value;
    return Convert<Base>::pack(values);
  }
  __device__ static void unpack(const Raw& raw, bool narrow, DType dtype, Acc (&values)[kCount]) {
    if constexpr (kMixes) {
      if (narrow) {
        unsigned words[(kCount + 1) / 2];
        memcpy(words, &raw, sizeof words);
#pragma unroll
        for (int i = 0; i < (kCount + 1) / 2; ++i) {
          const float2 pair =
              dtype == DType::F16 ? HalfPair::widen(words[i]) : Bfloat16Pair::widen(words[i]);
          values[2 * i] = pair.x;
          if constexpr (kCount > 1) values[2 * i + 1] = pair.y;
        }
        return;
      }
    }
    if constexpr (kCount > 1) {
      Convert<Base>::unpack(raw, values);
    } else {
      values[0] = D::to_acc(raw);
    }
  }
  // `inside`: a bit for each element that is written.
  __device__ static void store(void* base, std::int64_t at, const Acc (&values)[kCount],
                               bool narrow, DType dtype, unsigned inside) {
    char* bytes = static_cast<char*>(base);
    constexpr unsigned kAll = (1u << kCount) - 1;
    if constexpr (kMixes) {
      if (narrow) {
        std::uint16_t halves[kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          halves[j] = dtype == DType::F16 ? bit_cast<std::uint16_t>(__float2half_rn(values[j]))
                                          : bit_cast<std::uint16_t>(__float2bfloat16_rn(values[j]));
        }
        write<kAll>(reinterpret_cast<std::uint16_t*>(bytes) + at, halves, inside);
        return;
      }
    }
    Storage elements[kCount];
    if constexpr (kCount > 1) {
      const Pack pack = Convert<Base>::pack(values);
      memcpy(elements, &pack, sizeof pack);
    } else {
      elements[0] = D::from_acc(values[0]);
    }
    write<kAll>(reinterpret_cast<Storage*>(bytes) + at, elements, inside);
  }

 private:
  template <unsigned kAll, class T>
  __device__ static void write(T* to, const T (&elements)[kCount], unsigned inside) {
    if (kCount > 1 && inside == kAll) {
      using Words = std::conditional_t<sizeof(T) * kCount == 8, uint2, Pack>;
      Words words{};
      memcpy(&words, elements, sizeof(T) * kCount);
      __stwb(reinterpret_cast<Words*>(to), words);
      return;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (inside >> j & 1) to[j] = elements[j];
    }
  }
};

// Bit j: whether byte j of 8 is not 0. A byte is 0 or 1.
__device__ inline unsigned bits_of(std::uint64_t bytes) {
  constexpr unsigned kOnes = 0x01010101u, kGather = 0x10204080u;
  const unsigned low = static_cast<unsigned>(bytes) & kOnes;
  const unsigned high = static_cast<unsigned>(bytes >> 32) & kOnes;
  return (low * kGather >> 28) | (high * kGather >> 28 << 4);
}

// What many rows read again, with the hint to keep it in L1.
template <class T>
__device__ T load_kept(const T* from) {
  if constexpr (sizeof(T) == 8) {
    std::uint64_t bits;
    asm("ld.global.nc.L1::evict_last.b64 %0, [%1];" : "=l"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 4) {
    std::uint32_t bits;
    asm("ld.global.nc.L1::evict_last.b32 %0, [%1];" : "=r"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 2) {
    std::uint16_t bits;
    asm("ld.global.nc.L1::evict_last.b16 %0, [%1];" : "=h"(bits) : "l"(from));
    return bit_cast<T>(bits);
  } else {
    std::uint32_t bits;
    asm("ld.global.nc.L1::evict_last.u8 %0, [%1];" : "=r"(bits) : "l"(from));
    return static_cast<T>(bits);
  }
}

// kN bytes of a mask from `at` on: at a multiple of kN, or of two words that are, of which bytes
// [from, to) are needed.
template <int kN>
using MaskWord = std::conditional_t<kN == 8, std::uint64_t,
                                    std::conditional_t<kN == 4, std::uint32_t, std::uint16_t>>;
template <int kN>
__device__ std::uint64_t aligned_bytes(const std::uint8_t* at) {
  return load_kept(reinterpret_cast<const MaskWord<kN>*>(at));
}
template <int kN>
__device__ std::uint64_t two_words(const std::uint8_t* at, int from, int to) {
  const int past = static_cast<int>(reinterpret_cast<std::uintptr_t>(at) % kN);  // not 0
  std::uint64_t low = 0, high = 0;
  if (from < kN - past) low = aligned_bytes<kN>(at - past);
  if (to > kN - past) high = aligned_bytes<kN>(at - past + kN);
  return low >> 8 * past | high << 8 * (kN - past);
}

// A row whose elements lie side by side, its scale, and which of its elements count. kWhole: it is
// whole packs of one dtype, and so is a mask's line. kEvery: all elements count.
template <class D, class Index, bool kWhole, bool kEvery>
class LoadedWindow : public Window<D, Index> {
  using Acc = typename D::Numerics::Acc;
  using Base = Window<D, Index>;
  static constexpr int kN = Base::kN;
  using Each = Elements<D, kN>;

 public:
  __device__ LoadedWindow(const LoadedRows& rows, std::int64_t row)
      : Base(rows, row), loading_(rows.loading), end_read_(this->end_) {
    if (kWhole) this->begin_ = 0;
    first_ = row * rows.cols - this->begin_;
    const Loading& loading = rows.loading;
    ragged_ = this->begin_ > 0 || this->end_ % kN != 0;
    if (row >= rows.rows) return;
    if (!kEvery && loading.causal) {
      const std::int64_t query = row - loading.queries.quotient(row) * loading.queries.by;
      if (query + 1 < rows.cols) end_read_ = this->begin_ + static_cast<Index>(query + 1);
    }
    ragged_read_ = (!kWhole && ragged_) || (!kEvery && loading.causal && end_read_ % kN != 0);
    if (!kEvery && loading.mask != nullptr) {
      mask_ = loading.mask + loading.mask_outer.offset(row);
      if (loading.mask_cols.constant()) {
        all_ = load_kept(mask_) != 0;
        mask_ = nullptr;
      } else {
        mask_ -= this->begin_;
        aligned_ = kWhole || reinterpret_cast<std::uintptr_t>(mask_) % kN == 0;
      }
    }
    if (loading.scale != nullptr) {
      scale_ = load_kept(static_cast<const Acc*>(loading.scale) + loading.scale_outer.offset(row));
    }
  }

  __device__ Acc scale() const { return scale_; }
  __device__ Index read() const { return (end_read_ + kN - 1) / kN; }
  __device__ bool ragged() const { return true; }
  __device__ bool whole(Index, Index) const { return false; }
  __device__ static constexpr bool every() { return kEvery; }

  __device__ Pack load(const void* base, Index p, int i) const {
    return Each::load(base, first_ + p * kN, narrow(loading_.in[i]));
  }
  __device__ void unpack(const Pack& raw, int i, Acc (&values)[kN]) const {
    Each::unpack(raw, narrow(loading_.in[i]), loading_.in[i], values);
  }
  __device__ void store(void* base, Index p, const Acc (&values)[kN]) const {
    Each::store(base, first_ + p * kN, values, narrow(loading_.out), loading_.out,
                !kWhole && ragged_ ? inside(p, this->end_) : (1u << kN) - 1);
  }

  // The mask's bytes of a pack that is read, and a bit for each element of it that counts.
  __device__ std::uint64_t mask_bytes(Index p) const {
    if (kEvery || mask_ == nullptr) return 0;
    if constexpr (kWhole) return aligned_bytes<kN>(mask_ + p * kN);
    if (aligned_) return aligned_bytes<kN>(mask_ + p * kN);
    const Index from = this->begin_ - p * kN, to = end_read_ - p * kN;
    return two_words<kN>(mask_ + p * kN, from > 0 ? static_cast<int>(from) : 0,
                         to < kN ? static_cast<int>(to) : kN);
  }
  __device__ unsigned counts(Index p, std::uint64_t bytes) const {
    unsigned bits = all_ ? (1u << kN) - 1 : 0;
    if (ragged_read_) bits &= inside(p, end_read_);
    return mask_ != nullptr ? bits & bits_of(bytes) : bits;
  }

 private:
  __device__ bool narrow(DType dtype) const { return !kWhole && Each::narrow(loading_, dtype); }
  // A bit for each element of a pack that lies before `end` in the row.
  __device__ unsigned inside(Index p, Index end) const {
    constexpr unsigned kAll = (1u << kN) - 1;
    const Index from = this->begin_ - p * kN, to = end - p * kN;
    const unsigned upto = to >= kN ? kAll : to > 0 ? (1u << to) - 1 : 0;
    return from > 0 ? upto & (kAll << from) : upto;
  }

  const Loading& loading_;
  const std::uint8_t* mask_ = nullptr;  // the byte of pack 0's start; null: none, or one for all
  bool aligned_ = false, all_ = true;
  bool ragged_, ragged_read_ = true;  // whether a pack that is written, or read, is partly outside
  Acc scale_ = 1;
  std::int64_t first_;  // the element at pack 0's start, counted from the array's
  Index end_read_;      // like end_, of what is read
};

// Whether rows of whole packs may be read as kWhole says.
template <class D>
bool whole_packs(const LoadedRows& rows) {
  const Loading& loading = rows.loading;
  constexpr int kN = kPerPack<D>;
  bool whole = !loading.mixed && reinterpret_cast<std::uintptr_t>(loading.mask) % kN == 0;
  for (int d = 0; d < loading.mask_outer.dims; ++d) {
    whole = whole && (loading.mask_cols.constant() || loading.mask_outer.stride[d] % kN == 0);
  }
  return whole || loading.mask == nullptr && !loading.mixed;
}

// Which elements of a pack count: the mask's bytes from the load on, then a bit each.
template <class D>
struct Counts {
  static constexpr unsigned kAll = (1u << kPerPack<D>)-1;
  std::uint64_t word;

  template <class Window, class Index>
  __device__ void load(const Window& window, Index p) {
    word = window.mask_bytes(p);
  }
  template <class Window, class Index>
  __device__ void decide(const Window& window, Index p) {
    word = window.counts(p, word);
  }
  __device__ bool all() const { return static_cast<unsigned>(word) == kAll; }
  __device__ bool has(int j) const { return static_cast<unsigned>(word) >> j & 1; }
};
template <>
struct Counts<F16> {};
template <>
struct Counts<BF16> {};
template <>
struct Counts<F32> {};
template <>
struct Counts<F64> {};

}  // namespace jaxsoftmax::cuda
