// A block's tile of columns: `width` lanes stand side by side along inner, the block's other lanes
// along the rows' elements. A lane has the rows of one pack, if they count as they are and lie
// evenly (kVec is a pack's elements), or one row of any kind (kVec is 1). What it reads and writes.
#pragma once

#include "../ops.h"
#include "bulk.cuh"
#include "loaded.cuh"

namespace jaxsoftmax::cuda {

struct Tiling {
  int width;           // a power of two
  Divisor across;      // tiles of an outer index
  std::int64_t tiles;  // in all
};

// Whether packs may be read: no mask, no scale, one dtype, elements an even stride apart.
template <class D>
bool in_packs(const LoadedRows& rows) {
  const Loading& loading = rows.loading;
  const bool even = loading.x_cols.dims < 2 && loading.inner % kPerPack<D> == 0;
  const bool small = loading.x_cols.stride[0] >> 31 == 0 && rows.cols >> 31 == 0;
  return even && small && !loading.mask && !loading.scale && !loading.mixed;
}

// A lane's rows in a tile: where they lie, what of them counts.
template <class D, int kVec>
class Lane {
  using Acc = typename D::Numerics::Acc;
  static constexpr bool kPacks = kVec > 1;

 public:
  __device__ Lane(const LoadedRows& rows, const Tiling& tiling, std::int64_t tile)
      : loading_(rows.loading) {
    const std::int64_t outer = tiling.across.quotient(tile);
    beside_ = (threadIdx.x & (tiling.width - 1)) * kVec;
    inner_ = (tile - outer * tiling.across.by) * tiling.width * kVec + beside_;
    first_ = loading_.x_outer.offset(outer) + inner_;
    row_ = outer * loading_.inner + inner_;
    stride_ = static_cast<int>(loading_.x_cols.stride[0]);
    if constexpr (kPacks) return;
    if (loading_.mask != nullptr && valid()) {
      mask_ =
          loading_.mask + loading_.mask_outer.offset(outer) + loading_.mask_inner.offset(inner_);
    }
    if (loading_.scale != nullptr) {
      scale_ =
          load_kept(static_cast<const Acc*>(loading_.scale) + loading_.scale_outer.offset(outer));
    }
  }

  __device__ bool valid() const { return inner_ < loading_.inner; }
  // How far along inner the first lane of the tile is behind; whether a row of the tile is none.
  __device__ int beside() const { return beside_; }
  __device__ bool beyond(int row) const { return inner_ - beside_ + row >= loading_.inner; }
  __device__ std::int64_t row() const { return row_; }  // the first of kVec
  __device__ Acc scale() const { return scale_; }

  // Element c of the rows, in elements from an array's start; whether it counts.
  __device__ std::int64_t at(std::int64_t c) const {
    if constexpr (kPacks) return first_ + static_cast<int>(c) * std::int64_t{stride_};
    return first_ + loading_.x_cols.offset(c);
  }
  __device__ bool counts(std::int64_t c) const {
    return mask_ == nullptr || load_kept(mask_ + loading_.mask_cols.offset(c)) != 0;
  }

 private:
  const Loading& loading_;
  const std::uint8_t* mask_ = nullptr;
  Acc scale_ = 1;
  int beside_, stride_;
  std::int64_t inner_, first_, row_;
};

// Element c of a lane's rows, of each of an op's inputs.
template <class Op, class D, int kVec>
struct Cell {
  using Acc = typename D::Numerics::Acc;
  using Each = Elements<D, kVec>;
  using Raw = typename Each::Raw;
  using Values = Acc[Op::kInputs][kVec];
  static constexpr bool kPacks = kVec > 1;
  Raw raw[Op::kInputs];
  bool counts = true;

