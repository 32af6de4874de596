// A row, or its piece of a block, in a ring of shared-memory slots that one warp keeps filling with
// bulk copies while the others fold and map. As much of a row as the ring holds is read once; the
// rest is streamed through it and read again, backwards, while L2 still has it. The blocks of a row
// merge their states as a cluster (one_pass: the row fits) or as part of a cooperative grid
// (split_k in one launch: any length).
//
// The sequence of slots for a row of n chunks of which the ring keeps k: n to be folded, of which
// the last k stay until they are mapped, then the first n - k again, last first, to be mapped. The
// next row's chunks follow at once, so that its loads overlap this row's stores. An op that only
// folds keeps none; one that only maps has its chunks once, each mapped when it is there.
#pragma once

#include "../ops.h"
#include "enqueue.cuh"
#include "packs.cuh"
#include "reduce.cuh"
#include "row.cuh"

namespace jaxsoftmax::cuda {

// Blocks of kMaxThreads and the producer's warp that an SM's registers must have room for.
template <class D>
inline constexpr int kRingBlocks = sizeof(typename D::Numerics::Acc) == 8 ? 1 : 2;

// Slots left to what comes next, while a piece that the ring does not hold waits for its state.
inline constexpr int kAhead = 2;

// A place in the ring and the parity of its barriers' current phase.
struct Cursor {
  int slot = 0;
  unsigned phase = 0;
  __device__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// How a row is cut, in packs: a block's piece of `size`, in chunks of which those below `streamed`
// do not stay in the ring. The last piece may be shorter.
struct Cut {
  int size, streamed;
};

template <class Op, class D>
__global__ void __launch_bounds__(kMaxThreads + 32, kRingBlocks<D>)
    ring(const __grid_constant__ Rows rows, int blocks, int slots, Cut cut, bool cooperative) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return;  // never launched: see Launch::hopper
#endif
  using State = typename Op::State;
  constexpr bool kFolds = Op::kFolded > 0;
  constexpr int kWorkers = 1;  // the barrier of all threads but the producer's warp
  __shared__ Scratch<State> scratch;
  __shared__ Pack mail[pieces(Mailbox<State>::bytes(kMaxCluster), kPackBytes)];
  __shared__ Barrier full[kMaxSlots], empty[kMaxSlots];
  extern __shared__ __align__(128) Pack buffer[];  // [slots][inputs][chunk]
  const int threads = blockDim.x - 32, chunk = threads * kChunk, tid = threadIdx.x;
  const int rank = blockIdx.x % blocks, groups = gridDim.x / blocks;
  const std::int64_t first_row = blockIdx.x / blocks, from = rank * std::int64_t{cut.size};
  Mailbox<State> mailbox(mail, blocks);
  const auto place = [&](int slot) { return buffer + slot * Op::kInputs * chunk; };

  using Part = Window<D, int, kLine>;
  const auto piece_of = [&](std::int64_t row) -> Part {
    return Window<D, std::int64_t, kLine>(rows, row).piece(from, cut.size);
  };

  if (tid == 0) {
    for (int s = 0; s < slots; ++s) {
      full[s].init(1);
      empty[s].init(threads / 32);
    }
    mailbox.open();
  }
  __syncthreads();
  const bool cluster = kFolds && blocks > 1 && !cooperative;
  if (cluster) arrive_at_cluster();

  Cursor at;
  if (tid >= threads) {
    if (tid == threads) {
      for (std::int64_t row = first_row; row < rows.rows; row += groups) {
        const Part piece = piece_of(row);
        const auto fetch = [&](int p, int inputs, Keep keep) {
          const int bytes = min(chunk, piece.packs() - p) * kPackBytes;
          empty[at.slot].wait(at.phase ^ 1);  // at first all are
          full[at.slot].arrive_expecting(inputs * bytes);
#pragma unroll
          for (int i = 0; i < inputs; ++i) {
            Pack* to = place(at.slot) + i * chunk;
            const Pack* data = piece.address(rows.in[i], p);
            if (Op::kMaps && cut.streamed > 0) {
              copy_bulk(to, data, bytes, full[at.slot], keep);
            } else {
              copy_bulk(to, data, bytes, full[at.slot]);
            }
          }
          at.advance(slots);
        };
        int p = 0;
#pragma unroll 1
        for (; p < piece.packs(); p += chunk) {
          const bool once = p >= cut.streamed || !Op::kMaps;
          fetch(p, once ? Op::kInputs : Op::kFolded, once ? Keep::least : Keep::most);
        }
        if constexpr (Op::kMaps) {
#pragma unroll 1
          for (p = min(p, cut.streamed); p > 0; p -= chunk) {
            fetch(p - chunk, Op::kInputs, Keep::least);
          }
        }
      }
    }
    __syncwarp();
    if (cluster) wait_for_cluster();
    return;
  }

