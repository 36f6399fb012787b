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
    int* jobs;    // their number, tiles of two products that are claimed yet, an unused word; then of each job: expert,
                  // first pair, pairs, pairs of the expert before
    int room;
    int job_rows; // most pairs of a job
    bool alternates;
};

// Where jobs of many rows, at the rate of the tensor cores, and jobs of few, at that of memory, lie among all if they
// alternate, so that both kinds run at the same time. A quarter of the second kind comes last: blocks then end together.
struct Alternation {
    int many, spread;  // jobs of many rows, and those of few among them

    __device__ __forceinline__ Alternation(int many, int few) : many(many), spread(few - few / 4) {}
    __device__ __forceinline__ int of_many(int index) const { return index + index * spread / many; }
    __device__ __forceinline__ int of_few(int index) const {
        return index + (index < spread ? ((index + 1) * many + spread - 1) / spread : many);
    }
};

// By a block of `Threads` threads, of which thread e knows the pairs of expert e: lists ends and jobs; returns where the
// expert's pairs begin.
template <int Threads>
__device__ __forceinline__ int list_jobs(int count, const Sorted& sorted) {
    // Pairs in the upper half; in the lower one jobs of few rows, and above them those of many.
    __shared__ unsigned long long totals[2][Threads];
    const int thread = threadIdx.x;
    const int own_jobs = (count + sorted.job_rows - 1) / sorted.job_rows;
    const int of_job = own_jobs > 0 ? (count + own_jobs - 1) / own_jobs : 0;  // jobs of an expert are of equal size
    const bool has_many = sorted.alternates && 2 * of_job >= sorted.job_rows;
    unsigned long long total = static_cast<unsigned long long>(count) << 32 | own_jobs << (has_many ? 16 : 0);
    int side = 0;
    for (int distance = 1; distance < EXPERTS; distance *= 2, side ^= 1) {
        totals[side][thread] = total;
        __syncthreads();
        if (thread >= distance) total += totals[side][thread - distance];
    }
    totals[side][thread] = total;
    __syncthreads();
    const unsigned all = static_cast<unsigned>(totals[side][EXPERTS - 1]), jobs_end = static_cast<unsigned>(total);
    const Alternation places(all >> 16, all & 0xffff);
    const int end = static_cast<int>(total >> 32);
    if (thread < EXPERTS) {
        sorted.ends[thread] = end;
        const int first = (has_many ? jobs_end >> 16 : jobs_end & 0xffff) - own_jobs;
        for (int i = 0; i < own_jobs; i++) {
            int* job = sorted.jobs + 4 + (has_many ? places.of_many(first + i) : places.of_few(first + i)) * 4;
            job[0] = thread;
            job[1] = end - count + i * of_job;
            job[2] = min(of_job, count - i * of_job);
            job[3] = i * of_job;
        }
        if (thread == EXPERTS - 1) {
            sorted.jobs[0] = (all >> 16) + (all & 0xffff);
            sorted.jobs[1] = sorted.jobs[2] = 0;
        }
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
