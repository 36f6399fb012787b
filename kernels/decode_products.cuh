// Decode's two products by mma.sync for a tile of 16 keys: scores^T = K Q^T and output^T = V^T P^T.
//
// With an FP8 cache a matrix of 8 rows of 16 bytes has 16 dimensions, which become two operand matrices: the even and
// the odd bytes of each word. Dimensions of a step of 16 are in that order in the queries and the accumulators too;
// Accumulator::store restores the original order.
#pragma once

#include "decode_softmax.cuh"

// B fragments of COLUMNS of a unit's queries from `first` on; those beyond the unit's are zero.
struct Queries {
    unsigned fragments[kSteps][kColumnTiles][2];

    __device__ __forceinline__ void load(
        const Scalar* queries, long long stride, int row, int unit, int first, int lane) {
        int group = lane >> 2, pair = lane & 3, count = query_count(unit);
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            int query = first + n * 8 + group;
            const Scalar* source = queries + (row + position_of(unit, query)) * stride +
                                   (first_head(unit) + head_of(unit, query)) * HEAD_DIM;
#pragma unroll
            for (int k = 0; k < kSteps; k++) {
#if FP8_CACHE
                Expanded four = query < count ? load_query(source + k * 16 + pair * 4) : Expanded{0, 0};
                fragments[k][n][0] = four.even;
                fragments[k][n][1] = four.odd;
#else
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const Scalar* two = source + k * 16 + half * 8 + pair * 2;
                    fragments[k][n][half] = query < count ? *reinterpret_cast<const unsigned*>(two) : 0u;
                }
#endif
            }
        }
    }
};

__device__ __forceinline__ void multiply_keys(
    float (&scores)[kColumnTiles][4], const unsigned (&keys)[4], const Queries& queries, int step) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
        Tensor16<Operand>::mma(scores[n], keys, queries.fragments[step][n][0], queries.fragments[step][n][1]);
    }
}

__device__ __forceinline__ void score_keys(
    float (&scores)[kColumnTiles][4], unsigned keys, const Queries& queries, int lane) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
    int row = lane & 15, chunk = lane >> 4;
#if FP8_CACHE
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
        unsigned words[4];
        load_matrices(words, keys + CachedRows::offset(row, k + chunk));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Expanded low = expand_e4m3(words[2 * i]), high = expand_e4m3(words[2 * i + 1]);
            unsigned a[4] = {low.even, high.even, low.odd, high.odd};
            multiply_keys(scores, a, queries, k + i);
        }
    }
#else
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
        unsigned a[4];
        load_matrices(a, keys + CachedRows::offset(row, 2 * k + chunk));
        multiply_keys(scores, a, queries, k);
    }
#endif
}

__device__ __forceinline__ void multiply_values(
    Accumulator& accumulator, const unsigned (&values)[4], const unsigned (&probabilities)[kColumnTiles][2], int step) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
        Tensor16<Operand>::mma(accumulator.output[step][n], values, probabilities[n][0], probabilities[n][1]);
    }
}

__device__ __forceinline__ void add_values(
    Accumulator& accumulator, unsigned values, const unsigned (&probabilities)[kColumnTiles][2], int lane) {
#if FP8_CACHE
    int row = lane & 15, chunk = lane >> 4;
#pragma unroll
    for (int j = 0; j < kSteps; j += 2) {
        unsigned words[4];
        load_matrices_transposed(words, values + CachedRows::offset(row, j + chunk));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Expanded low = expand_e4m3(words[2 * i]), high = expand_e4m3(words[2 * i + 1]);
            unsigned a[4] = {low.even, low.odd, high.even, high.odd};
            multiply_values(accumulator, a, probabilities, j + i);
        }
    }
#else
    int row = (lane >> 4) * 8 + (lane & 7), chunk = (lane >> 3) & 1;
#pragma unroll
    for (int j = 0; j < kSteps; j++) {
        unsigned a[4];
        load_matrices_transposed(a, values + CachedRows::offset(row, 2 * j + chunk));
        multiply_values(accumulator, a, probabilities, j);
    }
#endif
}
