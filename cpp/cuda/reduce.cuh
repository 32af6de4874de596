// Merges the states of all that share a row: over a group of lanes, over a block, then over the
// blocks of a cluster or of a cooperative grid. Knows states (ops.h), not ops. Every lane ends with
// the same bits.
#pragma once

#include "../ops.h"
#include "../plan.h"
#include "bulk.cuh"

namespace jaxsoftmax::cuda {

inline constexpr unsigned kWarp = 0xffffffffu;

template <class T>
__device__ T shuffle_xor(const T& value, int lane_mask, unsigned members) {
  static_assert(sizeof(T) % 4 == 0);
  constexpr int kWords = sizeof(T) / 4;
  unsigned words[kWords];
  memcpy(words, &value, sizeof value);
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(members, words[i], lane_mask);
  T out;
  memcpy(&out, words, sizeof out);
  return out;
}

// The largest key of `lanes` (a power of two, at most 32) neighbouring lanes; `alike` says that the
// groups of the whole warp hold the same keys. Over a warp floats in order as unsigned numbers need
// one instruction where five shuffles would wait for each other.
template <class Key>
__device__ Key largest_of_lanes(Key key, int lanes, unsigned members, bool alike = false) {
  if constexpr (sizeof(Key) == 4) {
    if (alike || lanes == 32) {
      const unsigned bits = __float_as_uint(key);
      const unsigned order = bits ^ (static_cast<int>(bits) < 0 ? 0xffffffffu : 0x80000000u);
      const unsigned most = __reduce_max_sync(kWarp, order);
      return __uint_as_float(most ^ (static_cast<int>(most) < 0 ? 0x80000000u : 0xffffffffu));
    }
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    key = larger(key, shuffle_xor(key, mask, members));
  }
  return key;
}

// The lanes that take part where `lanes` of them share a row: whole warps, or one that is not full.
__device__ inline unsigned members_of_warp() {
  return blockDim.x < 32 ? (1u << blockDim.x) - 1 : kWarp;
}

// Over neighbouring lanes as above: first the common key, then one rescaling a lane, then the sum;
// pairwise merging would rescale five times. kAligned: the lanes have the common key already.
template <bool kAligned = false, class State>
__device__ void reduce_lanes(State& state, int lanes, unsigned members, bool alike = false) {
  if constexpr (State::kKeyed && !kAligned) {
    state.align(largest_of_lanes(state.key(), lanes, members, alike));
  }
  auto sum = state.s.merged();
  for (int mask = lanes / 2; mask > 0; mask /= 2) sum.add(shuffle_xor(sum, mask, members));
  state.s = sum;
}

// Which of a block's rows a thread works on, and as which of the row's lanes: groups of a power of
// two of at most 32 lanes, or all of the block on one row.
struct Lanes {
  int count, group, lane;
  __device__ explicit Lanes(int count) : count(count) {
    const int tid = threadIdx.x;
    group = count <= 32 ? tid >> (31 - __clz(count)) : 0;
    lane = count <= 32 ? tid & (count - 1) : tid;
  }
};

// The power of two of lanes that holds `count` states, one a lane.
__device__ inline int lanes_for(int count) { return 1 << (32 - __clz(count - 1)); }

// Shared memory for reduce_row: one state a warp, twice, so that the next row's reduction need not
// wait for the slowest reader of this one's.
template <class State>
struct Scratch {
  typename State::Message states[2][kMaxThreads / 32];
};

// Over the lanes of one row: groups of `lanes` <= 32 lanes, or the `lanes` threads of the block.
// `turn` alternates from one call to the next. Every one of these threads must call it; barrier 0
// is for all threads of the block, another one for `lanes` of them. kAligned: the lanes of a warp
// have their row's common key already.
template <int kBarrier = 0, bool kAligned = false, class State>
__device__ void reduce_row(State& state, int lanes, int turn, Scratch<State>& scratch) {
  const unsigned members = members_of_warp();
  if (lanes <= 32) return reduce_lanes<kAligned>(state, lanes, members);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  reduce_lanes<kAligned>(state, 32, members);
  auto* slots = scratch.states[turn & 1];
  if (lane == 0) slots[warp] = state.message();
  if constexpr (kBarrier == 0) {
    __syncthreads();
  } else {
    __barrier_sync_count(kBarrier, lanes);
  }
  const int warps = lanes / 32, width = lanes_for(warps), from = lane & (width - 1);
  state = from < warps ? State(slots[from]) : State();
  reduce_lanes(state, width, members, true);
}

// Shared memory where `count` states of a cluster arrive, twice for the same reason: a block sends
// for the next row only when it has all of this row's, so nobody is two rows ahead of a reader.
template <class State>
class Mailbox {
  using Message = typename State::Message;

