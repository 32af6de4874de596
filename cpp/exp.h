// e^d as (1 + q) * scale, by a polynomial and a power of two; host and device.
#pragma once

#include <cstdint>
#include <cstring>

#include "sums.h"

namespace jaxsoftmax {

inline constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// e^d = (1 + q) * scale for d <= 88 in float: q by a polynomial of relative error 2^-28, `scale` a
// power of two. d below -88 (where e^d is subnormal) gives scale 0; NaN gives q NaN.
struct FloatExp {
  float q, scale;
  JAXSOFTMAX_HD FloatExp(float d, float error) {
    const bool tiny = d < -88.0f;
    d = tiny ? -88.0f : d;
    error = tiny ? 0.0f : error;
    // Adding 1.5 * 2^23 rounds d / ln 2 to an integer k and leaves it in the low mantissa bits.
    const float shifted = d * kLog2e + 12582912.0f;
    const float k = shifted - 12582912.0f;
    // ln 2 = hi + lo; hi has 17 significant bits, so k * hi is exact (|k| < 128).
    const float r = (d - k * 0.693138123f) - k * 9.05800061e-6f + error;
    q = 0.0013814467f;
    q = q * r + 0.008368781f;
    q = q * r + 0.041668393f;
    q = q * r + 0.1666652f;
    q = q * r + 0.49999994f;
    q = (q * r) * r + r;
    std::uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    memcpy(&scale, &bits, sizeof bits);
  }
  // Not q * scale + scale: q * scale may be subnormal, and the caller's thread may flush it.
  JAXSOFTMAX_HD float value() const { return (1.0f + q) * scale; }
};

// The same in double, for d from -709 to 709: q errs by 0.6 * 2^-53 of e^d, most of it its own last
// rounding.
struct DoubleExp {
  double q, scale;
  JAXSOFTMAX_HD DoubleExp(double d, double error) {
    const bool tiny = d < -709.0;
    d = tiny ? -709.0 : d;
    error = tiny ? 0.0 : error;
    const double shifted = d * 1.4426950408889634 + 6755399441055744.0;
    const double k = shifted - 6755399441055744.0;
    // hi has 42 significant bits: d - k * hi is exact, and it is added last.
    const double exact = d - k * 0.6931471805598903;
    const double rest = error - k * 5.497923018708371e-14;
    const double r = exact + rest;
    double p = 2.0826625760269827e-09;
    p = p * r + 2.5112036803410405e-08;
    p = p * r + 2.755758185130781e-07;
    p = p * r + 2.7557234862030562e-06;
    p = p * r + 2.4801586926631552e-05;
    p = p * r + 0.00019841269896383695;
    p = p * r + 0.0013888888889115626;
    p = p * r + 0.008333333333317034;
    p = p * r + 0.041666666666666095;
    p = p * r + 0.16666666666666682;
    p = p * r + 0.5;
    q = exact + ((p * r) * r + rest);
    std::uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 52) + 0x3ff0000000000000u;
    memcpy(&scale, &bits, sizeof bits);
  }
  JAXSOFTMAX_HD double value() const { return (1.0 + q) * scale; }
  // The same and what its sum has rounded off.
  JAXSOFTMAX_HD TwoDoubles exact() const {
    const double sum = 1.0 + q;
    return {sum * scale, ((1.0 - sum) + q) * scale};
  }
};

}  // namespace jaxsoftmax
