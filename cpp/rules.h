// What makes a plan legal: the twin of the checks in _legal.py.
#pragma once

#include <sstream>
#include <string>

#include "plan.h"

namespace jaxsoftmax {

// The rules of a plan, a part each: why it breaks one, empty if it does not.
namespace rules {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

constexpr bool power_of_two(int v) { return v > 0 && (v & (v - 1)) == 0; }

inline std::string block(const Plan& plan, Layout layout) {
  const int threads = plan.threads, rows = plan.rows_per_block;
  const int most = layout == Layout::columns ? kColumnThreads : kMaxThreads;
  const bool legal = threads < 32 ? power_of_two(threads) : threads % 32 == 0;
  if (!legal || threads > most) {
    return text("threads must be a power of two below 32 or a multiple of 32 up to ", most,
                ", got ", threads);
  }
  if (rows < 1 || threads % rows != 0) {
    return text("rows_per_block must divide ", threads, " threads, got ", rows);
  }
  if (layout == Layout::columns) {
    return power_of_two(rows)
               ? ""
               : text("rows_per_block of columns must be a power of two, got ", rows);
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

inline std::string loaded(const Plan& plan, int inputs) {
  if (plan.smem_packs != 0) return text("loaded rows have smem_packs = 0, got ", plan.smem_packs);
  if (const int most = one_pass_threads(plan.reg_packs / inputs, true); plan.threads > most) {
    return text(plan.reg_packs, " reg_packs of loaded rows allow ", most, " threads, got ",
                plan.threads);
  }
  if (plan.reg_packs <= kLoadedPacks * inputs) return "";
  return text("reg_packs of loaded rows must be at most ", kLoadedPacks * inputs, ", got ",
              plan.reg_packs);
}

inline std::string columns(const Plan& plan, int inputs, std::int64_t cols) {
  const int shared = plan.smem_packs;
  if (plan.reg_packs != 0) return text("columns have reg_packs = 0, got ", plan.reg_packs);
  if (plan.path != Path::one_pass && shared != 0) {
    return text(path_name(plan.path), " of columns keeps nothing, got ", shared);
  }
  if (plan.path == Path::split_k) return "";
  if (plan.path == Path::one_pass &&
      (shared < inputs || shared % inputs != 0 || shared > kMaxColumnPacks)) {
    return text("smem_packs of columns must be a multiple of ", inputs, " up to ", kMaxColumnPacks,
                ", got ", shared);
  }
  if (!power_of_two(plan.splits) || plan.splits > kMaxCluster) {
    return text("splits of ", path_name(plan.path), " must be a power of two up to ", kMaxCluster,
                ", got ", plan.splits);
  }
  if (plan.splits > 1 && plan.threads % 32 != 0) {
    return text("a cluster has whole warps of threads, got ", plan.threads);
  }
  const std::int64_t held =
      static_cast<std::int64_t>(plan.splits) * plan.lanes() * (shared / inputs);
  return plan.path == Path::two_pass || cols <= held
             ? ""
             : text("one_pass holds ", held, " columns, got ", cols);
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

inline std::string split_k(const Plan& plan, int inputs, int per_pack, std::int64_t cols,
                           Layout layout) {
  if (plan.reg_packs != 0 || (plan.rows_per_block != 1 && layout != Layout::columns)) {
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
inline std::string refusal(const Plan& plan, int inputs, int itemsize, std::int64_t cols,
                           Layout layout = Layout::rows) {
  std::string why = rules::block(plan, layout);
  if (why.empty() && layout == Layout::loaded) why = rules::loaded(plan, inputs);
  if (why.empty() && layout == Layout::columns) why = rules::columns(plan, inputs, cols);
  if (!why.empty()) return why;
  switch (plan.path) {
    case Path::one_pass:
      return layout == Layout::columns ? ""
                                       : rules::one_pass(plan, inputs, kPackBytes / itemsize, cols);
    case Path::two_pass:
      return layout == Layout::columns ? "" : rules::two_pass(plan);
    case Path::split_k:
      return rules::split_k(plan, inputs, kPackBytes / itemsize, cols, layout);
  }
  return rules::text("unknown path ", static_cast<int>(plan.path));
}

}  // namespace jaxsoftmax
