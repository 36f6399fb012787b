// How blocks claim tiles of experts' products, one after another, and tell the warps that multiply.
//
// Macros: those of expert_jobs.cuh.
#pragma once

#include "expert_ring.cuh"

// In shared memory, for each stage: the work of which it has the first operands. Behind the last work is one without rows.
struct Announced {
    static constexpr int kWords = 4;

    int* words;

    // By the thread that fills the ring, before it arrives at the stage's full barrier.
    __device__ __forceinline__ void leave(int stage, const Work& work) const {
        *reinterpret_cast<uint4*>(words + stage * kWords) = make_uint4(work.expert, work.first, work.rows, work.tile);
    }
    __device__ __forceinline__ void leave_end(int stage) const { leave(stage, Work(0, 0, 0, 0)); }
    __device__ __forceinline__ Work at(int stage) const {
        uint4 four = *reinterpret_cast<const uint4*>(words + stage * kWords);
        // Equal in all lanes; the shuffles show that to the compiler, which then uses uniform registers.
        four.x = __shfl_sync(kFullWarp, four.x, 0), four.y = __shfl_sync(kFullWarp, four.y, 0);
        four.z = __shfl_sync(kFullWarp, four.z, 0), four.w = __shfl_sync(kFullWarp, four.w, 0);
        return Work(static_cast<int>(four.x), static_cast<int>(four.y), static_cast<int>(four.z), static_cast<int>(four.w));
    }
};

// By a warpgroup: passes on which tile the leading thread has claimed. `next` are two words of shared memory, for turns.
__device__ __forceinline__ int share_claim(int* next, int turn, bool leads, int claimed) {
    if (leads) next[turn & 1] = claimed;
    asm volatile("bar.sync %0, %1;" ::"n"(1), "n"(128) : "memory");
    return next[turn & 1];
}

// By one thread: fills the ring as `fill_ring` does where jobs are older than the predecessor. A block begins with the tile
// of its own number, and claims others: `claimed` of them have been claimed.
template <typename Copies>
__device__ __forceinline__ void fill_ring_by_claims(
    const Copies& copies, const Problem& problem, const Announced& announced, int* claimed) {
    constexpr int kStages = decltype(copies.shared)::kStages;
    Ring<kStages> ring(1);
    const int total = load_job(problem.jobs) * problem.tiles;
    int index = blockIdx.x, done = 0;
    Work work(problem, index);
    if (index < total) {
        done = min(kStages, problem.steps);
        announced.leave(0, work);
        for (int i = 0; i < done; i++) {
            copies.expect(work, i);
            copies.copy_weights(work, i, i);
        }
    }
    wait_then_release();
    for (int i = 0; i < done; i++, ring.advance()) copies.copy_inputs(work, i, i);
    while (index < total) {
        index = gridDim.x + atomicAdd(claimed, 1);
        for (int step = done; step < problem.steps; step++, ring.advance()) {
            barrier_wait(copies.shared.empty(ring.stage), ring.parity);
            if (step == 0) announced.leave(ring.stage, work);
            copies.expect(work, ring.stage);
            copies.copy_weights(work, step, ring.stage);
            copies.copy_inputs(work, step, ring.stage);
        }
        if (index < total) work = Work(problem, index);
        done = 0;
    }
    barrier_wait(copies.shared.empty(ring.stage), ring.parity);
    announced.leave_end(ring.stage);
    barrier_arrive(copies.shared.full(ring.stage));
}
