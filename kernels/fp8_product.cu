// Products of a few rows with a matrix of e4m3, out = x W^T, for Hopper (sm_90a): as fast as the weights can be read.
//
// As skinny_product.cu, with these differences. A step is 128 columns, a tile 64 or 128 rows of W. A wgmma adds up fewer
// bits than float32 has, so a chain of them spans one step, and its sums are added in float32: in ascending steps, and in
// SPLIT parts, both given by the matrix alone. So a row's bits do not depend on the number of rows.
//
// fp8_rows.cu has rounded x to e4m3 before, and its codes are copied with the weights. With RESIDENT, each block rounds x
// itself, once, and keeps it, which saves that kernel; with more than a row or two, rounding takes longer than it saves.
//
// Macros: TOKENS, 8, 16, 32, 64 or 128; SPLIT, 1, 2, 4 or 8; GROUPS, 1 or 2, warpgroups with 64 rows of a tile each;
// STAGES; STEPS, most steps of a block; RESIDENT, which needs SPLIT 1; GROUPED, 1 for scales per 128 x 128 weights and
// 128 inputs of a row; STATIC, 1 for one given scale of inputs; BATCH, steps whose products are in flight; OUT, type of
// `out`; EPILOGUE, one of those below; ACTIVATION, for EPILOGUE_GATED; CANONICAL, 1 for the root of docs/determinism.md.

#ifndef BIAS
#define BIAS 0  // 1: biases are added to scale * product
#endif
#define EPILOGUE_STORE 0     // out = scale * product
#define EPILOGUE_GATED 1     // out = activation(scale * gate) * (scale * up); W has the rows of gate, then those of up
#define EPILOGUE_RESIDUAL 2  // residual += product; out = residual * norm_weight; squares of the residual

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "fp8_ends.cuh"
#include "fp8_inputs.cuh"

__device__ __forceinline__ void copy_weights(Shared shared, const TensorMap* weights, const Problem& problem, int tile,
    int step, int stage) {
    const int column = (problem.begin + step) * kColumns;
    if (kGated) {
        copy_tensor(shared.weights(stage), weights, column, tile * kOutputs, 0, shared.full(stage));
        copy_tensor(shared.weights(stage) + kWeightBytes / 2, weights, column, problem.outputs + tile * kOutputs, 0,
                    shared.full(stage));
    } else {
        copy_tensor(shared.weights(stage), weights, column, tile * kRows, 0, shared.full(stage));
    }
}

__device__ __forceinline__ void copy_inputs(
    Shared shared, const TensorMap* inputs, const Problem& problem, int step, int stage) {
    if (!RESIDENT) {
        const int column = (problem.begin + step) * kColumns;
        copy_tensor(shared.inputs(stage), inputs, column, 0, 0, shared.full(stage));
    }
}

// Called by one thread. The first stages get their weights before the wait for predecessors; weights alone never wait.
// Where SPLIT is 1, blocks fill the GPU for several tiles, and successors would only compete until the last is copied.
__device__ __forceinline__ void produce(
    Shared shared, const TensorMap* weights, const TensorMap* inputs, const Problem& problem) {
    const int first_tile = blockIdx.x / SPLIT, ahead = min(STAGES, problem.steps);
    for (int i = 0; i < ahead; i++) {
        barrier_expect(shared.full(i), kStageBytes);
        copy_weights(shared, weights, problem, first_tile, i, i);
    }
    if (!RESIDENT) wait_for_predecessors();
    Ring<STAGES> ring(1);
    for (int i = 0; i < ahead; i++, ring.advance()) copy_inputs(shared, inputs, problem, i, i);
    int done = ahead;
    for (int tile = first_tile; tile < problem.tiles; tile += gridDim.x / SPLIT, done = 0) {
        for (int i = done; i < problem.steps; i++, ring.advance()) {
            barrier_wait(shared.empty(ring.stage), ring.parity);
            barrier_expect(shared.full(ring.stage), kStageBytes);
            copy_weights(shared, weights, problem, tile, i, ring.stage);
            copy_inputs(shared, inputs, problem, i, ring.stage);
        }
    }
    if (SPLIT == 1) release_successors();
}

// Adds a step's sums. `groups` has the scales of the step's inputs; `weight_scale` is that of the warp's rows.
__device__ __forceinline__ void promote(
    float (&totals)[kAccumulators], const float (&part)[kAccumulators], const float* groups, float weight_scale) {
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
#if GROUPED
        const auto scales = load_vector<float, 2>(groups + j * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            totals[4 * j + i] = fmaf(part[4 * j + i], scales[i % 2] * weight_scale, totals[4 * j + i]);
        }
#else
#pragma unroll
        for (int i = 0; i < 4; i++) totals[4 * j + i] += part[4 * j + i];
#endif
    }
}

// The scales of blocks of W along the rows of this warp, of this block's steps; null if not GROUPED.
__device__ __forceinline__ const float* block_scales(const Ends& ends, const Problem& problem, int tile) {
    if (!GROUPED) return nullptr;
    const int local = threadIdx.x / 32 * 16;
    const int row = kGated && local >= kOutputs ? problem.outputs + tile * kOutputs + local - kOutputs
                                                : tile * kOutputs + local;
    const int last = (kGated ? 2 : 1) * problem.outputs - 1, columns = (problem.width + kColumns - 1) / kColumns;
    return ends.weight_scales + min(row, last) / 128 * static_cast<long long>(columns) + problem.begin;
}

template <int Value>
struct Count {
    static constexpr int value = Value;
};

