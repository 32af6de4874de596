// What to run: the plan (the twin of _legal.py), the rows it runs on, and the check that the one
// holds the other. Plain structs: nothing here knows XLA or CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "lists.h"

namespace jaxsoftmax {

#define JAXSOFTMAX_PATHS(X) \
  X(one_pass)               \
  X(two_pass)               \
  X(split_k)

enum class Path : std::int32_t {
#define JAXSOFTMAX_PATH(name) name,
  JAXSOFTMAX_PATHS(JAXSOFTMAX_PATH)
#undef JAXSOFTMAX_PATH
};

// The integers of a plan, in the order of the Python dataclass, after `path`. A pack is 16 bytes.
#define JAXSOFTMAX_PLAN_FIELDS(X)                                                           \
  X(threads)        /* of a block, its producer warp not counted */                         \
  X(rows_per_block) /* threads / rows_per_block lanes of a block handle a row */            \
  X(reg_packs)      /* one_pass: packs a lane keeps in registers, over all inputs */        \
  X(smem_packs)     /* packs a lane keeps in shared memory; without reg_packs, in a ring */ \
  X(splits)         /* blocks of a row: one_pass a cluster's, split_k any on the device */

inline constexpr int kChunk = 4;  // packs of each input that a lane takes from a slot of the ring
inline constexpr int kMaxSlots = 64;
inline constexpr int kMinSlots = 4;  // of a ring that a piece may go round, which reads again
inline constexpr int kMaxCluster = 16;
inline constexpr int kLine = 8;  // packs of a line of L2: in a ring, rows begin at one
inline constexpr std::int64_t kMaxPiece = 1 << 27;  // packs of a block's piece in a ring

struct Plan {
  Path path;
#define JAXSOFTMAX_FIELD(name) std::int32_t name;
  JAXSOFTMAX_PLAN_FIELDS(JAXSOFTMAX_FIELD)
#undef JAXSOFTMAX_FIELD

