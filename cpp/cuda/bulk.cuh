// Hopper's asynchronous machinery, as thin as its instructions: barriers in shared memory that
// count bytes, bulk copies into shared memory, stores into another block's shared memory, waiting
// for the blocks of a cluster and for the kernel before. Older architectures have none of it: what
// needs it is not launched there. A thread's own copies and parcels in device memory work
// everywhere.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace jaxsoftmax::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JAXSOFTMAX_HOPPER(...) __VA_ARGS__
#else
#define JAXSOFTMAX_HOPPER(...) __trap()
#endif

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// An mbarrier: its phase ends when all arrivals and all announced bytes are in.
class Barrier {
 public:
  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals));
  }
  __device__ void arrive() {
    JAXSOFTMAX_HOPPER(
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory"));
  }
  __device__ void arrive_expecting(int bytes) {
    JAXSOFTMAX_HOPPER(
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                     "r"(bytes) : "memory"));
  }
  // Until the phase of this parity has ended.
  __device__ void wait(unsigned parity) {
    JAXSOFTMAX_HOPPER(
        asm volatile("{\n.reg .pred done;\n"
                     "again:\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again;\n}" ::"r"(address()),
                     "r"(parity) : "memory"));
  }
  // The same, and what other blocks of the cluster have sent can then be read.
  __device__ void wait_for_cluster(unsigned parity) {
    JAXSOFTMAX_HOPPER(
        asm volatile("{\n.reg .pred done;\n"
                     "again:\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again;\n}" ::"r"(address()),
                     "r"(parity) : "memory"));
  }
  __device__ unsigned address() const { return shared_address(&word_); }

 private:
  std::uint64_t word_;
};

// Makes initialised barriers known to the copy engine and to the other blocks of the cluster.
__device__ inline void publish_barriers() {
  JAXSOFTMAX_HOPPER(asm volatile("fence.mbarrier_init.release.cluster;" :: : "memory"));
}

// How long L2 should keep what a bulk copy reads: as little, or as much, as it can.
enum class Keep { least, most };

// `bytes`, a multiple of 16, between 16-byte aligned addresses; they count towards `barrier`.
__device__ inline void copy_bulk(void* shared, const void* global, int bytes, Barrier& barrier) {
  JAXSOFTMAX_HOPPER(
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                   " [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
                   "l"(global), "r"(bytes), "r"(barrier.address()) : "memory"));
}
__device__ inline void copy_bulk(void* shared, const void* global, int bytes, Barrier& barrier,
                                 Keep keep) {
  std::uint64_t policy = 0;
  if (keep == Keep::least) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  }
  JAXSOFTMAX_HOPPER(
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                   ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
                   "l"(global), "r"(bytes), "r"(barrier.address()), "l"(policy) : "memory"));
}

// 4, 8 or 16 bytes into shared memory, asynchronously, and this thread's wait for all it copies.
template <int kBytes>
__device__ void copy_async(void* shared, const void* global) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                 "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(kBytes)
                 : "memory");
  }
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Where block `rank` of the cluster has what this block has at a shared address.
__device__ inline unsigned remote(unsigned address, unsigned rank) {
  unsigned there = 0;
  JAXSOFTMAX_HOPPER(
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank)));
  return there;
}

// `value` to the place `to` of block `rank` of the cluster; its bytes count towards that block's
// `barrier`.
template <class T>
__device__ void send(T& to, const T& value, Barrier& barrier, unsigned rank) {
  constexpr int kWords = sizeof(T) / 4;
  static_assert(sizeof(T) % 4 == 0);
  unsigned words[kWords];
  memcpy(words, &value, sizeof value);
  const unsigned place = remote(shared_address(&to), rank);
  const unsigned signal = remote(barrier.address(), rank);
#pragma unroll
  for (int i = 0; i + 2 <= kWords; i += 2) {
    JAXSOFTMAX_HOPPER(asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
            place + 4 * i),
        "r"(words[i]), "r"(words[i + 1]), "r"(signal) : "memory"));
  }
  if constexpr (kWords % 2 == 1) {
    JAXSOFTMAX_HOPPER(asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            place + 4 * (kWords - 1)),
        "r"(words[kWords - 1]), "r"(signal) : "memory"));
  }
}

// The two halves of a barrier over all threads of the cluster; it orders published barriers only.
__device__ inline void arrive_at_cluster() {
  JAXSOFTMAX_HOPPER(asm volatile("barrier.cluster.arrive.relaxed.aligned;" :: : "memory"));
}
__device__ inline void wait_for_cluster() {
  JAXSOFTMAX_HOPPER(asm volatile("barrier.cluster.wait.acquire.aligned;" :: : "memory"));
}

// Lets a dependent kernel start its blocks as soon as there is room; waits for the kernel before.
__device__ inline void start_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_dependence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 16 bytes of device memory, written and read at once: seen whole or not at all.
struct Parcel {
  std::uint64_t low, high;
};
__device__ inline void put(Parcel* to, Parcel parcel) {
  asm volatile(
      "{\n.reg .b128 all;\nmov.b128 all, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], all;\n}" ::"l"(
          to),
      "l"(parcel.low), "l"(parcel.high)
      : "memory");
}
__device__ inline Parcel look(const Parcel* from) {
  Parcel parcel;
  asm volatile(
      "{\n.reg .b128 all;\nld.relaxed.gpu.global.b128 all, [%2];\nmov.b128 {%0, %1}, all;\n}"
      : "=l"(parcel.low), "=l"(parcel.high)
      : "l"(from)
      : "memory");
  return parcel;
}

}  // namespace jaxsoftmax::cuda
