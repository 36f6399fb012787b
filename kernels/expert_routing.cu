// Which experts each row goes to, with which weights, and in what order an expert's rows lie: one launch.
//
// A warp takes a row: it finds the TOP_K largest scores and their weights. One block also sorts
// the pairs of row and expert by expert. Several blocks list each expert's pairs, and the last to finish finds where every
// expert's begin; kernels/expert_rows.cu or kernels/expert_tiles.cu put both together. Either way the work of the
// experts' products is listed. Which of an expert's pairs comes first is left to chance: no sum depends on it.
//
// Macros: those of expert_choice.cuh, with up to 1,024 EXPERTS.

#include "expert_choice.cuh"
#include "expert_lists.cuh"

constexpr int kThreads = 1024;  // of a block
constexpr int kWarps = kThreads / 32;
static_assert(EXPERTS <= kThreads && TOP_K <= 32 && TOP_K <= EXPERTS, "a thread for each expert, a lane for each choice");

// By a block: counts its pairs by expert. `number(pair, index)` gets each pair's index among those of its expert.
template <typename ExpertOf, typename Number>
__device__ __forceinline__ void count_pairs(int* counts, const ExpertOf& expert_of, int num_pairs, const Number& number) {
    if (threadIdx.x < EXPERTS) counts[threadIdx.x] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < num_pairs; pair += kThreads) number(pair, atomicAdd(&counts[expert_of(pair)], 1));
    __syncthreads();
}

// By the only block; `experts` are those of its pairs.
__device__ __forceinline__ void sort(const int* experts, int num_pairs, const Sorted& sorted) {
    __shared__ int counts[EXPERTS], starts[EXPERTS];
    __shared__ int indexes[kWarps * TOP_K];
    const auto expert_of = [&](int pair) { return experts[pair]; };
    count_pairs(counts, expert_of, num_pairs, [&](int pair, int index) { indexes[pair] = index; });
    const int start = list_jobs<kThreads>(threadIdx.x < EXPERTS ? counts[threadIdx.x] : 0, sorted);
    if (threadIdx.x < EXPERTS) starts[threadIdx.x] = start;
    __syncthreads();
    for (int pair = threadIdx.x; pair < num_pairs; pair += kThreads) {
        const int place = starts[experts[pair]] + indexes[pair];
        sorted.places[pair] = place;
        sorted.pairs[place] = pair;
        sorted.members[experts[pair] * sorted.room + indexes[pair]] = pair;
    }
}

// By one of several blocks: lists the pairs from `first_pair` on.
__device__ __forceinline__ void list_pairs(const int* experts, int first_pair, int num_pairs, const Sorted& sorted) {
    __shared__ int counts[EXPERTS], bases[EXPERTS];
    __shared__ int indexes[kWarps * TOP_K];
    const auto expert_of = [&](int pair) { return experts[pair]; };
    count_pairs(counts, expert_of, num_pairs, [&](int pair, int index) { indexes[pair] = index; });
    if (threadIdx.x < EXPERTS && counts[threadIdx.x] > 0) {
        bases[threadIdx.x] = atomicAdd(&sorted.counts[threadIdx.x], counts[threadIdx.x]);
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < num_pairs; pair += kThreads) {
        const int expert = experts[pair], index = bases[expert] + indexes[pair];
        sorted.places[first_pair + pair] = index;
        sorted.members[expert * sorted.room + index] = first_pair + pair;
    }
}

// logits [rows, EXPERTS], rows `stride` apart; bias [EXPERTS] or null. `arrived` is 0 and becomes it. With `squares`
// [num_squares, kSquaresPitch], whose columns add up to the sums of squares of a pass's rows, scales [rows] become their
// 1 / rms.
extern "C" __global__ void __launch_bounds__(kThreads) expert_routing(
    const float* logits, const float* bias, int* experts, float* weights, int* places, int* pairs, int* members, int* counts,
    int* ends, int* jobs, int* arrived, const float* squares, float* scales, int num_squares, float inverse_width, float eps,
    int stride, int num_rows, int job_rows, int room, int alternates) {
    release_successors();
    wait_for_predecessors();
    const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    __shared__ int own[kWarps * TOP_K];  // experts of the block's rows
    if (row < num_rows) {
        const float scale = squares ? scale_of(squares, num_squares, row, inverse_width, eps) : 1.0f;
        const Choice choice(logits + static_cast<long long>(row) * stride, bias);
        if (lane < TOP_K) {
            experts[row * TOP_K + lane] = choice.expert;
            weights[row * TOP_K + lane] = choice.weight;
            own[threadIdx.x / 32 * TOP_K + lane] = choice.expert;
        }
        if (squares && lane == 0) scales[row] = scale;
    }
    const Sorted sorted{places, pairs, members, counts, ends, jobs, room, job_rows, alternates != 0};
    __syncthreads();
    if (gridDim.x == 1) {
        sort(own, num_rows * TOP_K, sorted);
        return;
    }
    const int first_pair = blockIdx.x * kWarps * TOP_K;
    list_pairs(own, first_pair, min(kWarps * TOP_K, num_rows * TOP_K - first_pair), sorted);
    list_jobs_at_last<kThreads>(sorted, arrived);
}
