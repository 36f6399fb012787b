// Which experts each row goes to, with which weights, and in what order an expert's rows lie: one launch.
//
// A warp takes a row: it finds the TOP_K largest logits, ties to the lower expert, and their weights. The block that is
// the last to finish sorts the pairs of row and expert by expert, and lists the work of kernels/expert_product.cu. Which
// of an expert's pairs comes first is left to chance: no sum depends on it.
//
// Macros: EXPERTS, up to 1,024; TOP_K, up to 32; SOFTMAX_FIRST, 1: weights are those of the softmax over all experts, else
// over the chosen ones; NORMALIZE, of SOFTMAX_FIRST: weights of a row add up to 1.

#include "vector.cuh"

constexpr int kThreads = 1024;  // of a block
constexpr int kWarps = kThreads / 32;
constexpr int kOfLane = (EXPERTS + 31) / 32;  // experts
constexpr int kSquaresPitch = 128;  // as kernels/skinny_product.cu
constexpr unsigned kWhole = 0xffffffffu;
static_assert(EXPERTS <= kThreads && TOP_K <= 32 && TOP_K <= EXPERTS, "a thread for each expert, a lane for each choice");

// In the order of the numbers, and never 0.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(value);
    return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}

// By a warp: one row's experts and weights, in lanes up to TOP_K.
struct Choice {
    int expert = 0;
    float weight = 0.0f;

    __device__ __forceinline__ Choice(const float* logits, const float* bias) {
        const int lane = threadIdx.x % 32;
        float values[kOfLane];
        unsigned keys[kOfLane];
#pragma unroll
        for (int i = 0; i < kOfLane; i++) {
            const int index = i * 32 + lane;
            values[i] = index < EXPERTS ? logits[index] + (bias ? bias[index] : 0.0f) : 0.0f;
            keys[i] = index < EXPERTS ? ordered(values[i]) : 0;
        }
        float value = 0.0f, largest = 0.0f;
        for (int rank = 0; rank < TOP_K; rank++) {
            unsigned best = 0;
            int place = 0;
            float of_place = 0.0f;
#pragma unroll
            for (int i = 0; i < kOfLane; i++) {
                if (keys[i] > best) best = keys[i], place = i * 32 + lane, of_place = values[i];
            }
            const unsigned most = __reduce_max_sync(kWhole, best);
            const int chosen = __reduce_min_sync(kWhole, best == most ? static_cast<unsigned>(place) : kWhole);
            const float of_chosen = __shfl_sync(kWhole, of_place, chosen % 32);
            if (rank == 0) largest = of_chosen;
            if (rank == lane) expert = chosen, value = of_chosen;
#pragma unroll
            for (int i = 0; i < kOfLane; i++) {
                if (i * 32 + lane == chosen) keys[i] = 0;
            }
        }
        weight = lane < TOP_K ? expf(value - largest) : 0.0f;
        float sum = 0.0f;
        if (SOFTMAX_FIRST) {
#pragma unroll
            for (int i = 0; i < kOfLane; i++) sum += i * 32 + lane < EXPERTS ? expf(values[i] - largest) : 0.0f;
            weight /= lane_sum(sum, 32);
        }
        if (!SOFTMAX_FIRST || NORMALIZE) weight /= lane_sum(weight, 32);
    }
};

struct Sorted {
    int* places;  // [rows, TOP_K]: where each pair lies
    int* pairs;   // [rows * TOP_K]: row * TOP_K + rank of what lies there
    int* ends;    // [EXPERTS]: where each expert's pairs end
    int* jobs;    // their number, three unused words; then of each: expert, first pair, pairs, unused
    int job_rows; // most pairs of a job
};

// By a block. `expert_of(pair)` is a pair's expert.
template <typename ExpertOf>
__device__ __forceinline__ void sort(const ExpertOf& expert_of, int num_pairs, const Sorted& sorted) {
    __shared__ int counts[EXPERTS];
    __shared__ unsigned long long totals[2][kThreads];  // pairs in the upper half, jobs in the lower
    const int thread = threadIdx.x;
    if (thread < EXPERTS) counts[thread] = 0;
    __syncthreads();
#pragma unroll 4
    for (int pair = thread; pair < num_pairs; pair += kThreads) atomicAdd(&counts[expert_of(pair)], 1);
    __syncthreads();
    const int count = thread < EXPERTS ? counts[thread] : 0;
    const int own_jobs = (count + sorted.job_rows - 1) / sorted.job_rows;
    unsigned long long total = static_cast<unsigned long long>(count) << 32 | own_jobs;
    int side = 0;
    for (int distance = 1; distance < EXPERTS; distance *= 2, side ^= 1) {
        totals[side][thread] = total;
        __syncthreads();
        if (thread >= distance) total += totals[side][thread - distance];
    }
    if (thread < EXPERTS) {
        const int end = static_cast<int>(total >> 32), jobs_end = static_cast<int>(total);
        sorted.ends[thread] = end;
        counts[thread] = end - count;
        for (int i = 0; i < own_jobs; i++) {
            int* job = sorted.jobs + 4 + (jobs_end - own_jobs + i) * 4;
            job[0] = thread;
            job[1] = end - count + i * sorted.job_rows;
            job[2] = min(sorted.job_rows, count - i * sorted.job_rows);
        }
        if (thread == EXPERTS - 1) sorted.jobs[0] = jobs_end;
    }
    __syncthreads();
#pragma unroll 4
    for (int pair = thread; pair < num_pairs; pair += kThreads) {
        const int place = atomicAdd(&counts[expert_of(pair)], 1);
        sorted.places[pair] = place;
        sorted.pairs[place] = pair;
    }
}

// logits [rows, EXPERTS], rows `stride` apart; bias [EXPERTS] or null. `arrived` is 0 and becomes it. With `squares`
// [num_squares, kSquaresPitch], whose columns add up to the sums of squares of a pass's rows, scales [rows] become their
// 1 / rms.
extern "C" __global__ void __launch_bounds__(kThreads) expert_routing(
    const float* logits, const float* bias, int* experts, float* weights, int* places, int* pairs, int* ends, int* jobs,
    int* arrived, const float* squares, float* scales, int num_squares, float inverse_width, float eps, int stride,
    int num_rows, int job_rows) {
    release_successors();
    wait_for_predecessors();
    const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    __shared__ int own[kWarps * TOP_K];  // experts of the block's rows
    if (row < num_rows) {
        float sum = 0.0f;
        if (squares) {
            for (int i = lane; i < num_squares; i += 32) sum += squares[i * kSquaresPitch + row];
        }
        const Choice choice(logits + static_cast<long long>(row) * stride, bias);
        if (lane < TOP_K) {
            experts[row * TOP_K + lane] = choice.expert;
            weights[row * TOP_K + lane] = choice.weight;
            own[threadIdx.x / 32 * TOP_K + lane] = choice.expert;
        }
        if (squares) {
            sum = lane_sum(sum, 32);
            if (lane == 0) scales[row] = rsqrtf(sum * inverse_width + eps);
        }
    }
    const Sorted sorted{places, pairs, ends, jobs, job_rows};
    if (gridDim.x == 1) {
        __syncthreads();
        sort([&](int pair) { return own[pair]; }, num_rows * TOP_K, sorted);
        return;
    }
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
    sort([&](int pair) { return __ldcg(experts + pair); }, num_rows * TOP_K, sorted);
}
