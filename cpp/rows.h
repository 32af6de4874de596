// FFI buffers -> rows: the boundary where shapes, dtypes and the plan are checked. Both platforms'
// handlers are bound here, so that they take the same arguments and refuse the same faults.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "plan.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jaxsoftmax::Path);

#define JAXSOFTMAX_MEMBER(name) , xla::ffi::StructMember<std::int32_t>(#name)
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxsoftmax::Plan,
                                      xla::ffi::StructMember<jaxsoftmax::Path>("path")
                                          JAXSOFTMAX_PLAN_FIELDS(JAXSOFTMAX_MEMBER));
#undef JAXSOFTMAX_MEMBER

namespace jaxsoftmax {

namespace ffi = xla::ffi;

// What every handler gets, after its platform's contexts: inputs, results (output, and split_k's
// workspace), the plan, and how many trailing dimensions form a row.
template <class Binding>
auto bind_arguments(Binding&& binding) {
  return std::forward<Binding>(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Plan>("plan")
      .template Attr<std::int32_t>("reduced");
}

struct Call {
  Rows rows;
  DType dtype;
  bool aligned;  // every base is a multiple of 16 bytes
  bool empty() const { return rows.rows == 0 || rows.cols == 0; }
};

inline ffi::Error invalid(const char* op, const std::string& why) {
  return ffi::Error::InvalidArgument("jaxsoftmax." + std::string(op) + ": " + why);
}

inline ffi::ErrorOr<DType> dtype_of(const char* op, ffi::DataType type) {
  switch (type) {
#define JAXSOFTMAX_DTYPE(Tag) \
  case ffi::DataType::Tag:    \
    return DType::Tag;
    JAXSOFTMAX_DTYPES(JAXSOFTMAX_DTYPE)
#undef JAXSOFTMAX_DTYPE
    default:
      break;
  }
  return ffi::Unexpected(
      invalid(op, "no kernel for dtype " + std::to_string(static_cast<int>(type))));
}

inline ffi::ErrorOr<Call> decode_call(const char* op, int inputs, ffi::RemainingArgs& args,
                                      ffi::RemainingRets& rets, const Plan& plan,
                                      std::int32_t reduced) {
  const auto fail = [&](const std::string& why) { return ffi::Unexpected(invalid(op, why)); };
  const std::size_t results = plan.path == Path::split_k ? 2 : 1;
  if (args.size() != static_cast<std::size_t>(inputs) || rets.size() != results) {
    return fail("takes " + std::to_string(inputs) + " operands and " + std::to_string(results) +
                " results, got " + std::to_string(args.size()) + " and " +
                std::to_string(rets.size()));
  }
  Call call{};
  auto out = rets.get<ffi::AnyBuffer>(0);
  if (out.has_error()) return ffi::Unexpected(out.error());
  const ffi::AnyBuffer& y = **out;
  const auto dims = y.dimensions();
  if (reduced < 0 || static_cast<std::size_t>(reduced) > dims.size()) {
    return fail("reduced must be 0 to " + std::to_string(dims.size()) + ", got " +
                std::to_string(reduced));
  }
  call.rows.rows = call.rows.cols = 1;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    (i < dims.size() - reduced ? call.rows.rows : call.rows.cols) *= dims[i];
  }
  auto dtype = dtype_of(op, y.element_type());
  if (dtype.has_error()) return ffi::Unexpected(dtype.error());
  call.dtype = *dtype;
  call.rows.out = y.untyped_data();
  std::uintptr_t bases = reinterpret_cast<std::uintptr_t>(call.rows.out);
  for (int i = 0; i < inputs; ++i) {
    auto in = args.get<ffi::AnyBuffer>(i);
    if (in.has_error()) return ffi::Unexpected(in.error());
    if (in->element_type() != y.element_type() ||
        !std::equal(dims.begin(), dims.end(), in->dimensions().begin(), in->dimensions().end())) {
      return fail("operand " + std::to_string(i) + " must have the result's shape and dtype");
    }
    call.rows.in[i] = in->untyped_data();
    bases |= reinterpret_cast<std::uintptr_t>(in->untyped_data());
  }
  const int itemsize = static_cast<int>(ffi::ByteWidth(y.element_type()));
  if (const std::string why = refusal(plan, inputs, itemsize, call.rows.cols); !why.empty()) {
    return fail("plan " + why);
  }
  if (plan.path == Path::split_k) {
    auto workspace = rets.get<ffi::AnyBuffer>(1);
    if (workspace.has_error()) return ffi::Unexpected(workspace.error());
    const std::int64_t needed = workspace_bytes(call.rows.rows, plan.splits);
    const std::int64_t given = static_cast<std::int64_t>((*workspace)->size_bytes());
    if (given < needed) {
      return fail("split_k needs a workspace of " + std::to_string(needed) + " bytes, got " +
                  std::to_string(given));
    }
    call.rows.workspace = static_cast<std::byte*>((*workspace)->untyped_data());
    bases |= reinterpret_cast<std::uintptr_t>(call.rows.workspace);
  }
  call.aligned = bases % kPackBytes == 0;
  return call;
}

}  // namespace jaxsoftmax
