// The ring of shared memory through which products of experts get their operands.
#pragma once

#include "hopper.cuh"

// Stages with a piece of a matrix and one of x each; then a full and an empty barrier for each stage.
template <int Stages, int WeightBytes, int InputBytes>
struct OperandRing {
    static constexpr int kStages = Stages;
    static constexpr int kStageBytes = WeightBytes + InputBytes;
    static constexpr int kBytes = Stages * (kStageBytes + 16);

    unsigned base;  // shared memory

    __device__ __forceinline__ unsigned weights(int stage) const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned inputs(int stage) const { return weights(stage) + WeightBytes; }
    __device__ __forceinline__ unsigned full(int stage) const { return base + Stages * kStageBytes + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }

    // By one thread, before the block synchronises.
    __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals) const {
        for (int i = 0; i < Stages; i++) {
            barrier_init(full(i), full_arrivals);
            barrier_init(empty(i), empty_arrivals);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};
