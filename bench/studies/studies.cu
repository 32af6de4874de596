// The studies behind docs/dispatch.md, float16 on one GPU, as JSON lines:
//
//   l2          two-pass, by how many bytes lie between the two reads of a byte
//   unroll      two-pass with 1 to 16 packs in flight a lane
//   occupancy   one-pass in registers, compiled for 1 to 6 blocks an SM
//   online      four ways to keep a running maximum
//   which       the library's paths over rows x row bytes (which.cu)
//
// Usage: studies [NAME ...]; all of them without a name. Exit status: 1 if a result is wrong, 2 if
// CUDA fails.
#include "harness.cuh"
#include "kernels.cuh"

namespace studies {
namespace {

template <auto kernel>
void add_resources(Line& line, int shared = 0) {
  cudaFuncAttributes found;
  int blocks = 0;
  MUST(cudaFuncGetAttributes(&found, kernel));
  MUST(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared));
  line.add("registers", found.numRegs)
      .add("local_bytes", static_cast<std::int64_t>(found.localSizeBytes))
      .add("blocks_an_sm", blocks);
}

template <int kUnroll, Fold kFold, bool kPastL1 = false>
Launch two_pass(const Shape& shape, unsigned grid, Second second = Second::reversed) {
  return [=](const void* in, void* out, cudaStream_t stream) {
    streaming<kUnroll, kFold, kPastL1>
        <<<grid, kThreads, 0, stream>>>(static_cast<const Pack*>(in), static_cast<Pack*>(out),
                                        shape.rows, static_cast<int>(shape.packs()), second);
    return cudaGetLastError();
  };
}

template <int kPacks, int kBlocks, Fold kFold>
Launch one_pass(const Shape& shape, int shared = 0) {
  constexpr auto kernel = resident<kPacks, kBlocks, kFold>;
  MUST(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  return [=](const void* in, void* out, cudaStream_t stream) {
    kernel<<<static_cast<unsigned>(shape.rows), kThreads, shared, stream>>>(
        static_cast<const Pack*>(in), static_cast<Pack*>(out), static_cast<int>(shape.packs()));
    return cudaGetLastError();
  };
}

struct How {
  bool warm = false;
  int shared = 0;  // bytes that nobody uses: they keep further blocks off an SM
};

// Checks, times and reports one variant; `add` puts what is particular to it on the line.
template <auto kernel, class Add>
void measure(Bench& bench, const char* study, const Shape& shape, const Launch& launch, How how,
             const Add& add) {
  if (!bench.right(study, shape, launch).value_or(false)) return;
  const Timing timing = bench.time(shape, launch, 9, how.warm);
  Line line(study);
  line.add("rows", shape.rows).add("row_bytes", shape.row_bytes);
  add(line);
  add_resources<kernel>(line, how.shared);
  line.add("us", timing.us).add("spread", timing.spread);
}

void report_copy(Bench& bench, const Shape& shape) {
  const Timing timing = bench.copy(shape);
  Line("copy").add("bytes", shape.bytes()).add("us", timing.us).add("spread", timing.spread);
}

void l2(Bench& bench) {
  const int in_flight = 4 * bench.sms();  // the kernel is compiled for 4 blocks an SM
  for (int mb : {1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 100, 128, 200}) {
    const std::int64_t row_bytes = mb * 1000000ll / in_flight / 16 * 16;
    const Shape shape{Bench::kPool / (row_bytes * in_flight) * in_flight, row_bytes};
    const auto launch = [&](Second second) {
      return two_pass<4, Fold::lagging, true>(shape, in_flight, second);
    };
    if (!bench.right("l2 forward", shape, launch(Second::forward)).value_or(false) ||
        !bench.right("l2 reversed", shape, launch(Second::reversed)).value_or(false)) {
      continue;
    }
    Line line("l2");
    line.add("rows", shape.rows).add("row_bytes", row_bytes).add("rows_in_flight", in_flight);
    add_resources<streaming<4, Fold::lagging, true>>(line);
    line.add("fold_us", bench.time(shape, launch(Second::none)).us)
        .add("forward_us", bench.time(shape, launch(Second::forward)).us)
        .add("reversed_us", bench.time(shape, launch(Second::reversed)).us);
  }
  report_copy(bench, {1, Bench::kPool});
}

template <int kUnroll>
void unroll(Bench& bench, const Shape& shape) {
  measure<streaming<kUnroll, Fold::lagging, false>>(
      bench, "unroll", shape,
      two_pass<kUnroll, Fold::lagging>(shape, static_cast<unsigned>(shape.rows)), {},
      [](Line& line) { line.add("unroll", kUnroll); });
  if constexpr (kUnroll < 16) unroll<2 * kUnroll>(bench, shape);
}

template <int kPacks, int kBlocks = 1>
void occupancy(Bench& bench, const Shape& shape) {
  // Exactly kBlocks blocks an SM: the compiler makes room for them, shared memory for no more.
  const int shared = static_cast<int>(bench.device().sharedMemPerMultiprocessor) / kBlocks - 2048;
  measure<resident<kPacks, kBlocks, Fold::separate>>(
      bench, "occupancy", shape, one_pass<kPacks, kBlocks, Fold::separate>(shape, shared),
      {false, shared}, [](Line& line) { line.add("packs", kPacks).add("blocks", kBlocks); });
  if constexpr (kBlocks < 6) occupancy<kPacks, kBlocks + 1>(bench, shape);
}

template <Fold kFold>
void online(Bench& bench, const char* fold, bool warm) {
  const auto add = [&](const char* path) {
    return [=](Line& line) { line.add("path", path).add("fold", fold).add("warm", int{warm}); };
  };
  // Warm: inputs and outputs of 16 MB stay in L2, so that arithmetic shows.
  const Shape held{warm ? 512 : 8192, 32 << 10}, streamed{warm ? 256 : 4096, 64 << 10};
  measure<resident<8, 3, kFold>>(bench, "online", held, one_pass<8, 3, kFold>(held), {warm},
                                 add("one_pass"));
  measure<streaming<4, kFold, false>>(
      bench, "online", streamed, two_pass<4, kFold>(streamed, static_cast<unsigned>(streamed.rows)),
      {warm}, add("two_pass"));
}

void run(Bench& bench, const std::string& study) {
  constexpr std::int64_t kKiB = 1 << 10;
  if (study == "which") which(bench);
  if (study == "l2") l2(bench);
  if (study == "unroll") {
    // Many rows; fewer; one block an SM, which alone must keep the memory busy.
    for (const Shape& shape :
         {Shape{8192, 32 * kKiB}, Shape{1024, 256 * kKiB}, Shape{bench.sms(), 1024 * kKiB}}) {
      report_copy(bench, shape);
      unroll<1>(bench, shape);
    }
  }
  if (study == "occupancy") {
    report_copy(bench, {8192, 32 * kKiB});
    occupancy<8>(bench, {8192, 8 * kThreads * 16});
    occupancy<16>(bench, {4096, 16 * kThreads * 16});
  }
  if (study == "online") {
    report_copy(bench, {8192, 32 * kKiB});
    for (bool warm : {false, true}) {
      online<Fold::every_pack>(bench, "every pack", warm);
      online<Fold::every_rise>(bench, "every rise", warm);
      online<Fold::lagging>(bench, "lagging", warm);
      online<Fold::separate>(bench, "separate", warm);
    }
  }
}

}  // namespace
}  // namespace studies

int main(int count, char** names) {
  std::vector<std::string> chosen(names + 1, names + count);
  if (chosen.empty()) chosen = {"l2", "unroll", "occupancy", "online", "which"};
  studies::Bench bench;
  int driver = 0, runtime = 0;
  MUST(cudaDriverGetVersion(&driver));
  MUST(cudaRuntimeGetVersion(&runtime));
  studies::Line("device")
      .add("name", bench.device().name)
      .add("sms", bench.sms())
      .add("l2_bytes", bench.device().l2CacheSize)
      .add("cuda_driver", driver)
      .add("cuda_runtime", runtime);
  for (const std::string& study : chosen) studies::run(bench, study);
  return bench.status();
}
