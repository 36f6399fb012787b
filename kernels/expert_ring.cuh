// How products of experts fill their ring, by their jobs.
//
// Macros: those of expert_jobs.cuh.
#pragma once

#include "expert_jobs.cuh"
#include "operand_ring.cuh"

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
