// What routing leaves for the experts' products: each expert's pairs of row and rank, and the jobs.
//
// Macros: EXPERTS.
#pragma once

struct Sorted {
    int* places;  // [rows, TOP_K]: where each pair lies; with several blocks: among the pairs of its expert
    int* pairs;   // [rows * TOP_K]: row * TOP_K + rank of what lies there; not filled by several blocks
    int* members; // [EXPERTS, room]: each expert's pairs
    int* counts;  // [EXPERTS]: how many there are yet; 0 between launches
    int* ends;    // [EXPERTS]: where each expert's pairs end
    int* jobs;    // their number, three unused words; then of each: expert, first pair, pairs, pairs of the expert before
    int room;
    int job_rows; // most pairs of a job
};

// By a block of `Threads` threads, of which thread e knows the pairs of expert e: lists ends and jobs; returns where the
// expert's pairs begin.
template <int Threads>
__device__ __forceinline__ int list_jobs(int count, const Sorted& sorted) {
    __shared__ unsigned long long totals[2][Threads];  // pairs in the upper half, jobs in the lower
    const int thread = threadIdx.x;
    const int own_jobs = (count + sorted.job_rows - 1) / sorted.job_rows;
    const int of_job = own_jobs > 0 ? (count + own_jobs - 1) / own_jobs : 0;  // jobs of an expert are of equal size
    unsigned long long total = static_cast<unsigned long long>(count) << 32 | own_jobs;
    int side = 0;
    for (int distance = 1; distance < EXPERTS; distance *= 2, side ^= 1) {
        totals[side][thread] = total;
        __syncthreads();
        if (thread >= distance) total += totals[side][thread - distance];
    }
    const int end = static_cast<int>(total >> 32), jobs_end = static_cast<int>(total);
    if (thread < EXPERTS) {
        sorted.ends[thread] = end;
        for (int i = 0; i < own_jobs; i++) {
            int* job = sorted.jobs + 4 + (jobs_end - own_jobs + i) * 4;
            job[0] = thread;
            job[1] = end - count + i * of_job;
            job[2] = min(of_job, count - i * of_job);
            job[3] = i * of_job;
        }
        if (thread == EXPERTS - 1) sorted.jobs[0] = jobs_end;
    }
    return end - count;
}

// By every block, once it has counted and listed its pairs: the last to arrive lists the jobs. `arrived` is 0 and becomes it.
template <int Threads>
__device__ __forceinline__ void list_jobs_at_last(const Sorted& sorted, int* arrived) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrived, 1) == static_cast<int>(gridDim.x) - 1;
        if (is_last) *arrived = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    int count = 0;
    if (threadIdx.x < EXPERTS) {
        count = __ldcg(sorted.counts + threadIdx.x);
        sorted.counts[threadIdx.x] = 0;
    }
    list_jobs<Threads>(count, sorted);
}
