// What the studies share: rotated buffers, device time by graph replays, a reference to check
// against, and JSON lines. Every array is float16; rows are whole packs.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace studies {

inline void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define MUST(call) studies::must((call), #call)

// One JSON object on a line of stdout.
class Line {
 public:
  explicit Line(const char* study) { add("study", study); }
  ~Line() {
    std::printf("{%s}\n", text_.c_str());
    std::fflush(stdout);
  }
  template <class T>
  Line& add(const char* key, const T& value) {
    text_ += (text_.empty() ? "\"" : ", \"") + std::string(key) + "\": ";
    if constexpr (std::is_floating_point_v<T>) {
      char digits[32];
      std::snprintf(digits, sizeof digits, "%.6g", static_cast<double>(value));
      text_ += digits;
    } else if constexpr (std::is_integral_v<T>) {
      text_ += std::to_string(value);
    } else {
      text_ += "\"" + std::string(value) + "\"";
    }
    return *this;
  }

 private:
  std::string text_;
};

struct Shape {
  std::int64_t rows, row_bytes;
  std::int64_t bytes() const { return rows * row_bytes; }
  std::int64_t packs() const { return row_bytes / 16; }  // of a row
  bool operator==(const Shape& o) const { return rows == o.rows && row_bytes == o.row_bytes; }
};

struct Timing {
  double us, spread;  // of one launch: the median replay, and (slowest - fastest) / median
};

// Puts one launch on a stream.
using Launch = std::function<cudaError_t(const void* in, void* out, cudaStream_t)>;

class Bench {
 public:
  static constexpr std::int64_t kPool = std::int64_t{1} << 30;  // bytes of inputs, and of outputs
  static constexpr std::int64_t kWorkspace = std::int64_t{64} << 20;

  Bench();

  int sms() const { return device_.multiProcessorCount; }
  const cudaDeviceProp& device() const { return device_; }
  std::byte* workspace() const { return workspace_; }

  // Runs `launch` once into poisoned memory and compares with the reference: nothing if it cannot
  // be launched, whether all is right if it can. A wrong result also ends the program with
  // status 1.
  std::optional<bool> right(const char* name, const Shape& shape, const Launch& launch);

  // The time of one launch. Launches rotate through arrays of `shape` that together exceed L2
  // three times, or, warm, use one array again and again.
  Timing time(const Shape& shape, const Launch& launch, int replays = 9, bool warm = false);

  // The better of the runtime's copy and a vectorised one.
  Timing copy(const Shape& shape);

  int status() const { return wrong_ > 0 ? 1 : 0; }

 private:
  const float* expected(const Shape& shape);

  cudaDeviceProp device_;
  cudaStream_t stream_;
  std::byte *in_, *out_, *workspace_;
  float* expected_;
  unsigned long long* count_;
  Shape expected_for_{0, 0};
  int wrong_ = 0;
};

// The library's own paths, in which.cu: the only part that links the library.
void which(Bench& bench);

}  // namespace studies
