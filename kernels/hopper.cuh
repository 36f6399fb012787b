// Hopper's asynchronous instructions in inline PTX: mbarriers, tensor copies (TMA), warpgroup matrix products (wgmma).
// Only for sm_90a. Layouts have the 128-byte swizzle: rows of 128 bytes, tiles aligned to 1,024.
#pragma once

#include "attention.cuh"

// A CUtensorMap, encoded on the host.
struct __align__(64) TensorMap {
    unsigned long long opaque[16];
};

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds the bytes of asynchronous copies to wait for.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    do {
        asm volatile(
            "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ __forceinline__ void copy_tensor(
    unsigned shared, const TensorMap* map, int column, int row, int plane, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared),
        "l"(map), "r"(column), "r"(row), "r"(plane), "r"(barrier)
        : "memory");
}

// The same for what is read once: under this policy of L2 it leaves before what is read again.
__device__ __forceinline__ void copy_tensor(unsigned shared, const TensorMap* map, int column, int row, int plane,
    unsigned barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
        "l"(map), "r"(column), "r"(row), "r"(plane), "r"(barrier), "l"(policy)
        : "memory");
}

// Asks L2 for what a copy will read.
__device__ __forceinline__ void prefetch_tensor(const TensorMap* map, int column, int row, int plane) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(column), "r"(row),
                 "r"(plane)
                 : "memory");
}

// Copies contiguous bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bytes(unsigned shared, const void* global, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Brings contiguous bytes into L2; address and size are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* global, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ uint4 load_shared(unsigned address) {
    uint4 data;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
                 : "r"(address)
                 : "memory");
    return data;
}

__device__ __forceinline__ void store_shared(unsigned address, uint4 data) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(data.x), "r"(data.y), "r"(data.z),
                 "r"(data.w)
                 : "memory");
}

// A position in a ring of stages, with the parity of its barriers.
template <int Stages>
struct Ring {
    int stage = 0;
    unsigned parity;

    __device__ __forceinline__ explicit Ring(unsigned first_parity) : parity(first_parity) {}
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) stage = 0, parity ^= 1;
    }
};

// Lower half of the descriptor of a matrix in shared memory with 128-byte swizzle. Only this half varies, so that steps
// are 32-bit additions. `leading` is the distance in bytes between 128-byte columns, for operands not stored along k.
__device__ __forceinline__ unsigned matrix_descriptor(unsigned address, unsigned leading) {
    return (address & 0x3ffff) >> 4 | (leading >> 4) << 16;
}

// Adds the upper half: 1,024 bytes between groups of eight rows, 128-byte swizzle.
__device__ __forceinline__ unsigned long long whole_descriptor(unsigned low) {
    return (1ull << 30 | 1024 >> 4) << 32 | low;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Lane q of each quad gets word q of all four lanes, in lane order: 16 bytes to be stored at once. `odd` is q & 1,
// `upper` is q & 2, as bool or int, whichever compiles to fewer instructions.
template <typename Flag>
__device__ __forceinline__ void exchange_in_quad(unsigned (&words)[4], Flag odd, Flag upper) {
    const auto swap = [](unsigned& first, unsigned& second, Flag swaps_first, int distance) {
        const unsigned other = __shfl_xor_sync(kFullWarp, swaps_first ? first : second, distance);
        if (swaps_first) first = other; else second = other;
    };
    swap(words[0], words[1], odd, 1);
    swap(words[2], words[3], odd, 1);
    swap(words[0], words[2], upper, 2);
    swap(words[1], words[3], upper, 2);
}