__device__ __forceinline__ void consume(
    Shared shared, float* sums, const Tables& tables, const Inputs& inputs, const Ends& ends, const Problem& problem) {
    const bool leads = threadIdx.x % 128 == 0;
    const unsigned a = matrix_descriptor(shared.weights(0) + threadIdx.x / 128 * 64 * kColumns, 16);
    const unsigned b = matrix_descriptor(shared.inputs(0), 16);
    Ring<STAGES> ring(0);
    int freed = 0;
    float totals[kAccumulators], parts[BATCH][kAccumulators];
    const auto start = [&](float (&part)[kAccumulators], int step) {
        barrier_wait(shared.full(ring.stage), ring.parity);
        wgmma_fence();
        const unsigned stage = ring.stage * (kStageBytes >> 4);
        const unsigned input = RESIDENT ? step * (kInputBytes >> 4) : stage;
#pragma unroll
        for (int k = 0; k < kColumns / 32; k++) multiply(part, a + stage + 2 * k, b + input + 2 * k, k > 0);
        wgmma_commit();
        ring.advance();
    };
    for (int tile = blockIdx.x / SPLIT; tile < problem.tiles; tile += gridDim.x / SPLIT) {
        const float* scales = block_scales(ends, problem, tile);
        const RowScales row_scales = load_row_scales(ends, problem, tile * kOutputs + threadIdx.x % kQuads * 4);
#pragma unroll
        for (int i = 0; i < kAccumulators; i++) totals[i] = 0.0f;
        // `parts` of consecutive steps, whose products are in flight together.
        const auto multiply_steps = [&](int first, auto count) {
            float block[BATCH];
#pragma unroll
            for (int i = 0; i < count.value; i++) block[i] = GROUPED ? __ldg(scales + first + i) : 1.0f;
#pragma unroll
            for (int i = 0; i < count.value; i++) start(parts[i], first + i);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < count.value; i++) {
                pin_all(parts[i]);
                if (leads) barrier_arrive(shared.empty(freed));
                if (++freed == STAGES) freed = 0;
            }
#pragma unroll
            for (int i = 0; i < count.value; i++) {
                promote(totals, parts[i], tables.groups + (first + i) * TOKENS, block[i]);
            }
        };
        int step = 0;
        for (; step + BATCH <= problem.steps; step += BATCH) multiply_steps(step, Count<BATCH>());
        if (BATCH > 1) {
            for (; step < problem.steps; step++) multiply_steps(step, Count<1>());
        }
        store_sums(sums, totals);
        if (SPLIT > 1) cluster_sync();
        else consumers_sync();
        end_tile(shared, tables, ends, problem, tile, row_scales, inputs.bound);
        if (SPLIT == 1) consumers_sync();
    }
}

// weights: W's bytes in boxes of 128 columns and kRows rows (half of them if gated); inputs, unless RESIDENT: codes of x
// in boxes of 128 columns and TOKENS rows. With SPLIT > 1 the grid has a cluster for every tile.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(kThreads, 1) fp8_product(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap input_codes, const Scalar* rows,
    const float* input_factors, const float* input_scales, const float* weight_scales, const float* squares,
    int num_squares, float inverse_width, float eps, float bound, OUT* out, Scalar* residual,
    const Scalar* norm_weight, float* new_squares, int width, int tiles, int outputs, int out_stride, int tokens,
    const Scalar* bias) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    const Tables tables{
        reinterpret_cast<unsigned*>(shared_bytes + Shared::kLargest),
        reinterpret_cast<float*>(shared_bytes + Shared::kScales),
        reinterpret_cast<float*>(shared_bytes + Shared::kInverses),
        reinterpret_cast<float*>(shared_bytes + Shared::kFactors),
        reinterpret_cast<float*>(shared_bytes + Shared::kGroups)};
    if (threadIdx.x == kConsumers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < TOKENS) tables.largest[threadIdx.x] = 0;
    __syncthreads();
    if (SPLIT > 1) release_successors();
    const int rank = SPLIT > 1 ? cluster_rank() : 0, steps = (width + kColumns - 1) / kColumns;
    const int begin = steps * rank / SPLIT, end = steps * (rank + 1) / SPLIT;
    const Problem problem{width, tiles, outputs, tokens, begin, end - begin};
    const Inputs inputs{rows, input_factors, input_scales, squares, num_squares, inverse_width, eps, bound};
    const Ends ends{weight_scales, out, out_stride, residual, norm_weight, new_squares, bias};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp < kWarps) {
        wait_for_predecessors();  // the residual stream is read at the end
        const bool rounds_by_factors = RESIDENT && (STATIC || is_bounded(bound));
        if (rounds_by_factors) factors_sync();
        if (RESIDENT) round_inputs(shared, tables, inputs, problem);
        else if (GROUPED) copy_scales(tables, inputs, problem);
        if (!rounds_by_factors) factors_sync();
        consume(shared, reinterpret_cast<float*>(shared_bytes + Shared::kSums), tables, inputs, ends, problem);
    } else if (warp == kWarps) {
        if (threadIdx.x % 32 == 0) produce(shared, &weights, &input_codes, problem);
        __syncwarp();
        if (SPLIT > 1) cluster_sync();
    } else {
        read_factors(tables.factors, inputs, tokens);
        __syncwarp();
        asm volatile("bar.arrive %0, %1;" ::"n"(2), "n"(kConsumers + 32) : "memory");
        if (SPLIT > 1) cluster_sync();
    }
    if (SPLIT > 1) cluster_sync();  // others may still read this block's sums
}

#endif
