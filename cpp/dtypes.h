// One struct per dtype: how it is stored, the Numerics that serve it, and conversions of one
// element. (Device conversions work on whole packs: cuda/vec.cuh.)
#pragma once

#include "numerics.h"

namespace jaxsoftmax {

template <class To, class From>
JAXSOFTMAX_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct F32 {
  using Base = F32;
  static constexpr bool kLoaded = false;
  using Numerics = ExactFloat;
  using Storage = float;
  JAXSOFTMAX_HD static float to_acc(float v) { return v; }
  JAXSOFTMAX_HD static float from_acc(float v) { return v; }
};

struct F64 {
  using Base = F64;
  static constexpr bool kLoaded = false;
  using Numerics = ExactDouble;
  using Storage = double;
  JAXSOFTMAX_HD static double to_acc(double v) { return v; }
  JAXSOFTMAX_HD static double from_acc(double v) { return v; }
};

struct BF16 {
  using Base = BF16;
  static constexpr bool kLoaded = false;
  using Numerics = FastFloat;
  using Storage = std::uint16_t;
  JAXSOFTMAX_HD static float to_acc(Storage v) {
    return bit_cast<float>(static_cast<std::uint32_t>(v) << 16);
  }
  JAXSOFTMAX_HD static Storage from_acc(float v) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(v);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Storage>(v == v ? rounded : 0x7fc0u);
  }
};

struct F16 {
  using Base = F16;
  static constexpr bool kLoaded = false;
  using Numerics = FastHalf;
  using Storage = std::uint16_t;
  // Normals move exponent and mantissa into a float's; subnormals are an integer times 2^-24 (a
  // float subnormal on the way would be lost where the caller's thread flushes them).
  JAXSOFTMAX_HD static float to_acc(Storage v) {
    const std::uint32_t magnitude = v & 0x7fffu;
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);
    const std::uint32_t subnormal = bit_cast<std::uint32_t>(
        static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
    std::uint32_t bits = magnitude < 0x0400u ? subnormal : normal;
    bits = magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : bits;
    return bit_cast<float>(bits | (static_cast<std::uint32_t>(v & 0x8000u) << 16));
  }
  // Round to nearest even: normals by adding half of the last kept bit, subnormals by letting the
  // float adder align them below 0.5, whose last mantissa bit is 2^-24.
  JAXSOFTMAX_HD static Storage from_acc(float v) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(v);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t normal =
        (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const std::uint32_t subnormal =
        bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
    half = v == v ? half : 0x7e00u;
    return static_cast<Storage>(half | ((bits >> 16) & 0x8000u));
  }
};

// The same dtype read and written through a Loading of view.h.
template <class D>
struct Loaded : D {
  static constexpr bool kLoaded = true;
};
template <>
struct Loaded<F16> : F16 {
  static constexpr bool kLoaded = true;
  using Numerics = FastFloat;  // a scale may take values beyond float16's
};

}  // namespace jaxsoftmax
