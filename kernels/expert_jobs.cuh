// The work of kernels/expert_product.cu and kernels/expert_tiles.cu, as kernels/expert_routing.cu lists it on the device:
// a job is an expert and some of its rows, which lie one after the other; each of them has all tiles of the matrix.
//
// Macros: SCALAR; ROUTES, of kernels/expert_product.cu; GATHERS is one of kernels/expert_tiles.cu.
#pragma once

#include "hopper.cuh"
#include "vector.cuh"

struct Problem {
    const int* jobs;      // their number, three other words, then of each: expert, first row, rows, rows of it before
    const int* pairs;     // [rows]: token * top_k + rank of each sorted row; of GATHERS, of each expert's rows
    int top_k;
    union {
        int all_rows;     // of expert_product.cu: rows of x, where they are few and not sorted; else 0
        int room;         // of GATHERS: distance of the pairs of two experts
    };
    int steps;            // columns of W, in pieces of 64
    int tiles;            // of an expert's matrix
    int outputs;          // columns of `out`
    const SCALAR* bias;   // [experts, 2 * outputs], of BIAS
    const float* scales;  // [tokens], of SCALED
    SCALAR* out;          // [rows, outputs]
};

// By a thread of a block that has found the jobs itself, they are in its shared memory.
__device__ __forceinline__ int load_job(const int* job) { return ROUTES ? *job : __ldcg(job); }

// A tile of a job.
struct Work {
    int expert, first, rows, before, tile;

    __device__ __forceinline__ Work(const Problem& problem, int index) {
        const int* job = problem.jobs + 4 + index / problem.tiles * 4;
        expert = load_job(job), first = load_job(job + 1), rows = load_job(job + 2), before = load_job(job + 3);
        tile = index % problem.tiles;
    }
    __device__ __forceinline__ Work(int expert, int first, int rows, int tile)
        : expert(expert), first(first), rows(rows), before(0), tile(tile) {}
    // Columns of the product.
    __device__ __forceinline__ int columns(const Problem& problem) const {
        return problem.all_rows ? problem.all_rows : rows;
    }
};

// A kernel that starts after this may rely on the jobs.
__device__ __forceinline__ void wait_then_release() {
    wait_for_predecessors();
    release_successors();
}

// The tile that a block begins with, if there is that much work: read at once, beside the number of jobs.
__device__ __forceinline__ Work first_work(const Problem& problem) {
    Work work(problem, blockIdx.x);
    asm volatile("" : "+r"(work.expert), "+r"(work.first), "+r"(work.rows), "+r"(work.before));
    return work;
}
