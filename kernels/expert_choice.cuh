// Which experts a row goes to, ties to the lower expert, and with which weights.
//
// Macros: EXPERTS; TOP_K, up to 32; SCORING, 0: scores are the softmax over all experts, 1: over the chosen
// ones, 2: sigmoids; NORMALIZE, of 0 and 2: a row's weights are divided by their sum, of 0 by LEAST_SUM at least; SCALE,
// factor of the weights; CORRECTED, 1: the bias is added to scores when experts are chosen, 0: to logits; GROUPS, up to
// 32: experts are in groups, and are chosen of the TOP_GROUPS whose two largest scores have the largest sums.

#pragma once

#include "vector.cuh"

constexpr int kOfLane = (EXPERTS + 31) / 32;  // experts
constexpr int kSquaresPitch = 128;  // as kernels/skinny_product.cu
constexpr unsigned kWhole = 0xffffffffu;

// In the order of the numbers, and never 0.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(value);
    return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}

enum { kSoftmax, kSoftmaxOfChosen, kSigmoid };
constexpr float kSigmoidSum = 1e-20f;  // as in experts_config.py
constexpr float kLeast = -3.0e38f;
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
        float largest = kLeast, sum = 0.0f;
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
            float first = kLeast, second = kLeast;
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

// By a warp: 1 / rms of a row, from the sums of squares [num_squares, kSquaresPitch] that its column adds up.
__device__ __forceinline__ float scale_of(
    const float* squares, int num_squares, int row, float inverse_width, float eps) {
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < num_squares; i += 32) sum += __ldcg(squares + i * kSquaresPitch + row);
    return rsqrtf(lane_sum(sum, 32) * inverse_width + eps);
}
