// How the lanes of a tile's rows (tile.cuh) merge their states: in a warp, over a block in shared
// memory, over the blocks of a cluster by mail, or from the workspace.
#pragma once

#include "../ops.h"
#include "reduce.cuh"

namespace jaxsoftmax::cuda {

// Merges the states of a tile's rows over the lanes of a block, and over a cluster's blocks.
template <class State, int kVec>
class TileMerge {
  using Message = typename State::Message;

 public:
  static int bytes(int threads, int width, int blocks) {
    const int rows = width * kVec, parts = rows * parts_of(threads, width);
    const int kept = (parts > threads ? parts : threads) + rows * (1 + mails(blocks));
    return 2 * static_cast<int>(sizeof(Barrier)) + kept * static_cast<int>(sizeof(Message));
  }
  __device__ TileMerge(void* shared, int width, int blocks, int rank)
      : width_(width), rows_(width * kVec), blocks_(blocks), rank_(rank) {
    const int threads = blockDim.x;
    filled_ = static_cast<Barrier*>(shared);
    final_ = reinterpret_cast<Message*>(filled_ + 2);
    mail_ = final_ + rows_;
    partial_ = mail_ + mails(blocks) * rows_;
    groups_ = rows_ < threads ? threads / rows_ : 1;
  }

  // By the whole block, before the first merge of a cluster.
  __device__ void open() {
    if (threadIdx.x == 0) {
      filled_[0].init(1);
      filled_[1].init(1);
      publish_barriers();
    }
    __syncwarp();
    arrive_at_cluster();
  }

  // The largest key of each row in a warp, which its lanes then have in common.
  template <class Key>
  __device__ void share(Key (&keys)[kVec]) const {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      for (int apart = width_; apart < lanes_of_warp(); apart *= 2) {
        keys[j] = larger(keys[j], shuffle_xor(keys[j], apart, members_of_warp()));
      }
    }
  }

  // Of what each lane folded of its rows. Every lane ends with the same bits for a row. `turn`
  // counts the calls. kAligned: the lanes of a warp have a row's key in common.
  template <bool kAligned>
  __device__ void lanes(State (&states)[kVec], int turn) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) over_warp<kAligned>(states[j]);
    const int tid = threadIdx.x, together = width_ > 32 ? width_ : 32;
    const int count = parts_of(blockDim.x, width_);
    if (count == 1 && blocks_ == 1) return;
    if (width_ >= 32 || tid % 32 < width_) {
      Message* to = partial_ + tid / together * rows_ + own();
#pragma unroll
      for (int j = 0; j < kVec; ++j) to[j] = states[j].message();
    }
    meet(count, turn);
    take(states);
  }

  // Of `count` states a row that lie in the workspace: slot(row of the tile, i) gives one. Each
  // thread merges some of one row first.
  template <class Slot>
  __device__ void slots(State (&states)[kVec], int count, int turn, const Slot& slot) {
    for (int at = threadIdx.x; at < rows_ * groups_; at += blockDim.x) {
      const int row = at % rows_, group = at / rows_;
      const int mine = group < count ? (count - group + groups_ - 1) / groups_ : 0;
      const auto part = [&](int i) { return slot(row, group + i * groups_); };
      partial_[at] = merge_states<State>(mine, part).message();
    }
    meet(groups_, turn);
    take(states);
  }

 private:
  // Groups of lanes whose states meet in shared memory; messages of a row that come by mail.
  __host__ __device__ static int parts_of(int threads, int width) {
    const int together = width > 32 ? width : 32;
    return threads > together ? threads / together : 1;
  }
  __host__ __device__ static int mails(int blocks) { return blocks > 1 ? 2 * blocks : 0; }

  __device__ int own() const { return (threadIdx.x & (width_ - 1)) * kVec; }

  __device__ void take(State (&states)[kVec]) const {
#pragma unroll
    for (int j = 0; j < kVec; ++j) states[j] = State(final_[own() + j]);
  }

  // From `count` messages a row in shared memory to one.
  __device__ void meet(int count, int turn) {
    __syncthreads();
    Barrier& filled = filled_[turn & 1];
    Message* mail = mail_ + (turn & 1) * blocks_ * rows_;
    if (blocks_ > 1) {
      if (turn == 0) wait_for_cluster();  // until every mailbox is open
      if (threadIdx.x == 0) {
        filled.arrive_expecting(blocks_ * rows_ * static_cast<int>(sizeof(Message)));
      }
    }
    for (int row = threadIdx.x; row < rows_; row += blockDim.x) {
      const auto part = [&](int i) { return State(partial_[i * rows_ + row]); };
      const Message merged = merge_states<State>(count, part).message();
      if (blocks_ == 1) final_[row] = merged;
      for (int to = 0; blocks_ > 1 && to < blocks_; ++to) {
        send(mail[rank_ * rows_ + row], merged, filled, to);
      }
    }
    if (blocks_ > 1) {
      filled.wait_for_cluster(turn >> 1 & 1);
      for (int row = threadIdx.x; row < rows_; row += blockDim.x) {
        const auto part = [&](int i) { return State(mail[i * rows_ + row]); };
        final_[row] = merge_states<State>(blocks_, part).message();
      }
    }
    __syncthreads();
  }

  __device__ static int lanes_of_warp() { return blockDim.x < 32 ? blockDim.x : 32; }

  template <bool kAligned>
  __device__ void over_warp(State& state) const {
    if constexpr (State::kKeyed && !kAligned) {
      auto key = state.key();
      for (int apart = width_; apart < lanes_of_warp(); apart *= 2) {
        key = larger(key, shuffle_xor(key, apart, members_of_warp()));
      }
      state.align(key);
    }
    auto sum = state.s.merged();
    for (int apart = width_; apart < lanes_of_warp(); apart *= 2) {
      sum.add(shuffle_xor(sum, apart, members_of_warp()));
    }
    state.s = sum;
  }

  int width_, rows_, blocks_, rank_, groups_;
  Barrier* filled_;
  Message *final_, *mail_, *partial_;
};

}  // namespace jaxsoftmax::cuda
