// What blocks of a cluster do with each other's shared memory: copies that go to several blocks, arrivals at barriers.
// Only for sm_90a; blocks of a cluster lay their shared memory out alike.
#pragma once

#include "hopper.cuh"

// This block's place in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// By whole warps. What was written to shared memory before is visible to the cluster after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the barrier that block `rank` has at this address.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// As copy_tensor, into every block whose bit is set in `ranks`, each of which is told at its own barrier.
__device__ __forceinline__ void copy_tensor_to(
    unsigned ranks, unsigned shared, const TensorMap* map, int column, int row, int plane, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
        "l"(map), "r"(column), "r"(row), "r"(plane), "r"(barrier), "h"(static_cast<unsigned short>(ranks))
        : "memory");
}
