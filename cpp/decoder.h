// Reads the buffers of one call: shapes, strides, the mask and the scale, and what is wrong with
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsoftmax {

namespace ffi = xla::ffi;

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
  using Dims = std::vector<std::int64_t>;

 public:
  Decoder(const char* op, std::int64_t axes) : op_(op), axes_(axes) {}

  const ffi::Error& error() const { return error_; }
  bool failed() const { return error_.failure(); }
  void fail(const std::string& why) {
    if (!failed()) error_ = invalid(op_, why);
  }
  std::uintptr_t bases() const { return bases_; }
  bool contiguous() const { return contiguous_; }

  // The shape that all others must fit, that of the first operand, seen as [outer, cols, inner].
  void shape(const ffi::AnyBuffer& x, LoadedRows* rows) {
    dims_.assign(x.dimensions().begin(), x.dimensions().end());
    const int rank = static_cast<int>(dims_.size());
    if (axes_ < 0 || (rank < 63 && axes_ >> rank != 0)) {
      return fail("axes must have a bit for each reduced dimension of " + std::to_string(rank) +
                  ", got " + std::to_string(axes_));
    }
    int last = -1, kept = -1;  // of the dimensions that are not 1
    for (int d = 0; d < rank; ++d) {
      if (dims_[d] != 1) (reduced(d) ? last : kept) = d;
      if (!reduced(d)) row_dims_.push_back(dims_[d]);
    }
    contiguous_ = true;
    for (int d = 0; d < kept && contiguous_; ++d) contiguous_ = !reduced(d) || dims_[d] == 1;
    inner_from_ = contiguous_ ? rank : last + 1;
    Loading& loading = rows->loading;
    rows->cols = loading.outer = loading.inner = 1;
    for (int d = 0; d < rank; ++d) {
      (reduced(d) ? rows->cols : d < inner_from_ ? loading.outer : loading.inner) *= dims_[d];
    }
    rows->rows = loading.outer * loading.inner;
    loading.columns = !contiguous_;
    loading.queries = Divisor(rank > 1 ? dims_[rank - 2] : 1);
    Dims strides(rank);
    std::int64_t stride = 1;
    for (int d = rank - 1; d >= 0; --d) {
      strides[d] = stride;
      stride *= dims_[d];
    }
    loading.x_outer = merged(strides, [&](int d) { return !reduced(d) && d < inner_from_; });
    loading.x_cols = merged(strides, [&](int d) { return reduced(d); });
  }

  // The buffer's data, if it has the rows' shape, or of one number a row.
  const void* data(const ffi::AnyBuffer& buffer, const std::string& what, bool a_row) {
    const auto dims = buffer.dimensions();
    const Dims& want = a_row ? row_dims_ : dims_;
    if (!std::equal(dims.begin(), dims.end(), want.begin(), want.end())) {
      fail(what + " must have the first operand's shape" + (a_row ? " without its rows" : ""));
    }
    bases_ |= a_row ? 0 : reinterpret_cast<std::uintptr_t>(buffer.untyped_data());
    return buffer.untyped_data();
  }

  void mask(const ffi::AnyBuffer& buffer, Loading* loading) {
    if (buffer.element_type() != ffi::DataType::PRED) return fail("the mask must be boolean");
    const Dims strides = broadcast(buffer, "the mask");
    if (failed()) return;
    loading->mask = static_cast<const std::uint8_t*>(buffer.untyped_data());
    loading->mask_outer = merged(strides, [&](int d) { return !reduced(d) && d < inner_from_; });
    loading->mask_cols = merged(strides, [&](int d) { return reduced(d); });
    loading->mask_inner = merged(strides, [&](int d) { return !reduced(d) && d >= inner_from_; });
  }

  void scale(const ffi::AnyBuffer& buffer, ffi::DataType wide, Loading* loading) {
    if (buffer.element_type() != wide)
      return fail("the scale must be float32 (float64 for float64)");
    const Dims strides = broadcast(buffer, "the scale");
    for (int d = 0; d < static_cast<int>(strides.size()); ++d) {
      if (strides[d] != 0 && (reduced(d) || d >= inner_from_)) {
        return fail("the scale must be one number, or one a leading dimension");
      }
    }
    if (failed()) return;
    loading->scale = buffer.untyped_data();
    loading->scale_outer = merged(strides, [&](int d) { return !reduced(d) && d < inner_from_; });
  }

 private:
  bool reduced(int d) const { return axes_ >> (static_cast<int>(dims_.size()) - 1 - d) & 1; }

  // The strides of an operand that broadcasts against the rows, 0 where it does.
  Dims broadcast(const ffi::AnyBuffer& buffer, const std::string& what) {
    const auto dims = buffer.dimensions();
    Dims strides(dims_.size());
    std::int64_t stride = 1;
    bool fits = dims.size() <= dims_.size();
    for (std::size_t i = 1; fits && i <= dims.size(); ++i) {
      const std::int64_t size = dims[dims.size() - i], full = dims_[dims_.size() - i];
      fits = size == full || size == 1;
      strides[dims_.size() - i] = size == 1 ? 0 : stride;
      stride *= size;
    }
    if (!fits) fail(what + " must broadcast against the first operand");
    return strides;
  }

  // An index over the dimensions that `which` picks; neighbours that lie in one line become one.
  template <class Which>
  Strides merged(const Dims& strides, const Which& which) {
    Strides found;
    std::vector<std::pair<std::int64_t, std::int64_t>> parts;  // size, stride
    for (std::size_t d = 0; d < dims_.size(); ++d) {
      if (!which(static_cast<int>(d)) || dims_[d] == 1) continue;
      if (!parts.empty() && parts.back().second == strides[d] * dims_[d]) {
        parts.back() = {parts.back().first * dims_[d], strides[d]};
      } else {
        parts.emplace_back(dims_[d], strides[d]);
      }
    }
    if (parts.size() == 1 && parts[0].second == 0) parts.clear();
    if (parts.size() > kMaxDims) {
      fail("takes " + std::to_string(kMaxDims) + " dimensions, got " +
           std::to_string(parts.size()));
      return found;
    }
    found.dims = static_cast<int>(parts.size());
    for (int d = 0; d < found.dims; ++d) {
      found.size[d] = Divisor(parts[d].first);
      found.stride[d] = parts[d].second;
    }
    return found;
  }

  const char* op_;
  std::int64_t axes_;
  ffi::Error error_;
  Dims dims_, row_dims_;
  int inner_from_ = 0;  // the dimensions from here on are inner
  bool contiguous_ = true;
  std::uintptr_t bases_ = 0;
};

}  // namespace jaxsoftmax
