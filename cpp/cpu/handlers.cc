// The CPU's FFI handlers, one an op, and the count of reads that the tests ask for.
#include "handlers.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "../rows.h"
#include "paths.h"

namespace jaxsoftmax::cpu {
namespace {

// What the plan asks for that no CPU has; empty if nothing.
std::string gpu_only(const Plan& plan) {
  return plan.gpu_only() ? "plan needs a GPU: a cluster (splits of one_pass) or a ring (smem_packs "
                           "without reg_packs)"
                         : "";
}

template <template <class> class Op, class D>
void run(const LoadedRows& rows, const Plan& plan, ffi::ThreadPool* pool) {
  using Bound = Op<typename D::Numerics>;
  const auto with = [&](const auto& loader) { run_paths<Bound, D>(rows, plan, loader, pool); };
  rows.loading.plain() ? with(PlainLoader<D>{rows}) : with(LoadedLoader<D>{rows});
}

template <template <class> class Op>
ffi::Error handle(const char* name, ffi::ThreadPool pool, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, const Plan& plan, std::int64_t axes,
                  const Loads& loads) {
  constexpr Signature is = signature<Op<FastFloat>>();
  auto call = decode_call(name, is, args, rets, plan, axes, loads);
  if (call.has_error()) return call.error();
  // A thread has a whole row, wherever its elements lie.
  const ffi::Error refused = check_plan(name, is, plan, *call, Layout::rows);
  if (refused.failure()) return refused;
  if (const std::string why = gpu_only(plan); !why.empty()) return invalid(name, why);
  if (call->empty) return ffi::Error::Success();
  try {
    switch (call->dtype) {
#define JAXSOFTMAX_DTYPE(Tag)              \
  case DType::Tag:                         \
    run<Op, Tag>(call->rows, plan, &pool); \
    break;
      JAXSOFTMAX_DTYPES(JAXSOFTMAX_DTYPE)
#undef JAXSOFTMAX_DTYPE
    }
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxsoftmax." + std::string(name) +
                                                              ": no memory for the scratch of " +
                                                              describe(plan, call->rows));
  }
  return ffi::Error::Success();
}

using Counts = std::vector<std::vector<std::atomic<int>>>;

struct CountingLines : PlainLines<F32> {
  Counts& counts;
  CountingLines(const Rows& rows, std::int64_t row, Counts& counts)
      : PlainLines<F32>(rows, row), counts(counts) {}
  void load(int i, std::int64_t at, int n, float* to, int pitch) const {
    PlainLines<F32>::load(i, at, n, to, pitch);
    for (int j = 0; j < n; ++j) counts[i][first * rows.cols + at + j].fetch_add(1);
  }
};
struct CountingLoader {
  const Rows& rows;
  Counts& counts;
  std::int64_t size() const { return rows.rows; }
  CountingLines lines(std::int64_t k) const { return {rows, k, counts}; }
};

template <template <class> class Op>
std::vector<std::vector<int>> count(std::int64_t rows, std::int64_t cols, const Plan& plan) {
  using Bound = Op<ExactFloat>;
  std::vector<float> in(rows * cols), out(rows * std::max<std::int64_t>(cols, 1)), ones(rows, 1.0f);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i % 7);
  std::vector<std::byte> workspace(workspace_bytes(rows, plan.splits));
  Rows view{};
  std::fill_n(view.in, kMaxInputs, in.data());
  std::fill_n(view.given, kMaxGiven, ones.data());
  view.out = out.data();
  view.workspace = workspace.data();
  view.rows = rows;
  view.cols = cols;
  Counts counts;
  for (int i = 0; i < Bound::kInputs; ++i) counts.emplace_back(in.size());
  const CountingLoader loader{view, counts};
  run_paths<Bound, F32>(view, plan, loader, nullptr);
  std::vector<std::vector<int>> result;
  for (const auto& input : counts) result.emplace_back(input.begin(), input.end());
  return result;
}

}  // namespace

#define JAXSOFTMAX_OP(name, Op)                                                                   \
  XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {                                                 \
    static const auto impl = [](ffi::ThreadPool pool, ffi::RemainingArgs args,                    \
                                ffi::RemainingRets rets, Plan plan, std::int64_t axes,            \
                                Loads loads) {                                                    \
      return handle<Op>(#name, pool, args, rets, plan, axes, loads);                              \
    };                                                                                            \
    static const auto handler = bind_arguments(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()).To(impl); \
    return handler->Call(frame);                                                                  \
  }
JAXSOFTMAX_OPS(JAXSOFTMAX_OP)
#undef JAXSOFTMAX_OP

std::vector<std::vector<int>> count_reads(const std::string& op, std::int64_t rows,
                                          std::int64_t cols, const Plan& plan) {
#define JAXSOFTMAX_OP(name, Op)                                                          \
  if (op == #name) {                                                                     \
    const std::string why = refusal(plan, Op<ExactFloat>::kInputs, sizeof(float), cols); \
    if (!why.empty()) throw std::invalid_argument("count_reads: plan " + why);           \
    if (plan.gpu_only()) throw std::invalid_argument("count_reads: " + gpu_only(plan));  \
    return count<Op>(rows, cols, plan);                                                  \
  }
  JAXSOFTMAX_OPS(JAXSOFTMAX_OP)
#undef JAXSOFTMAX_OP
  throw std::invalid_argument("count_reads: no op named " + op);
}

}  // namespace jaxsoftmax::cpu