  const auto release = [&](const Cursor& cursor) {
    __syncwarp();
    if (tid % 32 == 0) empty[cursor.slot].arrive();
  };
  // visit(packs, index, whole) for this thread's packs of the chunk at p in a slot: kAtOnce of them
  // where all lie inside the row, else one by one
  const auto each = [&](const Part& piece, const Cursor& cursor, int p, const auto& visit) {
    constexpr int kAtOnce = sizeof(typename D::Storage) == 2 ? 2 / Op::kInputs : 1;
    const Pack* held = place(cursor.slot) + tid;
    const auto load = [&](int u) {
      Packs<Op, D> loaded;
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) loaded.raw[i] = held[i * chunk + u * threads];
      return loaded;
    };
#pragma unroll(sizeof(typename D::Storage) == 2 ? kChunk / kAtOnce : 2)
    for (int u = 0; u < kChunk; u += kAtOnce) {
      const int q = p + tid + u * threads;
      if (piece.whole(q, q + (kAtOnce - 1) * threads + 1)) {
        Packs<Op, D> loaded[kAtOnce];
#pragma unroll
        for (int v = 0; v < kAtOnce; ++v) loaded[v] = load(u + v);
        visit(loaded, q, std::true_type());
      } else {
#pragma unroll 1
        for (int v = 0; v < kAtOnce && q + v * threads < piece.packs(); ++v) {
          Packs<Op, D> loaded[1] = {load(u + v)};
          loaded[0].mask(piece, q + v * threads);
          visit(loaded, q + v * threads, std::false_type());
        }
      }
    }
  };
  int turn = 0;
  for (std::int64_t row = first_row; row < rows.rows; row += groups, ++turn) {
    const Part piece = piece_of(row);
    const auto known = given<Op, D>(rows, row);
    State state;
    Cursor kept = at;  // where the chunks that stay in the ring begin
    int p = 0;
    if constexpr (kFolds) {
#pragma unroll 1
      for (; p < piece.packs(); p += chunk) {
        full[at.slot].wait(at.phase);
        each(piece, at, p,
             [&](const auto& loaded, int, auto) { fold_packs<Op, D>(state, piece, loaded); });
        if (p < cut.streamed) {
          release(at);
          kept.advance(slots);
        }
        at.advance(slots);
      }

      reduce_row<kWorkers>(state, threads, cooperative ? 2 * turn : turn, scratch);
      if (cluster) {
        if (turn == 0) wait_for_cluster();
        if (tid < 32) mailbox.send(state, rank, blocks, turn);
        state = mailbox.collect(turn);
      } else if (cooperative) {
        if (tid == 0) Slot<State>::at(rows, row * blocks + rank).put(state);
        state = collect_slots<State>(rows, row, blocks, tid, threads, true);
        reduce_row<kWorkers>(state, threads, 2 * turn + 1, scratch);
      }
    }
    if (tid == 0 && rank == 0) leave<Op, D>(rows, row, state);
    if constexpr (Op::kMaps) {
      const typename Op::Row finished = Op::finish(state, known);
      const auto map = [&](const Cursor& cursor, int from) {
        each(piece, cursor, from, [&](const auto& loaded, int q, auto whole) {
          constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(loaded)>>;
#pragma unroll
          for (int v = 0; v < kCount; ++v) {
            loaded[v].template map<decltype(whole)::value>(rows, piece, q + v * threads, finished,
                                                           cooperative);
          }
        });
        release(cursor);
      };
      const int again = min(p, cut.streamed);
#pragma unroll 1
      for (int q = cut.streamed; q < piece.packs(); q += chunk, kept.advance(slots)) {
        if constexpr (!kFolds) full[kept.slot].wait(kept.phase);
        map(kept, q);
      }
      if constexpr (!kFolds) at = kept;
#pragma unroll 1
      for (int q = again; q > 0; q -= chunk, at.advance(slots)) {
        full[at.slot].wait(at.phase);
        map(at, q - chunk);
      }
    }
  }
}

template <class Op, class D>
void launch_ring(const Rows& rows, const Plan& plan, Enqueue& enqueue) {
  const int slots = plan.slots(Op::kInputs), chunk = plan.threads * kChunk;
  const std::int64_t packs = packs_of(rows.cols, kPerPack<D>, kLine);
  const int size = static_cast<int>(pieces(pieces(packs, plan.splits), kLine)) * kLine;
  const int chunks = static_cast<int>(pieces(size, chunk));
  const int kept = !Op::kMaps ? 0 : Op::kFolded == 0 || chunks <= slots ? chunks : slots - kAhead;
  const Cut cut{size, (chunks - kept) * chunk};
  Launch launch{plan.threads + 32, plan.threads * plan.smem_packs * kPackBytes, plan.splits};
  launch.cooperative = plan.path == Path::split_k;
  launch.cluster = plan.splits > 1 && !launch.cooperative;
  // With room for the next row's chunks a block goes on to it; without, a new block, for the device
  // balances blocks better than a stride does: 8192 x 32768 float16, 264 against 283 us.
  launch.persistent = launch.cooperative || slots > chunks;
  launch.hopper = true;
  if (launch.cooperative && Op::kFolded > 0) {
    enqueue.zero(rows.workspace, rows.rows * plan.splits * kStateBytes);
  }
  enqueue.operator()<ring<Op, D>>("ring", rows.rows * plan.splits, launch, rows, plan.splits, slots,
                                  cut, launch.cooperative);
}

}  // namespace jaxsoftmax::cuda
