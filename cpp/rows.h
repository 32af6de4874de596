// FFI buffers -> rows: the boundary where shapes, dtypes and the plan are checked. Both platforms'
// handlers are bound here, so that they take the same arguments and refuse the same faults.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

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

// What every handler gets, after its platform's contexts: operands (the rows, then what is given of
// each), results (the output, the statistics if asked for, split_k's workspace), the plan, and how
// many trailing dimensions form a row.
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
  bool empty;    // nothing is to be written
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

// Reads buffers of one call; the first fault is kept.
class Decoder {
 public:
  Decoder(const char* op, std::int32_t reduced) : op_(op), reduced_(reduced) {}

  const ffi::Error& error() const { return error_; }
  bool failed() const { return error_.failure(); }
  void fail(const std::string& why) {
    if (!failed()) error_ = invalid(op_, why);
  }
  std::uintptr_t bases() const { return bases_; }

  // The shape that all others must fit: that of the first operand.
  void shape(const ffi::AnyBuffer& x, Call* call) {
    const auto dims = x.dimensions();
    dims_.assign(dims.begin(), dims.end());
    if (reduced_ < 0 || static_cast<std::size_t>(reduced_) > dims_.size()) {
      return fail("reduced must be 0 to " + std::to_string(dims_.size()) + ", got " +
                  std::to_string(reduced_));
    }
    outer_ = dims_.size() - reduced_;
    call->rows.rows = call->rows.cols = 1;
    for (std::size_t i = 0; i < dims_.size(); ++i) {
      (i < outer_ ? call->rows.rows : call->rows.cols) *= dims_[i];
    }
    type_ = x.element_type();
    wide_ = type_ == ffi::DataType::F64 ? type_ : ffi::DataType::F32;
    auto dtype = dtype_of(op_, type_);
    if (dtype.has_error()) {
      error_ = dtype.error();
    } else {
      call->dtype = *dtype;
    }
  }

  // The buffer's data, if it is of the rows' shape, or of one number a row; `wide`: in the type of
  // arithmetic.
  void* data(const ffi::AnyBuffer& buffer, const std::string& what, bool a_row, bool wide) {
    const auto dims = buffer.dimensions();
    const auto end = a_row ? dims_.begin() + outer_ : dims_.end();
    if (buffer.element_type() != (wide ? wide_ : type_) ||
        !std::equal(dims.begin(), dims.end(), dims_.begin(), end)) {
      fail(what + " must have the first operand's shape" + (a_row ? " without its rows" : "") +
           (wide ? " and float32 (float64 for float64)" : " and dtype"));
    }
    bases_ |= a_row ? 0 : reinterpret_cast<std::uintptr_t>(buffer.untyped_data());
    return buffer.untyped_data();
  }

 private:
  const char* op_;
  std::int32_t reduced_;
  ffi::Error error_;
  std::vector<std::int64_t> dims_;
  std::size_t outer_ = 0;
  ffi::DataType type_{}, wide_{};
  std::uintptr_t bases_ = 0;
};

inline ffi::ErrorOr<Call> decode_call(const char* op, const Signature& is, ffi::RemainingArgs& args,
                                      ffi::RemainingRets& rets, const Plan& plan,
                                      std::int32_t reduced) {
  Decoder decoder(op, reduced);
  const std::size_t operands = is.inputs + is.given, split = plan.path == Path::split_k;
  const bool stats = is.stats && rets.size() == 3 + split;
  if (args.size() != operands || (!stats && rets.size() != 1 + split)) {
    const std::string results = std::to_string(1 + split);
    decoder.fail("takes " + std::to_string(operands) + " operands and " + results +
                 (is.stats ? " or " + std::to_string(3 + split) : "") + " results, got " +
                 std::to_string(args.size()) + " and " + std::to_string(rets.size()));
    return ffi::Unexpected(decoder.error());
  }
  Call call{};
  for (std::size_t i = 0; i < operands && !decoder.failed(); ++i) {
    auto in = args.get<ffi::AnyBuffer>(i);
    if (in.has_error()) return ffi::Unexpected(in.error());
    if (i == 0) decoder.shape(*in, &call);
    if (decoder.failed()) break;
    const bool given = i >= static_cast<std::size_t>(is.inputs);
    const bool wide = given && !(is.pulled && i == operands - 1);
    const void* data = decoder.data(*in, "operand " + std::to_string(i), given, wide);
    (given ? call.rows.given[i - is.inputs] : call.rows.in[i]) = data;
  }
  void** const results[] = {&call.rows.out, &call.rows.stats[0], &call.rows.stats[1]};
  for (int i = 0; i < (stats ? 3 : 1) && !decoder.failed(); ++i) {
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (out.has_error()) return ffi::Unexpected(out.error());
    const bool a_row = i > 0 || !is.maps;
    *results[i] = decoder.data(**out, "result " + std::to_string(i), a_row, i > 0);
  }
  if (decoder.failed()) return ffi::Unexpected(decoder.error());
  const int itemsize = call.dtype == DType::F64 ? 8 : call.dtype == DType::F32 ? 4 : 2;
  if (const std::string why = refusal(plan, is.inputs, itemsize, call.rows.cols); !why.empty()) {
    return ffi::Unexpected(invalid(op, "plan " + why));
  }
  std::uintptr_t bases = decoder.bases();
  if (split) {
    auto workspace = rets.get<ffi::AnyBuffer>(rets.size() - 1);
    if (workspace.has_error()) return ffi::Unexpected(workspace.error());
    const std::int64_t needed = workspace_bytes(call.rows.rows, plan.splits);
    const std::int64_t size = static_cast<std::int64_t>((*workspace)->size_bytes());
    if (size < needed) {
      return ffi::Unexpected(invalid(op, "split_k needs a workspace of " + std::to_string(needed) +
                                             " bytes, got " + std::to_string(size)));
    }
    call.rows.workspace = static_cast<std::byte*>((*workspace)->untyped_data());
    bases |= reinterpret_cast<std::uintptr_t>(call.rows.workspace);
  }
  call.aligned = bases % kPackBytes == 0;
  call.empty = call.rows.rows == 0 || (call.rows.cols == 0 && is.maps && !stats);
  return call;
}

}  // namespace jaxsoftmax
