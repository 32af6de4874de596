// e^(x - m) to the accuracy that each dtype needs; host and device.
//
//   Numerics      dtypes     computes in   e^(x - m)                     carries sums in
//   FastHalf      float16    float         one rounding of x - m         two floats
//   FastFloat     bfloat16,  float         one rounding of x - m         two floats
//                 scaled float16
//   ExactFloat    float32    float         x - m and its rounding error  double
//   ExactDouble   float64    double        x - m and its rounding error  two doubles
//
// For the results x - m is formed first: x * log2(e) - m * log2(e) is wrong at large magnitudes
// (bfloat16 x = m = 1e30 would give 0 instead of 1). A Numerics has
//   Reference(m), term(x, from)   what a sum adds for x, relative to a reference at m
//   rescaling(from, to)           from terms relative to one m to terms relative to another
//   reciprocal(s, m)              1 / s of a sum relative to m, in the form that the others take
//   total(s, m), log_total(s, m)  a sum relative to m itself, and its logarithm
//   Fine, whole(s)                in what formulas compute that then become an Acc; a plain sum so
//   Ratio, ratio(a, total)        |a| / total of a sum a
//   kSlack                        how far below the largest element a logarithm lets m lie
//   exp_diff_over(x, m, r)        e^(x - m) / s; times a ratio, Fine
//   factor(from, m, r), times(kept, factor)   the same from a term relative to `from`
//   add_terms, add_products       to a sum
#pragma once

#include <cmath>
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

