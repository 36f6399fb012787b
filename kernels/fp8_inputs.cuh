// The inputs of a block of fp8_product.cu: factors of tokens, rounding, scales of groups.
#pragma once

#include "fp8_block.cuh"

// Called by one warp: reads or computes the factor of each token.
__device__ __forceinline__ void read_factors(float* factors, const Inputs& inputs, int tokens) {
    const int lane = threadIdx.x % 32;
    wait_for_predecessors();
#if RESIDENT
    for (int token = lane / 4; token < TOKENS; token += 8) {
        factors[token] = inverse_rms(
            inputs.squares, inputs.num_squares, kSquaresPitch, token, inputs.inverse_width, inputs.eps);
    }
#else
    for (int token = lane; token < tokens; token += 32) factors[token] = __ldcg(inputs.factors + token);
#endif
}

// Calls use(row, chunk, numbers) for each 16 numbers of this block's columns of x that this lane has, chunks counted from
// the block's first. All lanes of a warp call it for the same row. `batch` keeps what was loaded last.
template <typename Use>
__device__ __forceinline__ void for_each_chunk(
    Chunk (&batch)[kBatch], bool is_loaded, const Inputs& inputs, const Problem& problem, Use use) {
    const int lane = threadIdx.x % 32, segments = (problem.steps * kColumns + kSegment - 1) / kSegment;
    const int items = problem.tokens * segments;
    const Scalar* first = inputs.rows + problem.begin * kColumns;
    for (int base = threadIdx.x / 32; base < items; base += kWarps * kBatch) {
        if (!is_loaded) {
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                const int item = base + i * kWarps, row = item / segments;
                const int chunk = (item - row * segments) * 32 + lane, column = chunk * 16;
                const bool present = item < items && column < problem.steps * kColumns &&
                                     problem.begin * kColumns + column < problem.width;
                batch[i] = load_chunk(first + row * static_cast<long long>(problem.width) + column, present);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            const int item = base + i * kWarps, row = item / segments;
            if (item < items) use(row, (item - row * segments) * 32 + lane, batch[i]);
        }
    }
}

__device__ __forceinline__ void keep_codes(
    Shared shared, const Problem& problem, int row, int chunk, const Chunk& numbers, float factor, float scale,
    float inverse) {
    if (chunk / 8 >= problem.steps) return;
    const unsigned place = shared.inputs(chunk / 8) + row * kColumns + ((chunk % 8 ^ row % 8) << 4);
    store_shared(place, codes_of(numbers, factor, scale, inverse));
}

// Computes the scale of each row from its largest magnitude. A bound is one of rows after the norm, so it needs factors.
__device__ __forceinline__ void make_scales(const Tables& tables, const Inputs& inputs, int tokens) {
    __syncwarp();
    consumers_sync();
    for (int token = threadIdx.x; token < tokens; token += kConsumers) {
        const float bound = is_bounded(inputs.bound) ? inputs.bound / tables.factors[token] : inputs.bound;
        tables.scales[token] = scale_of(tables.largest[token], bound);
        tables.inverses[token] = 1.0f / tables.scales[token];
    }
    consumers_sync();
}

// Called by the consumers: rounds this block's columns of x into shared memory, with their scales.
__device__ __forceinline__ void round_inputs(
    Shared shared, const Tables& tables, const Inputs& inputs, const Problem& problem) {
    Chunk batch[kBatch];
#if STATIC
    for_each_chunk(batch, false, inputs, problem, [&](int row, int chunk, const Chunk& numbers) {
        keep_codes(shared, problem, row, chunk, numbers, tables.factors[row], inputs.bound, 1.0f / inputs.bound);
    });
#elif GROUPED
    for_each_chunk(batch, false, inputs, problem, [&](int row, int chunk, const Chunk& numbers) {
        unsigned most = largest_bits(numbers);
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) most = max(most, __shfl_xor_sync(~0u, most, distance));
        const float scale = scale_of(most, inputs.bound);
        if (chunk % 8 == 0 && chunk / 8 < problem.steps) tables.groups[chunk / 8 * TOKENS + row] = scale;
        keep_codes(shared, problem, row, chunk, numbers, 1.0f, scale, 1.0f / scale);
    });
#else
    for_each_chunk(batch, false, inputs, problem, [&](int row, int chunk, const Chunk& numbers) {
        const unsigned most = __reduce_max_sync(~0u, largest_bits(numbers));
        if (threadIdx.x % 32 == 0) atomicMax(tables.largest + row, most);
    });
    make_scales(tables, inputs, problem.tokens);
    const bool is_loaded = problem.tokens * ((problem.steps * kColumns + kSegment - 1) / kSegment) <= kWarps * kBatch;
    for_each_chunk(batch, is_loaded, inputs, problem, [&](int row, int chunk, const Chunk& numbers) {
        keep_codes(shared, problem, row, chunk, numbers, 1.0f, tables.scales[row], tables.inverses[row]);
    });
#endif
    fence_async_proxy();
    consumers_sync();
}

// Copies the groups' scales of inputs that were rounded before.
__device__ __forceinline__ void copy_scales(const Tables& tables, const Inputs& inputs, const Problem& problem) {
    for (int i = threadIdx.x; i < problem.steps * TOKENS; i += kConsumers) {
        const int step = i / TOKENS, token = i % TOKENS;
        const bool present = token < problem.tokens;
        tables.groups[i] = present ? __ldcg(inputs.scales + (problem.begin + step) * kSquaresPitch + token) : 0.0f;
    }
    consumers_sync();
}
