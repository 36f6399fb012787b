// Which experts each row goes to, with which weights, and in what order an expert's rows lie: one launch.
//
// A warp takes a row: it finds the TOP_K largest scores, ties to the lower expert, and their weights. The block that is
// the last to finish sorts the pairs of row and expert by expert, and lists the work of kernels/expert_product.cu. Which
// of an expert's pairs comes first is left to chance: no sum depends on it.
//
// Macros: EXPERTS, up to 1,024; TOP_K, up to 32; SCORING, 0: scores are the softmax over all experts, 1: over the chosen
// ones, 2: sigmoids; NORMALIZE, of 0 and 2: a row's weights are divided by their sum, of 0 by LEAST_SUM at least; SCALE,
// factor of the weights; CORRECTED, 1: the bias is added to scores when experts are chosen, 0: to logits; GROUPS, up to
// 32: experts are in groups, and are chosen of the TOP_GROUPS whose two largest scores have the largest sums.

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

enum { kSoftmax, kSoftmaxOfChosen, kSigmoid };
constexpr float kSigmoidSum = 1e-20f;  // as in experts_config.py
constexpr float kLowest = -3.0e38f;
constexpr bool kScoresChoose = SCORING == kSigmoid || CORRECTED || GROUPS > 1;

// The number that a warp's lanes have the largest key of, ties to the lower place; the key is never 0.
__device__ __forceinline__ int place_of_largest(unsigned key, int place) {
    const unsigned most = __reduce_max_sync(kWhole, key);
    return __reduce_min_sync(kWhole, key == most ? static_cast<unsigned>(place) : kWhole);
}

// By a warp: one row's experts and weights, in lanes up to TOP_K.
struct Choice {
    int expert = 0;
    float weight = 0.0f;

    __device__ __forceinline__ Choice(const float* logits, const float* bias) {
        const int lane = threadIdx.x % 32;
        float values[kOfLane];  // logits, or scores where these choose
        unsigned keys[kOfLane];
#pragma unroll
        for (int i = 0; i < kOfLane; i++) {
            const int index = i * 32 + lane;
            values[i] = index < EXPERTS ? logits[index] + (bias && !CORRECTED ? bias[index] : 0.0f) : 0.0f;
        }
        if (kScoresChoose) score(values, lane);
#pragma unroll
        for (int i = 0; i < kOfLane; i++) {
            const int index = i * 32 + lane;
            keys[i] = index < EXPERTS ? ordered(values[i] + (bias && CORRECTED ? bias[index] : 0.0f)) : 0;
        }
        if (GROUPS > 1) leave_groups_out(values, bias, keys, lane);
        float value = 0.0f, largest = 0.0f;
        for (int rank = 0; rank < TOP_K; rank++) {
            unsigned best = 0;
            int place = 0;
            float of_place = 0.0f;
#pragma unroll
            for (int i = 0; i < kOfLane; i++) {
                if (keys[i] > best) best = keys[i], place = i * 32 + lane, of_place = values[i];
            }
            const int chosen = place_of_largest(best, place);
            const float of_chosen = __shfl_sync(kWhole, of_place, chosen % 32);
            if (rank == 0) largest = of_chosen;
            if (rank == lane) expert = chosen, value = of_chosen;
#pragma unroll
            for (int i = 0; i < kOfLane; i++) {
                if (i * 32 + lane == chosen) keys[i] = 0;
            }
        }
        if (kScoresChoose) {
            weight = lane < TOP_K ? value : 0.0f;
        } else {
            weight = lane < TOP_K ? expf(value - largest) : 0.0f;
            float sum = 0.0f;
            if (SCORING == kSoftmax) {
#pragma unroll
                for (int i = 0; i < kOfLane; i++) sum += i * 32 + lane < EXPERTS ? expf(values[i] - largest) : 0.0f;
                weight /= lane_sum(sum, 32);
            }
        }
        if (SCORING == kSoftmaxOfChosen || NORMALIZE) {
            const float sum = lane_sum(weight, 32);
            weight /= SCORING == kSigmoid ? sum + kSigmoidSum : SCORING == kSoftmax ? fmaxf(sum, LEAST_SUM) : sum;
        }
        weight *= SCALE;
    }

  private:
    // Of a lane's logits, their scores.
    static __device__ __forceinline__ void score(float (&values)[kOfLane], int lane) {
        if (SCORING == kSigmoid) {
#pragma unroll
            for (int i = 0; i < kOfLane; i++) values[i] = 1.0f / (1.0f + expf(-values[i]));
            return;
        }
        float largest = kLowest, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kOfLane; i++) largest = i * 32 + lane < EXPERTS ? fmaxf(largest, values[i]) : largest;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(kWhole, largest, distance));
        }
#pragma unroll
        for (int i = 0; i < kOfLane; i++) {
            values[i] = i * 32 + lane < EXPERTS ? expf(values[i] - largest) : 0.0f;
            sum += values[i];
        }
        sum = lane_sum(sum, 32);
#pragma unroll
        for (int i = 0; i < kOfLane; i++) values[i] /= sum;
    }

    // Sets the keys of experts in other groups than the chosen ones to 0.
    static __device__ __forceinline__ void leave_groups_out(
        const float (&values)[kOfLane], const float* bias, unsigned (&keys)[kOfLane], int lane) {
        constexpr int kOfGroup = EXPERTS / GROUPS;
        unsigned group_key = 0;  // of the group with this lane's number
        for (int group = 0; group < GROUPS; group++) {
            float first = kLowest, second = kLowest;
#pragma unroll
            for (int i = 0; i < kOfLane; i++) {
                const int index = i * 32 + lane;
                if (index >= EXPERTS || index / kOfGroup != group) continue;
                const float value = values[i] + (bias && CORRECTED ? bias[index] : 0.0f);
                second = fmaxf(second, fminf(first, value));
                first = fmaxf(first, value);
            }
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2) {
                const float other = __shfl_xor_sync(kWhole, first, distance);
                second = fmaxf(fmaxf(second, __shfl_xor_sync(kWhole, second, distance)), fminf(first, other));
                first = fmaxf(first, other);
            }
            if (lane == group) group_key = ordered(first + second);
        }
        unsigned chosen = 0;
        for (int rank = 0; rank < TOP_GROUPS; rank++) {
            const int group = place_of_largest(group_key, lane);
            chosen |= 1u << group;
            if (lane == group) group_key = 0;
        }
#pragma unroll
        for (int i = 0; i < kOfLane; i++) {
            if (!(chosen >> (i * 32 + lane) / kOfGroup % 32 & 1)) keys[i] = 0;
        }
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
