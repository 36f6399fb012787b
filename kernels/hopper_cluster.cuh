// Access to the shared memory of other blocks of a cluster: multicast copies, arrivals at barriers.
// Only for sm_90a; all blocks of a cluster have the same layout of shared memory.
#pragma once

#include "hopper.cuh"

// Rank of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Called by whole warps. Earlier writes to shared memory are visible to the cluster afterwards.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Its two halves.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Arrives at the barrier at this address in block `rank`.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Like copy_tensor, into every block whose bit is set in `ranks`; the copy completes at each block's own barrier.
__device__ __forceinline__ void copy_tensor_to(
    unsigned ranks, unsigned shared, const TensorMap* map, int column, int row, int plane, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
        "l"(map), "r"(column), "r"(row), "r"(plane), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
        : "memory");
}
