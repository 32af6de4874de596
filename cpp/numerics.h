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
//   Fine, whole(s)                what a formula computes in before it becomes an Acc; a plain sum
//   Ratio, ratio(a, total)        |a| / total of a sum a
//   kSlack                        how far below the largest element a logarithm lets m lie
//   exp_diff_over(x, m, r)        e^(x - m) / s, or (as Fine) times a ratio
//   factor(from, m, r), times(kept, factor)   the same from a term relative to `from`
//   add_terms, add_products       to a sum
#pragma once

#include <cmath>

#include "exp.h"
#include "sums.h"

namespace jaxsoftmax {

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
