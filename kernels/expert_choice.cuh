// Which experts a row goes to, and with which weights.
//
// Macros: EXPERTS; TOP_K, up to 32; SOFTMAX_FIRST, 1: weights are those of the softmax over all experts, else over the
// chosen ones; NORMALIZE, of SOFTMAX_FIRST: weights of a row add up to 1.
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

// By a warp: 1 / rms of a row, from the sums of squares [num_squares, kSquaresPitch] that its column adds up.
__device__ __forceinline__ float scale_of(
    const float* squares, int num_squares, int row, float inverse_width, float eps) {
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < num_squares; i += 32) sum += squares[i * kSquaresPitch + row];
    return rsqrtf(lane_sum(sum, 32) * inverse_width + eps);
}
