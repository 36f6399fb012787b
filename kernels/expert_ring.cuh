// The ring of shared memory through which products of experts get their operands, and how it is filled.
//
// Macros: those of expert_jobs.cuh.
#pragma once

#include "expert_jobs.cuh"

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

// By one thread: fills the ring for all of a block's tiles. `copies` has the ring, `shared`; it expects a stage's bytes and
// copies weights and inputs. If the jobs are older than the predecessor, the first stages get their weights before that has
// ended.
template <bool JobsAreOlder, typename Copies>
__device__ __forceinline__ void fill_ring(const Copies& copies, const Problem& problem) {
    constexpr int kStages = decltype(copies.shared)::kStages;
    Ring<kStages> ring(1);
    int done = 0;
    if (!JobsAreOlder) wait_then_release();
    const int total = load_job(problem.jobs) * problem.tiles;
    if (JobsAreOlder) {
        if (static_cast<int>(blockIdx.x) < total) {
            const Work work(problem, blockIdx.x);
            done = min(kStages, problem.steps);
            for (int i = 0; i < done; i++) {
                copies.expect(work, i);
                copies.copy_weights(work, i, i);
            }
            wait_then_release();
            for (int i = 0; i < done; i++, ring.advance()) copies.copy_inputs(work, i, i);
        } else {
            wait_then_release();
        }
    }
    for (int index = blockIdx.x; index < total; index += gridDim.x, done = 0) {
        const Work work(problem, index);
        for (int step = done; step < problem.steps; step++, ring.advance()) {
            barrier_wait(copies.shared.empty(ring.stage), ring.parity);
            copies.expect(work, ring.stage);
            copies.copy_weights(work, step, ring.stage);
            copies.copy_inputs(work, step, ring.stage);
        }
    }
}
