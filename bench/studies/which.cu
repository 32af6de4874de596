// Which kernel when: every kind of plan of the library over rows x row bytes, each by its fastest
// candidate. Links cpp/cuda/softmax.cu.
#include <map>
#include <set>

#include "../../cpp/cuda/launch.h"
#include "harness.cuh"

namespace studies {
namespace {

using namespace jaxsoftmax;

struct Candidate {
  const char* kind;  // the column it competes in
  Plan plan;
};

std::int64_t up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

int power_of_two(std::int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// The plans worth trying on a shape. What the library or the device refuses is left out later.
class Candidates {
 public:
  Candidates(const Shape& shape, const cudaDeviceProp& device)
      : rows_(shape.rows), packs_(shape.packs()), sms_(device.multiProcessorCount) {
    // What a block can keep where 1, 2 and 4 share an SM; the rest is for states and barriers.
    constexpr int kRest = 6 << 10;
    for (int i = 0; i < 3; ++i) {
      budgets_[i] = (static_cast<int>(device.sharedMemPerMultiprocessor) >> i) - kRest;
    }
    registers();
    if (packs_ >= 512) shared();
    if (packs_ >= 512) clusters();
    if (packs_ >= 64) rings();
    two_pass();
    if (packs_ >= 1024) split_k();
  }
  std::vector<Candidate> all() const { return all_; }

 private:
  void add(const char* kind, Path path, int threads, int rows_per_block, int regs, int smem,
           int splits) {
    all_.push_back({kind, {path, threads, rows_per_block, regs, smem, splits}});
  }

  void registers() {
    for (int regs = 1; regs <= 32 && regs <= packs_; regs *= 2) {
      const std::int64_t lanes = up(packs_, regs);
      if (lanes <= 32) {
        const int width = power_of_two(lanes);
        add("registers", Path::one_pass, 128, 128 / width, regs, 0, 1);
      } else if (lanes <= kMaxThreads) {
        add("registers", Path::one_pass, static_cast<int>(up(lanes, 32) * 32), 1, regs, 0, 1);
      }
    }
  }

  void shared() {
    for (const auto& [threads, regs] : {std::pair(512, 4), {256, 8}, {256, 16}}) {
      const std::int64_t smem = up(packs_, threads) - regs;
      if (smem >= 1 && smem * threads * kPackBytes <= budgets_[0]) {
        add("registers + shared", Path::one_pass, threads, 1, regs, static_cast<int>(smem), 1);
      }
    }
  }

  void clusters() {
    for (int splits = 2; splits <= kMaxCluster; splits *= 2) {
      const std::int64_t packs = up(packs_, splits);
      for (int threads : {128, 256, 512}) {
        const std::int64_t a_lane = up(packs, threads);
        const int most = threads == 512 ? 4 : 16;
        const int regs = std::min(power_of_two(a_lane), most);
        const std::int64_t smem = std::max<std::int64_t>(a_lane - regs, 0);
        if (packs < threads || smem * threads * kPackBytes > budgets_[0]) continue;
        add("cluster", Path::one_pass, threads, 1, regs, static_cast<int>(smem), splits);
      }
      for (int budget : budgets_) ring("ring, cluster", Path::one_pass, 256, budget, packs, splits);
    }
  }

  void rings() {
    for (int threads : {128, 256, 512}) {
      for (int budget : budgets_) ring("ring", Path::one_pass, threads, budget, packs_, 1);
    }
  }

  // A ring of all of the budget; one_pass needs room for the block's packs.
  void ring(const char* kind, Path path, int threads, int budget, std::int64_t packs, int splits) {
    const int a_slot = kChunk * threads * kPackBytes;
    const int smem = std::min(budget / a_slot, kMaxSlots) * kChunk;
    if (path == Path::one_pass && std::int64_t{smem} * threads < packs) return;
    add(kind, path, threads, 1, 0, smem, splits);
  }

  void two_pass() {
    const std::int64_t lanes = power_of_two(up(packs_, 4));
    if (lanes <= 32) {
      add("two-pass", Path::two_pass, 128, static_cast<int>(128 / lanes), 0, 0, 1);
    }
    for (int threads : {64, 128, 256, 512}) {
      if (threads <= lanes && (threads * 4 >= lanes || threads == 512)) {
        add("two-pass", Path::two_pass, threads, 1, 0, 0, 1);
      }
    }
  }

  void split_k() {
    const std::int64_t an_sm = std::max<std::int64_t>(sms_ / rows_, 1);
    const auto few_packs = [&](std::int64_t splits) { return splits < 2 || splits * 64 > packs_; };
    for (std::int64_t splits : {an_sm, 2 * an_sm, 4 * an_sm}) {
      if (few_packs(splits)) continue;
      add("split-k", Path::split_k, 256, 1, 0, 0, static_cast<int>(splits));
    }
    for (std::int64_t splits : std::set<std::int64_t>{an_sm, 2 * an_sm, sms_ / 2, sms_ / 4}) {
      if (few_packs(splits)) continue;
      for (int i = 0; i < 2; ++i) {
        ring("split-k, one launch", Path::split_k, 256, budgets_[i], packs_,
             static_cast<int>(splits));
      }
    }
  }

  std::int64_t rows_, packs_;
  int sms_, budgets_[3];
  std::vector<Candidate> all_;
};

// How `candidate` is launched; nothing if the library refuses it.
std::optional<Launch> launcher(const Bench& bench, const Shape& shape, const Plan& plan,
                               const std::string& name) {
  const std::int64_t cols = shape.row_bytes / 2;
  const std::int64_t states = (plan.splits + 1) * shape.rows * kStateBytes;
  if (!refusal(plan, 1, 2, cols).empty() || states > Bench::kWorkspace) return std::nullopt;
  const auto rows = [shape, cols, workspace = bench.workspace()](const void* in, void* out) {
    Rows rows{};
    rows.in[0] = in;
    rows.out = out;
    rows.workspace = workspace;
    rows.rows = shape.rows;
    rows.cols = cols;
    return rows;
  };
  const auto launch = [=](cuda::Stage stage, const void* in, void* out, cudaStream_t stream) {
    return cuda::launch_softmax(DType::F16, rows(in, out), plan, stage, stream).error;
  };
  const cudaError_t error = launch(cuda::Stage::initialize, nullptr, nullptr, nullptr);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "left out: %s: %s\n", name.c_str(), cudaGetErrorString(error));
    return std::nullopt;
  }
  return [=](const void* in, void* out, cudaStream_t stream) {
    return launch(cuda::Stage::execute, in, out, stream);
  };
}

void report(const Shape& shape, const char* kind, const std::string& plan, const Timing& timing) {
  Line("which")
      .add("rows", shape.rows)
      .add("row_bytes", shape.row_bytes)
      .add("kind", kind)
      .add("plan", plan)
      .add("us", timing.us)
      .add("spread", timing.spread);
}

void fastest(Bench& bench, const Shape& shape) {
  struct Best {
    std::string plan;
    Timing timing;
  };
  std::map<std::string, Best> best;
  for (const auto& [kind, plan] : Candidates(shape, bench.device()).all()) {
    Rows rows{};
    rows.rows = shape.rows;
    rows.cols = shape.row_bytes / 2;
    const std::string name = describe(plan, rows);
    const auto launch = launcher(bench, shape, plan, name);
    if (!launch || !bench.right(name.c_str(), shape, *launch).value_or(false)) continue;
    // A first look; whoever may be the fastest of its kind is timed in earnest.
    const auto found = best.find(kind);
    const double us = bench.time(shape, *launch, 3).us;
    if (found != best.end() && us > 1.03 * found->second.timing.us) continue;
    const Timing timing = bench.time(shape, *launch);
    if (found == best.end() || timing.us < found->second.timing.us) best[kind] = {name, timing};
  }
  for (const auto& [kind, entry] : best) report(shape, kind.c_str(), entry.plan, entry.timing);
  report(shape, "copy", "", bench.copy(shape));
}

}  // namespace

void which(Bench& bench) {
  // Beyond 1 MiB, by factors of 4 up to the longest row of the seed.
  constexpr std::int64_t kMiB = 1 << 20;
  for (std::int64_t row_bytes = 128; row_bytes <= 64 * kMiB;
       row_bytes *= row_bytes < kMiB ? 2 : 4) {
    for (std::int64_t rows = 1; rows <= 65536; rows *= 4) {
      const Shape shape{rows, row_bytes};
      if (shape.bytes() >= 64 << 10 && shape.bytes() <= 512 * kMiB) fastest(bench, shape);
    }
  }
}

}  // namespace studies
