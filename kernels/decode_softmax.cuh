// Softmax of a unit's queries over keys, kept by one warp and transposed: keys are the 16 rows.
#pragma once

#include "decode_sight.cuh"

constexpr int kSteps = HEAD_DIM / 16;
constexpr int kMergePitch = HEAD_DIM + 4;
// The running maximum is raised only if a score exceeds it by more than this many powers of two.
constexpr float kSlack = 8.0f;

// Scales the scores of the tile at `position` and masks those of keys that a query does not see; `query` is the first of
// the warp's among those of the key-value head.
__device__ __forceinline__ void scale_and_mask(
    float (&scores)[kColumnTiles][4], float scale, float soft_cap, const Sight& sight, int position, int query, int lane) {
    int key = lane >> 2;
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[n][i] = SOFT_CAP ? soft_capped(scores[n][i], scale, soft_cap) : scores[n][i] * (scale * kLog2E);
        }
    }
#if POSITIONS
    if (sight.sees_all(position, position + kTile)) return;
#else
    int begin = sight.begin - position, end = sight.end - position;
    if (begin <= 0 && end >= kTile) return;
#endif
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if POSITIONS
            Keys keys = sight.keys_of(query + n * 8 + (lane & 3) * 2 + (i & 1));
            int begin = keys.begin - position, end = keys.end - position;
#endif
            int place = key + (i >> 1) * 8;
            if (place < begin || place >= end) scores[n][i] = minus_infinity();
        }
    }
}

// A warp's share of a segment: softmax state of COLUMNS queries.
struct Accumulator {
    float output[kSteps][kColumnTiles][4];
    float maximum[kColumnTiles][2];
    float sum[kColumnTiles][2];  // of this lane's keys only; `store` adds those of other lanes

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            maximum[n][0] = maximum[n][1] = kLowest;
            sum[n][0] = sum[n][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < kSteps; j++) {
                output[j][n][0] = output[j][n][1] = output[j][n][2] = output[j][n][3] = 0.0f;
            }
        }
    }

    // Raises the maxima to the tile's if any score of the warp exceeds one by more than kSlack.
    __device__ __forceinline__ void raise(const float (&scores)[kColumnTiles][4]) {
        bool above = false;
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            above |= fmaxf(scores[n][0], scores[n][2]) > maximum[n][0] + kSlack;
            above |= fmaxf(scores[n][1], scores[n][3]) > maximum[n][1] + kSlack;
        }
        if (!__any_sync(kFullWarp, above)) return;
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float highest = fmaxf(scores[n][c], scores[n][c + 2]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, lanes));
                }
                highest = fmaxf(highest, maximum[n][c]);
                float factor = exp2_approx(maximum[n][c] - highest);
                maximum[n][c] = highest;
                sum[n][c] *= factor;
#pragma unroll
                for (int j = 0; j < kSteps; j++) {
                    output[j][n][c] *= factor;
                    output[j][n][c + 2] *= factor;
                }
            }
        }
    }

    // Converts scores to probabilities, as the B fragments of the second product.
    __device__ __forceinline__ void exponentiate(
        const float (&scores)[kColumnTiles][4], unsigned (&probabilities)[kColumnTiles][2]) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = exp2_approx(scores[n][i] - maximum[n][i & 1]);
            sum[n][0] += p[0] + p[2];
            sum[n][1] += p[1] + p[3];
            probabilities[n][0] = transpose_matrix(Tensor16<Operand>::pack(p[0], p[1]));
            probabilities[n][1] = transpose_matrix(Tensor16<Operand>::pack(p[2], p[3]));
        }
    }

    // Stores sums [kUnitQueries, kMergePitch] and stats [kUnitQueries] of this warp's queries, which begin at `first`,
    // in shared memory.
    __device__ __forceinline__ void store(float* sums, float2* stats, int first, int lane) {
        int group = lane >> 2, pair = lane & 3;
        // Dimensions within a step of 16: adjacent if the words of an FP8 cache were split.
        int first_dim = FP8_CACHE ? 2 * group : group, second_dim = first_dim + (FP8_CACHE ? 1 : 8);
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float total = sum[n][c];
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) total += __shfl_xor_sync(kFullWarp, total, lanes);
                int query = first + n * 8 + pair * 2 + c;
                if (query >= kUnitQueries) continue;
#pragma unroll
                for (int j = 0; j < kSteps; j++) {
                    sums[query * kMergePitch + j * 16 + first_dim] = output[j][n][c];
                    sums[query * kMergePitch + j * 16 + second_dim] = output[j][n][c + 2];
                }
                if (group == 0) stats[query] = make_float2(maximum[n][c], total);
            }
        }
    }
};