  __device__ static bool narrow(const Loading& loading, DType dtype) {
    return !kPacks && Each::narrow(loading, dtype);
  }
  __device__ void load(const LoadedRows& rows, const Lane<D, kVec>& lane, std::int64_t c) {
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
      raw[i] = Each::load(rows.in[i], lane.at(c), narrow(rows.loading, rows.loading.in[i]));
    }
    if (!kPacks) counts = lane.counts(c);
  }
  // The same into shared memory, asynchronously where a copy can be as small.
  __device__ static void copy(Raw* to, int stride, const LoadedRows& rows,
                              const Lane<D, kVec>& lane, std::int64_t c) {
    const std::int64_t at = lane.at(c);
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
      const bool halves = narrow(rows.loading, rows.loading.in[i]);
      if (sizeof(Raw) < 4 || halves) {
        to[i * stride] = Each::load(rows.in[i], at, halves);
      } else if constexpr (sizeof(Raw) >= 4) {
        copy_async<sizeof(Raw)>(to + i * stride, static_cast<const char*>(rows.in[i]) +
                                                     at * sizeof(typename D::Storage));
      }
    }
  }
  // An element that there is not.
  __device__ void pad() {
    if constexpr (kPacks) {
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) raw[i] = Each::filled(Op::pad(i));
    }
    counts = false;
  }
  __device__ void unpack(const LoadedRows& rows, const Lane<D, kVec>& lane, int i,
                         Acc (&values)[kVec]) const {
    const DType dtype = rows.loading.in[i];
    Each::unpack(raw[i], narrow(rows.loading, dtype), dtype, values);
    if constexpr (!kPacks) {
      if (i == Op::kScaledInput) values[0] *= lane.scale();
      values[0] = counts ? values[0] : Op::pad(i);
    }
  }
  template <class Row>
  __device__ void map(const LoadedRows& rows, const Lane<D, kVec>& lane, std::int64_t c,
                      const Row (&row)[kVec]) const {
    Values values;
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) unpack(rows, lane, i, values[i]);
    Acc mapped[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      Acc v[Op::kInputs];
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) v[i] = values[i][j];
      typename Op::Mapped fine = Op::map(v, row[j]);
      if constexpr (!kPacks && Op::kScalesOutput) fine = fine * lane.scale();
      mapped[j] = static_cast<Acc>(fine);
    }
    if (!kPacks && !counts) mapped[0] = Op::masked();
    const DType out = rows.loading.out;
    Each::store(rows.out, lane.at(c), mapped, narrow(rows.loading, out), out, (1u << kVec) - 1);
  }
};

// The largest elements so far of a lane's rows: as a pack, in its own dtype, or as a number.
template <class Op, class D, int kVec>
class Keys {
  using Acc = typename D::Numerics::Acc;
  using Each = Elements<D, kVec>;

 public:
  __device__ Keys() {
    if constexpr (kVec > 1) {
      top_ = Each::filled(-infinity<Acc>());
    } else {
      top_ = -infinity<Acc>();
    }
  }
  __device__ void add(const LoadedRows& rows, const Lane<D, kVec>& lane,
                      const Cell<Op, D, kVec>& cell) {
    if constexpr (kVec > 1) {
      top_ = Convert<typename D::Base>::larger(top_, cell.raw[0]);
    } else {
      Acc value[1];
      cell.unpack(rows, lane, 0, value);
      top_ = larger(top_, value[0]);
    }
  }
  __device__ void get(Acc (&keys)[kVec]) const {
    if constexpr (kVec > 1) {
      Convert<typename D::Base>::unpack(top_, keys);
    } else {
      keys[0] = top_;
    }
  }

 private:
  std::conditional_t<(kVec > 1), Pack, Acc> top_;
};

// Folds `count` cells of a lane.
template <class Op, class D, int kVec, int count>
__device__ void fold_cells(typename Op::State (&states)[kVec], const LoadedRows& rows,
                           const Lane<D, kVec>& lane, const Cell<Op, D, kVec> (&cells)[count]) {
  using Acc = typename Op::Acc;
  Acc values[Op::kInputs][count][kVec];
#pragma unroll
  for (int u = 0; u < count; ++u) {
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) cells[u].unpack(rows, lane, i, values[i][u]);
  }
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    Acc column[Op::kInputs][count];
#pragma unroll
    for (int u = 0; u < count; ++u) {
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) column[i][u] = values[i][u][j];
    }
    Op::fold(states[j], column);
  }
}

}  // namespace jaxsoftmax::cuda
