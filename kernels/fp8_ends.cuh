// What a block of fp8_product.cu makes of its sums.
#pragma once

#include "activation.cuh"
#include "fp8_block.cuh"
#include "residual_quad.cuh"

// Stores the sums of this warpgroup's rows in shared memory, [token][row].
__device__ __forceinline__ void store_sums(float* sums, const float (&d)[kAccumulators]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[(j * 8 + token + i % 2) * kPitch + row + i / 2 * 8] = d[4 * j + i];
    }
}

// Adds up four adjacent sums of a token over the cluster.
__device__ __forceinline__ float4 add_up(Shared shared, int token, int row) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 parts[SPLIT];
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
        parts[rank] = load_shared(shared.base + Shared::kSums + (token * kPitch + row) * 4, rank);
    }
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
        total.x += parts[rank].x, total.y += parts[rank].y, total.z += parts[rank].z, total.w += parts[rank].w;
    }
    return total;
}

// Scales of the rows of W whose sums this thread ends.
struct RowScales {
    float4 gate;  // or of the only matrix
    float4 up;
};

__device__ __forceinline__ RowScales load_row_scales(const Ends& ends, const Problem& problem, int column) {
    const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    if (GROUPED || column >= problem.outputs) return {ones, ones};
    const float* scales = ends.weight_scales + column;
    return {__ldg(reinterpret_cast<const float4*>(scales)),
            kGated ? __ldg(reinterpret_cast<const float4*>(scales + problem.outputs)) : ones};
}

__device__ __forceinline__ Vector<float, 4> scaled(float4 v, float factor, const float4& scales) {
    return Vector<float, 4>{
        {v.x * factor * scales.x, v.y * factor * scales.y, v.z * factor * scales.z, v.w * factor * scales.w}};
}

// Applies the epilogue to four adjacent outputs; returns the sum of the new residual's squares.
__device__ __forceinline__ float end_quad(Shared shared, const Ends& ends, const Problem& problem, int token, int row,
    long long column, float factor, const RowScales& row_scales) {
    Vector<float, 4> values = scaled(add_up(shared, token, row), factor, row_scales.gate);
    Vector<OUT, 4> result;
    float squares = 0.0f;
#if BIAS
    add_biases(values, ends.bias + column);
#endif
#if EPILOGUE == EPILOGUE_GATED
    auto up = scaled(add_up(shared, token, row + kOutputs), factor, row_scales.up);
#if BIAS
    add_biases(up, ends.bias + problem.outputs + column);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) values[j] = ACTIVATION(values[j]) * up[j];
#elif EPILOGUE == EPILOGUE_RESIDUAL
    const long long place = token * static_cast<long long>(problem.outputs) + column;
    squares = add_to_residual(values, ends.residual + place, ends.norm_weight + column);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) result[j] = from_float<OUT>(values[j]);
    store_vector(ends.out + token * static_cast<long long>(ends.out_stride) + column, result);
    return squares;
}

// What a token's sums are multiplied by, beside the scales of W and of groups.
__device__ __forceinline__ float token_factor(const Tables& tables, int token, float bound) {
    if (!RESIDENT || GROUPED) return tables.factors[token];
    return STATIC ? bound : tables.scales[token] * tables.factors[token];
}

// Writes this block's tokens of a tile. All lanes of a warp take part, for the sum over a token's lanes.
__device__ __forceinline__ void end_tile(Shared shared, const Tables& tables, const Ends& ends, const Problem& problem,
    int tile, const RowScales& row_scales, float bound) {
    const int first_token = (SPLIT > 1 ? cluster_rank() : 0) * kSlice;
    for (int base = 0; base < kSlice * kQuads; base += kConsumers) {
        const int index = base + threadIdx.x, token = first_token + index / kQuads, row = index % kQuads * 4;
        const long long column = static_cast<long long>(tile) * kOutputs + row;
        float squares = 0.0f;
        const bool present = index < kSlice * kQuads && token < problem.tokens && column < problem.outputs;
        if (present) {
            const float factor = token_factor(tables, token, bound);
            squares = end_quad(shared, ends, problem, token, row, column, factor, row_scales);
        }
        if (EPILOGUE == EPILOGUE_RESIDUAL) {
            squares = lane_sum(squares, 16);  // of 64 rows
            if (present && row % 64 == 0) ends.new_squares[column / 64 * kSquaresPitch + token] = squares;
        }
    }
}