// The same in double, for d <= 709: q errs by 2^-54, a third of which is the polynomial's.
struct DoubleExp {
  double q, scale;
  JAXSOFTMAX_HD DoubleExp(double d, double error) {
    const bool tiny = d < -709.0;
    d = tiny ? -709.0 : d;
    error = tiny ? 0.0 : error;
    const double shifted = d * 1.4426950408889634 + 6755399441055744.0;
    const double k = shifted - 6755399441055744.0;
    // hi has 42 significant bits: d - k * hi is exact, and no rounding but the last touches it.
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

// kSmall: no value reaches 2^20 in magnitude.
template <bool kSmall>
struct Fast {
  using Acc = float;
  using Sum = FastSum;
  // 1 / s; on the device log2(1 / s), which the exponent takes in without an instruction more. Its
  // rounding, 2^-18 of the result at most, is far below a 16-bit ulp.
  using Reciprocal = float;
  using Ratio = float;
  using Fine = float;

#if defined(__CUDA_ARCH__)
  // The hardware's exponential errs by 2^-22 but at 0: where one element outweighs the others, and
  // the logarithm is near 0, its term must be 1.
  static constexpr int kSlack = 0;
  JAXSOFTMAX_HD static float exp2(float t) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    return e;
  }
  // Terms of a sum are 2^(x * scale - shift), shift = m * scale rounded: a single operation from x,
  // with a single rounding. The rounding of shift, up to 2^-10 for m = 1e4, is the same in all
  // terms, and what leaves the sum takes it out. From 2^20 on, where it would grow too large, scale
  // is 1: 16-bit values that differ are then so far apart that all but m count for nothing.
  struct Reference {
    float scale, shift;
    // Not fused with what is done to it.
    JAXSOFTMAX_HD explicit Reference(float m)
        : scale(kSmall || fabsf(m) < 1048576.0f ? kLog2e : 1.0f), shift(__fmul_rn(m, scale)) {}
    JAXSOFTMAX_HD float rounding(float m) const { return fmaf(m, scale, -shift); }
  };
  JAXSOFTMAX_HD static float term(float x, const Reference& from) {
    return exp2(fmaf(x, from.scale, -from.shift));
  }
  // log2 of what takes terms relative to `from` to terms relative to `to`.
  JAXSOFTMAX_HD static float distance(float from, float to) {
    const Reference a(from), b(to);
    const bool alike = kSmall || (a.scale != 1.0f && b.scale != 1.0f);
    return alike ? a.shift - b.shift : (from - to) * kLog2e;
  }
  JAXSOFTMAX_HD static float rescaling(float from, float to) { return exp2(distance(from, to)); }
  JAXSOFTMAX_HD static Reciprocal reciprocal(const Sum& s, float m) {
    return Reference(m).rounding(m) - log2(s.total());
  }
  // m is the largest element, whose term is about 1: what the others add to it is not rounded once
  // more. The additions have done so, at up to a dozen levels by 2^-24 each.
  JAXSOFTMAX_HD static float others(const Sum& s, float m) {
    const float rounding = Reference(m).rounding(m);
    return (s.total() - exp2(rounding)) * exp2(-rounding);
  }
  JAXSOFTMAX_HD static float total(const Sum& s, float m) { return 1.0f + others(s, m); }
  JAXSOFTMAX_HD static float log_total(const Sum& s, float m) {
    const float u = others(s, m);
    if (u < 0.03125f) return u + u * u * (((0.2f * u - 0.25f) * u + 0.333333333f) * u - 0.5f);
    return log2(1.0f + u) * kLn2;
  }
  JAXSOFTMAX_HD static float log2(float v) {
    float log;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(v));
    return log;
  }
  JAXSOFTMAX_HD static Reciprocal ratio(const Sum& a, float total) {
    return log2(fabsf(a.total())) - log2(total);
  }
  // e^(x - m) / s
  JAXSOFTMAX_HD static float exp_diff_over(float x, float m, Reciprocal r) {
    return exp2((x - m) * kLog2e + r);
  }
  // From terms relative to `from` to the same.
  JAXSOFTMAX_HD static float factor(float from, float m, Reciprocal r) {
    return exp2(distance(from, m) - Reference(m).rounding(m) + r);
  }
#else
  static constexpr int kSlack = 0;
  struct Reference {
    float m;
    JAXSOFTMAX_HD explicit Reference(float m) : m(m) {}
  };
  JAXSOFTMAX_HD static float exp_diff(float x, float m) { return FloatExp(x - m, 0.0f).value(); }
  JAXSOFTMAX_HD static float term(float x, const Reference& from) { return exp_diff(x, from.m); }
  JAXSOFTMAX_HD static float rescaling(float from, float to) { return exp_diff(from, to); }
  JAXSOFTMAX_HD static float total(const Sum& s, float) { return s.total(); }
  JAXSOFTMAX_HD static float log_total(const Sum& s, float) {
    return static_cast<float>(std::log(static_cast<double>(s.value) + s.error));
  }
  JAXSOFTMAX_HD static Reciprocal ratio(const Sum& a, float total) {
    return std::fabs(a.total()) / total;
  }
  JAXSOFTMAX_HD static Reciprocal reciprocal(const Sum& s, float) { return 1.0f / s.total(); }
  JAXSOFTMAX_HD static float exp_diff_over(float x, float m, Reciprocal r) {
    return exp_diff(x, m) * r;
  }
  JAXSOFTMAX_HD static float factor(float from, float m, Reciprocal r) {
    return exp_diff_over(from, m, r);
  }
#endif
  JAXSOFTMAX_HD static float times(float kept, float factor) { return kept * factor; }
  JAXSOFTMAX_HD static Fine whole(const Sum& s) { return s.total(); }
  template <int N>
  JAXSOFTMAX_HD static void add_terms(Sum& s, const float (&terms)[N]) {
#if defined(__CUDA_ARCH__)
    s.add(tree_sum(terms));
#else  // beside a term of 1 small ones would be rounded in every addition
    double wide[N];
    for (int j = 0; j < N; ++j) wide[j] = terms[j];
    const double sum = tree_sum(wide);
    s.add(static_cast<float>(sum));
    s.error += static_cast<float>(sum - static_cast<float>(sum));
#endif
  }
  // The products of two 16-bit numbers are exact in float.
  template <int N>
  JAXSOFTMAX_HD static void add_products(Sum& s, const float (&a)[N], const float (&b)[N]) {
    float terms[N];
#pragma unroll
    for (int j = 0; j < N; ++j) terms[j] = a[j] * b[j];
    add_terms(s, terms);
  }
};
using FastFloat = Fast<false>;  // bfloat16
using FastHalf = Fast<true>;    // float16

struct ExactFloat {
  using Acc = float;
  using Sum = DoubleSum;
  // In two words: the rounding of a single one would cost up to an ulp of every element.
  struct Words {
    float value, error;
    JAXSOFTMAX_HD explicit Words(double v)
        : value(static_cast<float>(v)), error(static_cast<float>(v - value)) {}
    JAXSOFTMAX_HD double exact() const { return static_cast<double>(value) + error; }
  };
  using Reciprocal = Words;
  using Ratio = Words;
  using Fine = float;
  static constexpr int kSlack = 32;

