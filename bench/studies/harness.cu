// Timing and checking: see harness.cuh.
#include "harness.cuh"

namespace studies {
namespace {

constexpr int kThreads = 256;

// About normal, with a standard deviation of 3.
__global__ void fill(__half* x, std::int64_t count) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    std::uint64_t h = (i + 1) * 0x9e3779b97f4a7c15u;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    h ^= h >> 31;
    const unsigned sum = (h & 0xffff) + (h >> 16 & 0xffff) + (h >> 32 & 0xffff) + (h >> 48);
    x[i] = __float2half((sum * 0x1p-16f - 2) * 5.196f);
  }
}

template <class Combine>
__device__ double over_block(double mine, Combine combine) {
  __shared__ double all[kThreads];
  __syncthreads();
  all[threadIdx.x] = mine;
  __syncthreads();
  double total = all[0];
  for (int i = 1; i < kThreads; ++i) total = combine(total, all[i]);
  return total;
}

// Softmax in the plainest way, in double: a block a row, an element at a time.
__global__ void reference(const __half* x, float* y, std::int64_t cols) {
  x += blockIdx.x * cols;
  y += blockIdx.x * cols;
  double most = -1e30, sum = 0;
  for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) {
    most = fmax(most, static_cast<double>(__half2float(x[c])));
  }
  most = over_block(most, [](double a, double b) { return fmax(a, b); });
  for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) sum += exp(__half2float(x[c]) - most);
  sum = over_block(sum, [](double a, double b) { return a + b; });
  for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) {
    y[c] = static_cast<float>(exp(__half2float(x[c]) - most) / sum);
  }
}

// Counts what is further than one ulp of float16 from the reference; NaN is.
__global__ void compare(const __half* y, const float* expected, std::int64_t count,
                        unsigned long long* wrong) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const float want = expected[i], bound = want * 0x1p-10f + 0x1p-24f;
    if (!(fabsf(__half2float(y[i]) - want) <= bound)) atomicAdd(wrong, 1ull);
  }
}

__global__ void copy_packs(const uint4* in, uint4* out, std::int64_t count) {
  const std::int64_t first = std::int64_t{blockIdx.x} * 4 * kThreads + threadIdx.x;
  uint4 held[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (first + k * kThreads < count) held[k] = __ldg(in + first + k * kThreads);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (first + k * kThreads < count) out[first + k * kThreads] = held[k];
  }
}

}  // namespace

Bench::Bench() {
  MUST(cudaGetDeviceProperties(&device_, 0));
  MUST(cudaStreamCreate(&stream_));
  MUST(cudaMalloc(&in_, kPool));
  MUST(cudaMalloc(&out_, kPool));
  MUST(cudaMalloc(&expected_, 2 * kPool));
  MUST(cudaMalloc(&workspace_, kWorkspace));
  MUST(cudaMalloc(&count_, sizeof *count_));
  fill<<<4 * sms(), kThreads, 0, stream_>>>(reinterpret_cast<__half*>(in_), kPool / 2);
  MUST(cudaStreamSynchronize(stream_));
}

const float* Bench::expected(const Shape& shape) {
  if (!(shape == expected_for_)) {
    reference<<<shape.rows, kThreads, 0, stream_>>>(reinterpret_cast<__half*>(in_), expected_,
                                                    shape.row_bytes / 2);
    MUST(cudaGetLastError());
    expected_for_ = shape;
  }
  return expected_;
}

std::optional<bool> Bench::right(const char* name, const Shape& shape, const Launch& launch) {
  const std::int64_t count = shape.bytes() / 2;
  const float* want = expected(shape);
  unsigned long long wrong = 0;
  MUST(cudaMemsetAsync(out_, 0xff, shape.bytes(), stream_));
  MUST(cudaMemsetAsync(count_, 0, sizeof *count_, stream_));
  if (const cudaError_t error = launch(in_, out_, stream_); error != cudaSuccess) {
    std::fprintf(stderr, "left out: %s: %s\n", name, cudaGetErrorString(error));
    (void)cudaGetLastError();
    return std::nullopt;
  }
  compare<<<8 * sms(), kThreads, 0, stream_>>>(reinterpret_cast<__half*>(out_), want, count,
                                               count_);
  MUST(cudaMemcpyAsync(&wrong, count_, sizeof wrong, cudaMemcpyDeviceToHost, stream_));
  must(cudaStreamSynchronize(stream_), name);
  if (wrong == 0) return true;
  ++wrong_;
  std::fprintf(stderr, "WRONG: %s: %llu of %lld elements\n", name, wrong,
               static_cast<long long>(count));
  Line("wrong")
      .add("name", name)
      .add("rows", shape.rows)
      .add("row_bytes", shape.row_bytes)
      .add("elements", wrong);
  return false;
}

Timing Bench::time(const Shape& shape, const Launch& launch, int replays, bool warm) {
  // Launches of a graph: all arrays once, and on until 2 GB are moved or 512 launches made.
  const std::int64_t bytes = shape.bytes();
  const std::int64_t past_l2 = 3 * std::int64_t{device_.l2CacheSize} / (2 * bytes) + 1;
  const std::int64_t arrays = warm ? 1 : std::clamp<std::int64_t>(past_l2, 1, kPool / bytes);
  const std::int64_t most = std::max<std::int64_t>(512 / arrays, 1);
  const std::int64_t rounds = std::clamp<std::int64_t>(kPool / (bytes * arrays), 1, most);
  const std::int64_t launches = arrays * rounds;

  cudaGraph_t graph;
  cudaGraphExec_t replay;
  MUST(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  for (std::int64_t i = 0; i < launches; ++i) {
    const std::int64_t at = i % arrays * bytes;
    MUST(launch(in_ + at, out_ + at, stream_));
  }
  MUST(cudaStreamEndCapture(stream_, &graph));
  MUST(cudaGraphInstantiate(&replay, graph, 0));

  // Replays follow each other without a gap for the host; the first one warms up.
  std::vector<cudaEvent_t> events(replays + 1);
  for (cudaEvent_t& event : events) {
    MUST(cudaEventCreate(&event));
    MUST(cudaGraphLaunch(replay, stream_));
    MUST(cudaEventRecord(event, stream_));
  }
  MUST(cudaStreamSynchronize(stream_));
  std::vector<float> ms(replays);
  for (int i = 0; i < replays; ++i) {
    MUST(cudaEventElapsedTime(&ms[i], events[i], events[i + 1]));
  }
  for (cudaEvent_t event : events) MUST(cudaEventDestroy(event));
  MUST(cudaGraphExecDestroy(replay));
  MUST(cudaGraphDestroy(graph));
  std::sort(ms.begin(), ms.end());
  const double median = ms[replays / 2];
  return {1e3 * median / launches, (ms.back() - ms.front()) / median};
}

Timing Bench::copy(const Shape& shape) {
  const std::int64_t packs = shape.bytes() / 16;
  const Timing runtime = time(shape, [&](const void* in, void* out, cudaStream_t stream) {
    return cudaMemcpyAsync(out, in, shape.bytes(), cudaMemcpyDeviceToDevice, stream);
  });
  const Timing kernel = time(shape, [&](const void* in, void* out, cudaStream_t stream) {
    const unsigned grid = static_cast<unsigned>((packs + 4 * kThreads - 1) / (4 * kThreads));
    copy_packs<<<grid, kThreads, 0, stream>>>(static_cast<const uint4*>(in),
                                              static_cast<uint4*>(out), packs);
    return cudaGetLastError();
  });
  return runtime.us < kernel.us ? runtime : kernel;
}

}  // namespace studies
