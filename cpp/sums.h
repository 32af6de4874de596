// Row sums that stay right at any length, and what they are made of; host and device.
#pragma once

#include <cmath>
#include <limits>

#if defined(__CUDACC__)
#define JAXSOFTMAX_HD __host__ __device__ __forceinline__
#else
#define JAXSOFTMAX_HD inline __attribute__((always_inline))
#endif

namespace jaxsoftmax {

template <class Acc>
JAXSOFTMAX_HD constexpr Acc infinity() {
  return std::numeric_limits<Acc>::infinity();
}

// The larger of two; NaN if either is. A row's largest element then tells a NaN from a +inf, which
// make the sum NaN alike.
template <class Acc>
JAXSOFTMAX_HD Acc larger(Acc a, Acc b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Acc) == 4) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
    return a;
  }
#endif
  return a > b || a != a ? a : b;
}

// Combines N values (a power of two) pairwise. Equal terms add up exactly.
template <class Acc, int N, class Combine>
JAXSOFTMAX_HD Acc tree(const Acc (&values)[N], Combine combine) {
  if constexpr (N == 1) {
    return values[0];
  } else {
    Acc half[N / 2];
#pragma unroll
    for (int j = 0; j < N / 2; ++j) half[j] = combine(values[j], values[j + N / 2]);
    return tree(half, combine);
  }
}

template <class Acc, int N>
JAXSOFTMAX_HD Acc tree_sum(const Acc (&values)[N]) {
  return tree(values, [](Acc a, Acc b) { return a + b; });
}

// a - b = value + error, exactly (Knuth's TwoDiff); the error is NaN where the value is not finite.
template <class Acc>
struct Difference {
  Acc value, error;
  JAXSOFTMAX_HD Difference(Acc a, Acc b) {
    value = a - b;
    const Acc back = value - a;
    error = (a - (value - back)) - (b + back);
  }
};

// a * b as a number of its own: not fused with what is added to it, which is its own rounding.
JAXSOFTMAX_HD double rounded_product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// A number as a sum of two doubles, of which the second is small. Operations round the second
// alone, so that a formula rounds as a single operation does, when its result becomes a double.
struct TwoDoubles {
  double value, error;
  JAXSOFTMAX_HD TwoDoubles(double value = 0, double error = 0) : value(value), error(error) {}
  // Beside an infinite value the error is NaN: the value alone is what plain arithmetic would give.
  JAXSOFTMAX_HD explicit operator double() const {
    return error - error == 0 ? value + error : value;
  }
  JAXSOFTMAX_HD friend TwoDoubles operator-(double a, TwoDoubles b) {
    const Difference<double> d(a, b.value);
    return {d.value, d.error - b.error};
  }
  JAXSOFTMAX_HD friend TwoDoubles operator*(TwoDoubles a, double b) {
    const double product = rounded_product(a.value, b);
    return {product, fma(a.value, b, -product) + a.error * b};
  }
  JAXSOFTMAX_HD friend TwoDoubles operator*(double a, TwoDoubles b) { return b * a; }
};

// A row's sum with its accumulated rounding error (Neumaier): right at any length.
// merged() is what lanes exchange of a sum when they add theirs up.
template <class T>
struct CompensatedSum {
  using Merged = CompensatedSum;
  T value = 0, error = 0;
  JAXSOFTMAX_HD Merged merged() const { return *this; }
  JAXSOFTMAX_HD void add(T term) {
    const T sum = value + term;
    const T back = sum - value;
    error += (value - (sum - back)) + (term - back);
    value = sum;
  }
  JAXSOFTMAX_HD void add(CompensatedSum other) {
    add(other.value);
    error += other.error;
  }
  JAXSOFTMAX_HD void scale(T factor) {
    value *= factor;
    error *= factor;
  }
  // An overflowed sum has a NaN error: the value alone is what plain addition would give.
  JAXSOFTMAX_HD T total() const { return error - error == 0 ? value + error : value; }
};

// The same of doubles, whose rescaling is no coarser than their addition.
struct TwoDoublesSum : CompensatedSum<double> {
  JAXSOFTMAX_HD TwoDoublesSum() {}
  JAXSOFTMAX_HD TwoDoublesSum(Merged sum) : CompensatedSum(sum) {}
  JAXSOFTMAX_HD void scale(TwoDoubles factor) {
    const TwoDoubles scaled = factor * value;
    error = error * factor.value + scaled.error;
    value = scaled.value;
  }
};

// The same for float terms, in half the operations where double is fast.
struct DoubleSum {
  using Merged = DoubleSum;
  double value = 0;
  JAXSOFTMAX_HD Merged merged() const { return *this; }
  JAXSOFTMAX_HD void add(double term) { value += term; }
  JAXSOFTMAX_HD void add(DoubleSum other) { value += other.value; }
  JAXSOFTMAX_HD void scale(double factor) { value *= factor; }
  JAXSOFTMAX_HD double total() const { return value; }
};

// For the results of 16-bit dtypes the few additions across lanes need no error term.
struct FastSum : CompensatedSum<float> {
  struct Merged {
    float value;
    JAXSOFTMAX_HD void add(Merged other) { value += other.value; }
  };
  JAXSOFTMAX_HD FastSum() {}
  JAXSOFTMAX_HD FastSum(Merged sum) { value = sum.value; }
  JAXSOFTMAX_HD Merged merged() const { return {total()}; }
};

}  // namespace jaxsoftmax