  // The rounding of x - m alone would cost up to 36 ulp; it matters in the sum as in the map: for
  // 1e6 equal terms at x - m = -13.8 it is a systematic 4 to 8 ulp of the row's sum.
  JAXSOFTMAX_HD static FloatExp exp_parts(float x, float m) {
    const Difference<float> d(x, m);
    return FloatExp(d.value, d.error);
  }
  JAXSOFTMAX_HD static float exp_diff(float x, float m) { return exp_parts(x, m).value(); }
  using Reference = float;
  JAXSOFTMAX_HD static float term(float x, Reference from) { return exp_diff(x, from); }
  JAXSOFTMAX_HD static float rescaling(float from, float to) { return exp_diff(from, to); }
  JAXSOFTMAX_HD static float total(const Sum& s, float) { return static_cast<float>(s.total()); }
  JAXSOFTMAX_HD static float log_total(const Sum& s, float) {
    const Words t(s.total());
    return std::log(t.value) + t.error / t.value;
  }
  JAXSOFTMAX_HD static Fine whole(const Sum& s) { return static_cast<float>(s.total()); }
  JAXSOFTMAX_HD static Reciprocal ratio(const Sum& a, double total) {
    return Words(std::fabs(a.total()) / total);
  }
  JAXSOFTMAX_HD static Reciprocal reciprocal(const Sum& s, float) { return Words(1.0 / s.total()); }
  JAXSOFTMAX_HD static float exp_diff_over(float x, float m, Reciprocal r) {
    const FloatExp e = exp_parts(x, m);
    return ((e.q * r.value + r.error) + r.value) * e.scale;
  }
  // e^(x - m) / s for the products of times(): one rounding an element.
  JAXSOFTMAX_HD static Words factor(float x, float m, const Reciprocal& r) {
    const FloatExp e = exp_parts(x, m);
    return Words((1.0 + e.q) * e.scale * r.exact());
  }
  JAXSOFTMAX_HD static float times(float kept, const Words& factor) {
    return kept * factor.value + kept * factor.error;
  }
  // In double from the first addition: within a chunk, roundings to float can be systematic (5 ulp
  // for a pattern of 32 repeated 1000 times).
  template <int N>
  JAXSOFTMAX_HD static void add_terms(Sum& s, const float (&terms)[N]) {
    double wide[N];
#pragma unroll
    for (int j = 0; j < N; ++j) wide[j] = terms[j];
    s.add(tree_sum(wide));
  }
  template <int N>
  JAXSOFTMAX_HD static void add_products(Sum& s, const float (&a)[N], const float (&b)[N]) {
    double terms[N];
#pragma unroll
    for (int j = 0; j < N; ++j) terms[j] = static_cast<double>(a[j]) * b[j];
    s.add(tree_sum(terms));
  }
};

struct ExactDouble {
  using Acc = double;
  using Sum = TwoDoublesSum;
  using Fine = TwoDoubles;
  using Reciprocal = TwoDoubles;
  struct Ratio {
    TwoDoubles words;
  };
  static constexpr int kSlack = 32;

  JAXSOFTMAX_HD static DoubleExp exp_parts(double x, double m) {
    const Difference<double> d(x, m);
    return DoubleExp(d.value, d.error);
  }
  using Reference = double;
  JAXSOFTMAX_HD static double term(double x, Reference from) { return exp_parts(x, from).value(); }
  JAXSOFTMAX_HD static TwoDoubles rescaling(double from, double to) {
    return exp_parts(from, to).exact();
  }
  JAXSOFTMAX_HD static double total(const Sum& s, double) { return s.total(); }
  JAXSOFTMAX_HD static double log_total(const Sum& s, double) {
    return std::log(s.value) + s.error / s.value;
  }
  JAXSOFTMAX_HD static Fine whole(const Sum& s) { return {s.value, s.error}; }
  JAXSOFTMAX_HD static Reciprocal reciprocal(const Sum& s, double) {
    return quotient(1.0, normalized(s));
  }
  JAXSOFTMAX_HD static Ratio ratio(const Sum& a, double total) {
    const TwoDoubles r = quotient(normalized(a), total);
    return {r.value < 0 ? r * -1.0 : r};
  }
  JAXSOFTMAX_HD static double exp_diff_over(double x, double m, Reciprocal r) {
    const DoubleExp e = exp_parts(x, m);
    return (e.q * r.value + r.error + r.value) * e.scale;
  }
  JAXSOFTMAX_HD static Fine exp_diff_over(double x, double m, Ratio ratio) {
    const DoubleExp e = exp_parts(x, m);
    const TwoDoubles r = ratio.words;
    const double more = e.q * r.value + r.error, sum = r.value + more;
    return {sum * e.scale, ((r.value - sum) + more) * e.scale};
  }
  template <int N>
  JAXSOFTMAX_HD static void add_terms(Sum& s, const double (&terms)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) s.add(terms[j]);
  }
  template <int N>
  JAXSOFTMAX_HD static void add_products(Sum& s, const double (&a)[N], const double (&b)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const double product = rounded_product(a[j], b[j]);
      s.add(product);
      s.error += fma(a[j], b[j], -product);
    }
  }

 private:
  // A sum whose terms cancel has a value no larger than its error.
  JAXSOFTMAX_HD static TwoDoubles normalized(const Sum& s) {
    const Difference<double> d(s.value, -s.error);
    return {d.value, d.error};
  }
  JAXSOFTMAX_HD static TwoDoubles quotient(TwoDoubles a, TwoDoubles b) {
    const double value = a.value / b.value;
    return {value, (fma(-value, b.value, a.value) + (a.error - value * b.error)) / b.value};
  }
};

}  // namespace jaxsoftmax