 public:
  static constexpr int bytes(int count) {
    return 2 * sizeof(Barrier) + 2 * count * static_cast<int>(sizeof(Message));
  }
  __device__ Mailbox(void* memory, int count)
      : filled_(static_cast<Barrier*>(memory)),
        messages_(reinterpret_cast<Message*>(filled_ + 2)),
        count_(count) {}

  // By one thread, before the cluster's blocks have waited for each other.
  __device__ void open() {
    filled_[0].init(1);
    filled_[1].init(1);
    publish_barriers();
  }
  // By a whole warp: its lanes send `state` as number `index` to the cluster's `blocks`.
  __device__ void send(const State& state, int index, int blocks, int turn) {
    Barrier& filled = filled_[turn & 1];
    if (threadIdx.x == 0) filled.arrive_expecting(count_ * static_cast<int>(sizeof(Message)));
    const int lane = threadIdx.x % 32;
    if (lane < blocks) {
      cuda::send(messages_[(turn & 1) * count_ + index], state.message(), filled, lane);
    }
  }
  // All states, merged. As every block waits for all that is sent to it, none leaves while another
  // may still write to it.
  __device__ State collect(int turn) {
    filled_[turn & 1].wait_for_cluster((turn >> 1) & 1);
    const Message* messages = messages_ + (turn & 1) * count_;
    const int width = count_ < 32 ? lanes_for(count_) : 32, lane = threadIdx.x & (width - 1);
    State state;
    if (lane < count_) state = State(messages[lane]);
    if (count_ > 32) {
      const int mine = (count_ - lane + 31) / 32;
      state = merge_states<State>(mine, [&](int i) { return State(messages[lane + 32 * i]); });
    }
    reduce_lanes(state, width, kWarp, true);
    return state;
  }

 private:
  Barrier* filled_;
  Message* messages_;
  int count_;
};

// A state's slot in the workspace. Between the blocks of a cooperative grid it travels in parcels
// of 12 bytes and a mark, which is zero before the launch: neither a fence, which would wait for
// the stores of the row before, nor a counter is needed.
template <class State>
struct Slot {
  using Message = typename State::Message;
  static constexpr int kWords = sizeof(Message) / 4, kParcels = (kWords + 2) / 3;
  static_assert(sizeof(Message) % 4 == 0 && kParcels * sizeof(Parcel) <= kStateBytes);
  Parcel parcels[kStateBytes / sizeof(Parcel)];

  __device__ static Slot& at(const Rows& rows, std::int64_t item) {
    return *reinterpret_cast<Slot*>(rows.workspace + item * kStateBytes);
  }
  __device__ void put(const State& state) {
    const Message message = state.message();
    unsigned words[3 * kParcels] = {};
    memcpy(words, &message, sizeof message);
#pragma unroll
    for (int i = 0; i < kParcels; ++i) {
      const unsigned* w = words + 3 * i;
      cuda::put(&parcels[i], {w[0] | std::uint64_t{w[1]} << 32, w[2] | std::uint64_t{1} << 32});
    }
  }
  // With `wait`, once it is there.
  __device__ State get(bool wait) const {
    unsigned words[3 * kParcels];
#pragma unroll
    for (int i = 0; i < kParcels; ++i) {
      Parcel parcel;
      do parcel = look(&parcels[i]);
      while (wait && parcel.high >> 32 == 0);
      words[3 * i] = static_cast<unsigned>(parcel.low);
      words[3 * i + 1] = static_cast<unsigned>(parcel.low >> 32);
      words[3 * i + 2] = static_cast<unsigned>(parcel.high);
    }
    Message message;
    memcpy(&message, words, sizeof message);
    return State(message);
  }
};

// The states of a row's pieces, of which each of `lanes` lanes takes its share: one, if it can.
template <class State>
__device__ State collect_slots(const Rows& rows, std::int64_t row, int pieces, int lane, int lanes,
                               bool wait) {
  const auto piece = [&](int i) { return Slot<State>::at(rows, row * pieces + i).get(wait); };
  if (pieces <= lanes) return lane < pieces ? piece(lane) : State();
  const int mine = lane < pieces ? (pieces - lane + lanes - 1) / lanes : 0;
  return merge_states<State>(mine, [&](int i) { return piece(lane + i * lanes); });
}

}  // namespace jaxsoftmax::cuda
