// FFI buffers -> rows: the boundary where shapes, dtypes and the plan are checked. Both platforms'
// handlers are bound here, so that they take the same arguments and refuse the same faults.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "decoder.h"
#include "rules.h"

XLA_FFI_REGISTER_ENUM_ATTR_DECODING(jaxsoftmax::Path);

#define JAXSOFTMAX_MEMBER(name) , xla::ffi::StructMember<std::int32_t>(#name)
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxsoftmax::Plan,
                                      xla::ffi::StructMember<jaxsoftmax::Path>("path")
                                          JAXSOFTMAX_PLAN_FIELDS(JAXSOFTMAX_MEMBER));
#undef JAXSOFTMAX_MEMBER

namespace jaxsoftmax {
struct Loads {
  std::int32_t masked, scaled, causal, columns;
};
}  // namespace jaxsoftmax
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxsoftmax::Loads,
                                      xla::ffi::StructMember<std::int32_t>("masked"),
                                      xla::ffi::StructMember<std::int32_t>("scaled"),
                                      xla::ffi::StructMember<std::int32_t>("causal"),
                                      xla::ffi::StructMember<std::int32_t>("columns"));

namespace jaxsoftmax {

namespace ffi = xla::ffi;

// What every handler gets, after its platform's contexts: operands (the rows, what is given of
// each, the mask and the scale if there are any), results (the output, the statistics if asked for,
// split_k's workspace), the plan, the reduced dimensions (a bit each, the last dimension's first),
// and which kinds of loading there are.
template <class Binding>
auto bind_arguments(Binding&& binding) {
  return std::forward<Binding>(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Plan>("plan")
      .template Attr<std::int64_t>("axes")
      .template Attr<Loads>("loading");
}

struct Call {
  LoadedRows rows;
  DType dtype;
  Layout layout;
  bool aligned;  // every base is a multiple of 16 bytes
  bool empty;    // nothing is to be written
};

// One call's dtypes: that of all inputs and the output, or, of a mix of narrower ones, F32.
struct DTypes {
  DType in[kMaxInputs], out, call;
  bool mixed;
};

inline ffi::ErrorOr<DTypes> dtypes_of(const char* op, const std::vector<ffi::DataType>& inputs,
                                      ffi::DataType out) {
  DTypes found{};
  auto of_out = dtype_of(op, out);
  if (of_out.has_error()) return ffi::Unexpected(of_out.error());
  found.out = found.call = *of_out;
  bool wide = *of_out == DType::F64;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    auto in = dtype_of(op, inputs[i]);
    if (in.has_error()) return ffi::Unexpected(in.error());
    found.in[i] = *in;
    found.mixed |= *in != *of_out;
    wide |= *in == DType::F64;
  }
  if (found.mixed && wide) return ffi::Unexpected(invalid(op, "float64 mixes with no other dtype"));
  if (found.mixed) found.call = DType::F32;
  return found;
}

inline ffi::ErrorOr<Call> decode_call(const char* op, const Signature& is, ffi::RemainingArgs& args,
                                      ffi::RemainingRets& rets, const Plan& plan, std::int64_t axes,
                                      const Loads& loads) {
  Decoder decoder(op, axes);
  const int inputs = is.inputs, given = is.given;
  const std::size_t operands = inputs + given + (loads.masked != 0) + (loads.scaled != 0);
  const std::size_t split = plan.path == Path::split_k;
  const bool stats = is.stats && rets.size() == 3 + split;
  if (args.size() != operands || (!stats && rets.size() != 1 + split)) {
    const std::string results = std::to_string(1 + split);
    decoder.fail("takes " + std::to_string(operands) + " operands and " + results +
                 (is.stats ? " or " + std::to_string(3 + split) : "") + " results, got " +
                 std::to_string(args.size()) + " and " + std::to_string(rets.size()));
    return ffi::Unexpected(decoder.error());
  }
  std::vector<ffi::AnyBuffer> in, out;
  for (std::size_t i = 0; i < operands; ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return ffi::Unexpected(buffer.error());
    in.push_back(*buffer);
  }
  for (std::size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return ffi::Unexpected(buffer.error());
    out.push_back(**buffer);
  }
  std::vector<ffi::DataType> types;
  for (int i = 0; i < inputs; ++i) types.push_back(in[i].element_type());
  const ffi::DataType rows_type = types[0];
  auto dtypes = dtypes_of(op, types, out[0].element_type());
  if (dtypes.has_error()) return ffi::Unexpected(dtypes.error());
  const ffi::DataType wide = dtypes->call == DType::F64 ? ffi::DataType::F64 : ffi::DataType::F32;
  const auto typed = [&](const ffi::AnyBuffer& buffer, ffi::DataType type,
                         const std::string& what) {
    if (buffer.element_type() != type) decoder.fail(what + " has a dtype that does not fit");
  };

  Call call{};
  Loading& loading = call.rows.loading;
  call.dtype = dtypes->call;
  loading.mixed = dtypes->mixed;
  std::copy(dtypes->in, dtypes->in + kMaxInputs, loading.in);
  loading.out = dtypes->out;
  decoder.shape(in[0], &call.rows);
  if (decoder.failed()) return ffi::Unexpected(decoder.error());
  for (int i = 0; i < inputs + given; ++i) {
    const std::string what = "operand " + std::to_string(i);
    const bool a_row = i >= inputs;
    const void* data = decoder.data(in[i], what, a_row);
    (a_row ? call.rows.given[i - inputs] : call.rows.in[i]) = data;
    if (a_row) typed(in[i], is.pulled && i == inputs + given - 1 ? rows_type : wide, what);
  }
  if (loads.masked) {
    decoder.mask(in[inputs + given], &loading);
    // A mask of its own pattern along the rows is read as columns are.
    loading.columns |= !loading.mask_cols.dense() && !loading.mask_cols.constant();
  }
  if (loads.scaled) decoder.scale(in.back(), wide, &loading);
  loading.columns |= loads.columns != 0;  // rows, yet planned before all sizes were known
  loading.causal = loads.causal != 0;
  if (loading.causal && (loading.columns || axes != 1 || in[0].dimensions().size() < 2)) {
    decoder.fail("causal rows are the last of at least two dimensions");
  }
  for (int i = 0; i < (stats ? 3 : 1); ++i) {
    const std::string what = "result " + std::to_string(i);
    const void* data = decoder.data(out[i], what, i > 0 || !is.maps);
    (i == 0 ? call.rows.out : call.rows.stats[i - 1]) = const_cast<void*>(data);
    if (i > 0) typed(out[i], wide, what);
  }
  if (!is.maps && loading.mixed) decoder.fail("result 0 has a dtype that does not fit");
  if (decoder.failed()) return ffi::Unexpected(decoder.error());

  call.layout = loading.columns ? Layout::columns : loading.plain() ? Layout::rows : Layout::loaded;
  std::uintptr_t bases = decoder.bases();
  if (split) {
    const std::int64_t needed = workspace_bytes(call.rows.rows, plan.splits);
    const std::int64_t size = static_cast<std::int64_t>(out.back().size_bytes());
    if (size < needed) {
      return ffi::Unexpected(invalid(op, "split_k needs a workspace of " + std::to_string(needed) +
                                             " bytes, got " + std::to_string(size)));
    }
    call.rows.workspace = static_cast<std::byte*>(out.back().untyped_data());
    bases |= reinterpret_cast<std::uintptr_t>(call.rows.workspace);
  }
  call.aligned = bases % kPackBytes == 0;
  call.empty = call.rows.rows == 0 || (call.rows.cols == 0 && is.maps && !stats);
  return call;
}

// Why the plan cannot run this call; a device has its own rules for what is not plain.
inline ffi::Error check_plan(const char* op, const Signature& is, const Plan& plan,
                             const Call& call, Layout layout) {
  const int itemsize = call.dtype == DType::F64 ? 8 : call.dtype == DType::F32 ? 4 : 2;
  const std::string why = refusal(plan, is.inputs, itemsize, call.rows.cols, layout);
  return why.empty() ? ffi::Error::Success() : invalid(op, "plan " + why);
}

}  // namespace jaxsoftmax
