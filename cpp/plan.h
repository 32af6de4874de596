// What to run: the plan (the twin of _plan.py), the rows it runs on, and the check that the one
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
#define JAXSOFTMAX_PLAN_FIELDS(X)                                                    \
  X(threads)        /* of a block */                                                 \
  X(rows_per_block) /* threads / rows_per_block lanes handle a row */                \
  X(reg_packs)      /* one_pass: packs a lane keeps in registers, over all inputs */ \
  X(smem_packs)     /* one_pass: packs a lane keeps in shared memory */              \
  X(splits)         /* split_k: pieces that a row is cut into */

struct Plan {
  Path path;
#define JAXSOFTMAX_FIELD(name) std::int32_t name;
  JAXSOFTMAX_PLAN_FIELDS(JAXSOFTMAX_FIELD)
#undef JAXSOFTMAX_FIELD

  int lanes() const { return threads / rows_per_block; }
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

inline constexpr int kMaxInputs = 2;
inline constexpr int kPackBytes = 16;
inline constexpr int kStateBytes = 32;  // a state's slot in the workspace of split_k

// Row-major rows of equal length.
struct Rows {
  const void* in[kMaxInputs];
  void* out;
  std::byte* workspace;
  std::int64_t rows, cols;
};

// Packs that cover a row which starts anywhere in a pack (or, if rows are whole packs, at one).
inline std::int64_t packs_of(std::int64_t cols, int per_pack) {
  return cols % per_pack == 0 ? cols / per_pack : (cols + 2 * per_pack - 2) / per_pack;
}

inline std::int64_t pieces(std::int64_t total, std::int64_t size) {
  return total / size + (total % size != 0);
}

// Why `plan` cannot run an op of `inputs` inputs on rows of `cols` elements; empty if it can.
inline std::string refusal(const Plan& plan, int inputs, int itemsize, std::int64_t cols) {
  std::ostringstream why;
  const auto power_of_two = [](int v) { return v > 0 && (v & (v - 1)) == 0; };
  const int threads = plan.threads;
  if (threads < 1 || threads > kMaxThreads ||
      (threads % 32 != 0 && !(threads < 32 && power_of_two(threads)))) {
    why << "threads must be a power of two below 32 or a multiple of 32 up to " << kMaxThreads
        << ", got " << threads;
  } else if (plan.rows_per_block < 1 || threads % plan.rows_per_block != 0) {
    why << "rows_per_block must divide " << threads << " threads, got " << plan.rows_per_block;
  } else if (plan.rows_per_block > 1 && (plan.lanes() > 32 || !power_of_two(plan.lanes()))) {
    why << "several rows a block need a power of two of at most 32 lanes a row, got "
        << plan.lanes();
  } else if (plan.path == Path::one_pass) {
    const int regs = plan.reg_packs, most_threads = one_pass_threads(regs / inputs);
    const int per_pack = kPackBytes / itemsize;
    if (regs % inputs != 0 || regs > 32 || !power_of_two(regs / inputs)) {
      why << "reg_packs must be " << inputs << " times a power of two, at most 32, got " << regs;
    } else if (plan.smem_packs < 0 || plan.smem_packs % inputs != 0 ||
               (plan.smem_packs > 0 && plan.rows_per_block > 1)) {
      why << "smem_packs must be a multiple of " << inputs
          << ", and 0 for several rows a block, got " << plan.smem_packs;
    } else if (static_cast<std::int64_t>(threads) * plan.smem_packs * kPackBytes > INT32_MAX) {
      why << "smem_packs of all threads must be less than 2 GiB, got " << plan.smem_packs;
    } else if (plan.splits != 1) {
      why << "one_pass has splits = 1, got " << plan.splits;
    } else if (threads > most_threads) {
      why << regs << " reg_packs allow " << most_threads << " threads, got " << threads;
    } else {
      const std::int64_t held =
          static_cast<std::int64_t>(plan.lanes()) * (regs + plan.smem_packs) / inputs;
      if (packs_of(cols, per_pack) > held) {
        why << "one_pass holds " << held * per_pack - (cols % per_pack == 0 ? 0 : per_pack - 1)
            << " columns, got " << cols;
      }
    }
  } else if (plan.reg_packs != 0 || plan.smem_packs != 0) {
    why << "only one_pass keeps packs, got reg_packs = " << plan.reg_packs
        << ", smem_packs = " << plan.smem_packs;
  } else if (plan.path == Path::two_pass) {
    if (plan.splits != 1) why << "two_pass has splits = 1, got " << plan.splits;
  } else if (plan.path == Path::split_k) {
    if (plan.rows_per_block != 1) {
      why << "split_k has rows_per_block = 1, got " << plan.rows_per_block;
    } else if (plan.splits < 1 || plan.splits > 65535) {
      why << "splits must be 1 to 65535, got " << plan.splits;
    }
  } else {
    why << "unknown path " << static_cast<int>(plan.path);
  }
  return why.str();
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
