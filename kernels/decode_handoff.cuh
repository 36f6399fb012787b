// How the warps of a block leave their shares of a segment to whoever merges them, without waiting for one another.
//
// There are two places for shares, used in turn, so that a warp may end a segment while the one before is still being
// merged. The last warp to arrive at a place merges what lies there; nobody else stops. Barriers tell the merger that
// all is there (it is: the wait is for the memory's order), and everybody that a place is free again.
#pragma once

#include "decode_merge.cuh"

constexpr int kPlaces = 2;

// In shared memory. A barrier's phase ends when all lanes of the warps that it counts have arrived.
struct HandOffState {
    unsigned long long full[kPlaces];
    unsigned long long free[kPlaces];
    int arrived[kPlaces];  // warps, over all uses
};

__device__ __forceinline__ void phase_init(unsigned long long* barrier, int threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(threads) : "memory");
}

__device__ __forceinline__ void phase_arrive(unsigned long long* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void phase_wait(unsigned long long* barrier, int parity) {
    unsigned done;
    do {
        asm volatile(
            "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}

// One warp's view. `segment` counts those of this block's range that end before the range does.
struct HandOff {
    HandOffState* state;
    int lane;
    int segment = 0;

    __device__ __forceinline__ HandOff(HandOffState* shared, int lane_of_warp) : state(shared), lane(lane_of_warp) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kPlaces; i++) {
                phase_init(state->full + i, WARPS * 32);
                phase_init(state->free + i, 32);
                state->arrived[i] = 0;
            }
        }
        __syncthreads();
    }

    __device__ __forceinline__ int place() const { return segment % kPlaces; }
    __device__ __forceinline__ int use() const { return segment / kPlaces; }

    // Before a warp writes to the place.
    __device__ __forceinline__ void wait_free() const {
        if (use() > 0) phase_wait(state->free + place(), (use() - 1) & 1);
    }
    // After it has written; whether it is the one that merges.
    __device__ __forceinline__ bool arrive() const {
        phase_arrive(state->full + place());
        __syncwarp();
        int before = 0;
        if (lane == 0) before = atomicAdd(state->arrived + place(), 1);
        before = __shfl_sync(kFullWarp, before, 0);
        if (before % WARPS != WARPS - 1) return false;
        phase_wait(state->full + place(), use() & 1);
        return true;
    }
    // After the merger has read all.
    __device__ __forceinline__ void release() const { phase_arrive(state->free + place()); }
};
