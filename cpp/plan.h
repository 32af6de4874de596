// What to run: the plan (the twin of _plan_spec.py) and the rows it runs on. Plain structs: nothing
// here knows XLA or CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "view.h"

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

// Threads of a block that leave each the registers it needs (sm_90: no kernel spills).
inline constexpr int kMaxThreads = 512;
constexpr int one_pass_threads(int packs_an_input, bool loaded = false) {
  return packs_an_input <= (loaded ? 2 : 4) ? kMaxThreads : 256;
}

// Packs of each input in a lane's registers where blocks share a row, and of loaded rows.
inline constexpr int kClusterPacks = 8, kLoadedPacks = 8;

// Threads of a block of columns, and packs that a lane may have in shared memory.
inline constexpr int kColumnThreads = 256, kMaxColumnPacks = 4096;

inline constexpr int kPackBytes = 16;
inline constexpr int kStateBytes = 32;  // a state's slot in the workspace of split_k

// The workspace of split_k: a slot a piece of each row.
inline std::int64_t workspace_bytes(std::int64_t rows, int splits) {
  return rows * static_cast<std::int64_t>(splits) * kStateBytes;
}

// Rows of equal length, and what belongs to a row each: statistics in the type of arithmetic, a
// cotangent in the rows' own. Plain ones are row-major.
struct Rows {
  const void* in[kMaxInputs];
  const void* given[kMaxGiven];
  void* out;       // of the rows' shape, or one a row
  void* stats[2];  // a row's maximum and sum; null where nobody asked
  std::byte* workspace;
  std::int64_t rows, cols;
};
struct LoadedRows : Rows {
  Loading loading;
};

// Which rules a plan has to obey: of rows that lie side by side, plain or loaded, or of columns.
enum class Layout { rows, loaded, columns };

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