  int lanes() const { return threads / rows_per_block; }
  // Whether a ring of shared-memory slots, filled by bulk copies, holds a block's part of the row.
  bool bulk() const { return reg_packs == 0 && smem_packs > 0; }
  int slots(int inputs) const { return smem_packs / (kChunk * inputs); }
  bool gpu_only() const { return bulk() || (path == Path::one_pass && splits > 1); }
};

enum class DType {
#define JAXSOFTMAX_DTYPE(Tag) Tag,
  JAXSOFTMAX_DTYPES(JAXSOFTMAX_DTYPE)
#undef JAXSOFTMAX_DTYPE
};

// Threads of a block that leave each the registers it needs (sm_90: no kernel spills).
inline constexpr int kMaxThreads = 512;
constexpr int one_pass_threads(int packs_an_input) {
  return packs_an_input <= 4 ? kMaxThreads : 256;
}

// Packs of each input in a lane's registers where blocks share a row.
inline constexpr int kClusterPacks = 8;

inline constexpr int kMaxInputs = 2, kMaxGiven = 3;
inline constexpr int kPackBytes = 16;
inline constexpr int kStateBytes = 32;  // a state's slot in the workspace of split_k

// The workspace of split_k: a slot a piece of each row.
inline std::int64_t workspace_bytes(std::int64_t rows, int splits) {
  return rows * static_cast<std::int64_t>(splits) * kStateBytes;
}

// Row-major rows of equal length, and what belongs to a row each: statistics in the type of
// arithmetic, a cotangent in the rows' own.
struct Rows {
  const void* in[kMaxInputs];
  const void* given[kMaxGiven];
  void* out;       // of the rows' shape, or one a row
  void* stats[2];  // a row's maximum and sum; null where nobody asked
  std::byte* workspace;
  std::int64_t rows, cols;
};

// What an op takes and gives, as ops.h describes it.
struct Signature {
  int inputs, given;
  bool maps, stats, pulled;
};
template <class Op>
constexpr Signature signature() {
  return {Op::kInputs, Op::kGiven, Op::kMaps, Op::kStats, Op::kPulled};
}

// Packs from the last boundary of `align` packs before a row to the row's end. A length that is no
// multiple of `align` packs may start anywhere.
inline std::int64_t packs_of(std::int64_t cols, int per_pack, int align = 1) {
  return cols % (align * per_pack) == 0 ? cols / per_pack
                                        : (cols + (align + 1) * per_pack - 2) / per_pack;
}

constexpr std::int64_t pieces(std::int64_t total, std::int64_t size) {
  return total / size + (total % size != 0);
}

// The rules of a plan, a part each: why it breaks one, empty if it does not.
namespace rules {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

constexpr bool power_of_two(int v) { return v > 0 && (v & (v - 1)) == 0; }

inline std::string block(const Plan& plan) {
  const int threads = plan.threads, rows = plan.rows_per_block;
  const bool legal = threads < 32 ? power_of_two(threads) : threads % 32 == 0;
  if (!legal || threads > kMaxThreads) {
    return text("threads must be a power of two below 32 or a multiple of 32 up to ", kMaxThreads,
                ", got ", threads);
  }
  if (rows < 1 || threads % rows != 0) {
    return text("rows_per_block must divide ", threads, " threads, got ", rows);
  }
  if (rows > 1 && (plan.lanes() > 32 || !power_of_two(plan.lanes()))) {
    return text("several rows a block (rows_per_block) need a power of two of at most 32 lanes a ",
                "row, got ", plan.lanes());
  }
  return "";
}

inline std::string registers(const Plan& plan, int inputs) {
  const int regs = plan.reg_packs, shared = plan.smem_packs;
  if (regs % inputs != 0 || regs > 32 || !power_of_two(regs / inputs)) {
    return text("reg_packs must be ", inputs, " times a power of two, at most 32, or 0 beside a ",
                "ring in smem_packs, got ", regs);
  }
  if (shared < 0 || shared % inputs != 0 || (shared > 0 && plan.rows_per_block > 1)) {
    return text("smem_packs must be a multiple of ", inputs, ", and 0 for several rows a block, ",
                "got ", shared);
  }
  if (static_cast<std::int64_t>(plan.threads) * shared * kPackBytes > INT32_MAX) {
    return text("smem_packs of all threads must be less than 2 GiB, got ", shared);
  }
  if (const int most = one_pass_threads(regs / inputs); plan.threads > most) {
    return text(regs, " reg_packs allow ", most, " threads, got ", plan.threads);
  }
  return "";
}

inline std::string ring(const Plan& plan, int inputs, int least) {
  const int slot = kChunk * inputs, packs = plan.smem_packs;
  if (plan.threads % 32 != 0 || plan.rows_per_block != 1) {
    return text("a ring has whole warps of threads and rows_per_block = 1, got ", plan.threads,
                " and ", plan.rows_per_block);
  }
  if (packs % slot != 0 || packs < least * slot || packs > kMaxSlots * slot) {
    return text("smem_packs of a ring must be a multiple of ", slot, " from ", least * slot, " to ",
                kMaxSlots * slot, ", got ", packs);
  }
  return "";
}

inline std::string piece(const Plan& plan, int per_pack, std::int64_t cols) {
  const std::int64_t size = pieces(packs_of(cols, per_pack, kLine), plan.splits);
  if (!plan.bulk() || size <= kMaxPiece) return "";
  return text("a ring takes pieces of at most ", kMaxPiece, " packs, got ", size);
}

inline std::string one_pass(const Plan& plan, int inputs, int per_pack, std::int64_t cols) {
  if (!power_of_two(plan.splits) || plan.splits > kMaxCluster) {
    return text("splits of one_pass must be a power of two up to ", kMaxCluster, ", got ",
                plan.splits);
  }
  if (plan.splits > 1 && (plan.threads % 32 != 0 || plan.rows_per_block != 1)) {
    return text("a cluster has whole warps of threads and rows_per_block = 1, got ", plan.threads,
                " and ", plan.rows_per_block);
  }
  if (plan.splits > 1 && plan.reg_packs > kClusterPacks * inputs) {
    return text("reg_packs of a cluster must be at most ", kClusterPacks * inputs, ", got ",
                plan.reg_packs);
  }
  std::string why = plan.bulk() ? ring(plan, inputs, 1) : registers(plan, inputs);
  if (!why.empty()) return why;
  const std::int64_t held = static_cast<std::int64_t>(plan.splits) * plan.lanes() *
                            (plan.reg_packs + plan.smem_packs) / inputs;
  const int align = plan.bulk() ? kLine : 1;
  if (packs_of(cols, per_pack, align) <= held) return piece(plan, per_pack, cols);
  const bool aligned = cols % (align * per_pack) == 0;
  return text("one_pass holds ", aligned ? held * per_pack : (held - align) * per_pack + 1,
              " columns, got ", cols);
}

inline std::string two_pass(const Plan& plan) {
  if (plan.reg_packs != 0 || plan.smem_packs != 0) {
    return text("two_pass keeps nothing, got reg_packs = ", plan.reg_packs,
                ", smem_packs = ", plan.smem_packs);
  }
  return plan.splits == 1 ? "" : text("two_pass has splits = 1, got ", plan.splits);
}

inline std::string split_k(const Plan& plan, int inputs, int per_pack, std::int64_t cols) {
  if (plan.reg_packs != 0 || plan.rows_per_block != 1) {
    return text("split_k has reg_packs = 0 and rows_per_block = 1, got ", plan.reg_packs, " and ",
                plan.rows_per_block);
  }
  if (plan.splits < 1 || plan.splits > 65535) {
    return text("splits must be 1 to 65535, got ", plan.splits);
  }
  if (plan.smem_packs == 0) return "";
  const std::string why = ring(plan, inputs, kMinSlots);
  return why.empty() ? piece(plan, per_pack, cols) : why;
}

}  // namespace rules

// Why `plan` cannot run an op of `inputs` inputs on rows of `cols` elements; empty if it can.
inline std::string refusal(const Plan& plan, int inputs, int itemsize, std::int64_t cols) {
  if (std::string why = rules::block(plan); !why.empty()) return why;
  switch (plan.path) {
    case Path::one_pass:
      return rules::one_pass(plan, inputs, kPackBytes / itemsize, cols);
    case Path::two_pass:
      return rules::two_pass(plan);
    case Path::split_k:
      return rules::split_k(plan, inputs, kPackBytes / itemsize, cols);
  }
  return rules::text("unknown path ", static_cast<int>(plan.path));
}

inline const char* path_name(Path path) {
  switch (path) {
#define JAXSOFTMAX_PATH(name) \
  case Path::name:            \
    return #name;
    JAXSOFTMAX_PATHS(JAXSOFTMAX_PATH)
#undef JAXSOFTMAX_PATH
  }
  return "unknown";
}

// "one_pass(threads=128, ...) on 4 rows of 1024 columns"
inline std::string describe(const Plan& plan, const Rows& rows) {
  std::ostringstream text;
  text << path_name(plan.path) << "(";
#define JAXSOFTMAX_FIELD(name) text << #name "=" << plan.name << ", ";
  JAXSOFTMAX_PLAN_FIELDS(JAXSOFTMAX_FIELD)
#undef JAXSOFTMAX_FIELD
  std::string out = text.str();
  out.resize(out.size() - 2);
  return out + ") on " + std::to_string(rows.rows) + " rows of " + std::to_string(rows.cols) +
         " columns";
}

}  // namespace jaxsoftmax
