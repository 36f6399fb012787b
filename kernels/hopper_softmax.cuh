// The softmax of the Hopper prefill in registers, and the output's way out of them.
#pragma once

#include "hopper_tile.cuh"

constexpr int kOutputs = HEAD_DIM / 2;  // accumulators of a thread's output

// A thread's part of the softmax of 64 queries, of which it has parts of two rows: lane / 4 and lane / 4 + 8.
struct Softmax {
    float scale;  // to log2 units; of the piece's head
    float maximum[2];
    float sum[2];     // of this lane's keys alone
    float factor[2];  // by which the last tile shrank what came before

    __device__ __forceinline__ void reset() {
        maximum[0] = maximum[1] = kLowest;
        sum[0] = sum[1] = 0.0f;
    }

    // Turns scores into probabilities; `key` is the first key's position and `query` that of the warp's first query.
    __device__ __forceinline__ void exponentiate(float (&s)[64], int key, int query, int window, float soft_cap) {
        int lane = threadIdx.x & 31;
        if (SOFT_CAP) {
#pragma unroll
            for (int i = 0; i < 64; i++) s[i] = soft_capped(s[i], scale * (1.0f / kLog2E), soft_cap);
        }
        int distance = query + (lane >> 2) - key - (lane & 3) * 2;  // from this lane's first key to its first query
        if (key + kKeys - 1 > query) mask<true>(s, distance, 0);
        if (key <= query + 15 - window) mask<false>(s, distance, window);
        float factor_of_scores = SOFT_CAP ? 1.0f : scale;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float highest[4] = {maximum[r], maximum[r], maximum[r], maximum[r]};
#pragma unroll
            for (int j = 0; j < 16; j++) {
                highest[j & 3] = fmaxf(highest[j & 3], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            }
            float top = fmaxf(fmaxf(highest[0], highest[1]), fmaxf(highest[2], highest[3]));
            top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
            float offset = top * factor_of_scores;
            // The difference first: fused into one operation with `offset`, the rounding error of kLowest would be huge.
            factor[r] = exp2_approx((maximum[r] - top) * factor_of_scores);
            maximum[r] = top;
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < 16; j++) {
                float& low = s[4 * j + 2 * r];
                float& high = s[4 * j + 2 * r + 1];
                low = exp2_approx(fmaf(low, factor_of_scores, -offset));
                high = exp2_approx(fmaf(high, factor_of_scores, -offset));
                sums[j & 3] += low + high;
            }
            sum[r] = sum[r] * factor[r] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }

    // Hides keys at distances below `bound` (Below) or at and above it.
    template <bool Below>
    static __device__ __forceinline__ void mask(float (&s)[64], int distance, int bound) {
#pragma unroll
        for (int j = 0; j < 16; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int own = distance + (i >> 1) * 8 - (j * 8 + (i & 1));
                if ((own < bound) == Below) s[4 * j + i] = minus_infinity();
            }
        }
    }
};

// Probabilities as A fragments of the second product.
__device__ __forceinline__ void pack(const float (&s)[64], unsigned (&p)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = Tensor16<Operand>::pack(s[2 * i], s[2 * i + 1]);
}

// Without a use before the wait for the values' product the compiler moves the softmax behind it, and nothing overlaps.
// The store never happens: sums are not negative.
__device__ __forceinline__ void keep_before_wait(const unsigned (&p)[32], float sum, unsigned shared) {
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) all |= p[i];
    if (sum < 0.0f) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(all) : "memory");
}

// Divides by the sums, times the values' unit, and stores a thread's rows; quads exchange columns so that each lane
// stores 16 bytes at a time.
__device__ __forceinline__ void write_output(
    const float (&o)[kOutputs], const float (&sums)[2], float unit, Scalar* output, long long stride, int rows) {
    int lane = threadIdx.x & 31, quad = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = sums[r];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        float inverse = unit / sum;
        int row = (lane >> 2) + r * 8;
        Scalar* line = output + row * stride + quad * 8;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            unsigned c[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* pair = o + (4 * i + j) * 4 + r * 2;
                c[j] = Tensor16<Scalar>::pack(pair[0] * inverse, pair[1] * inverse);
            }
            unsigned other = __shfl_xor_sync(kFullWarp, quad & 1 ? c[0] : c[1], 1);
            if (quad & 1) c[0] = other; else c[1] = other;
            other = __shfl_xor_sync(kFullWarp, quad & 1 ? c[2] : c[3], 1);
            if (quad & 1) c[2] = other; else c[3] = other;
            other = __shfl_xor_sync(kFullWarp, quad & 2 ? c[0] : c[2], 2);
            if (quad & 2) c[0] = other; else c[2] = other;
            other = __shfl_xor_sync(kFullWarp, quad & 2 ? c[1] : c[3], 2);
            if (quad & 2) c[1] = other; else c[3] = other;
            if (row < rows) *reinterpret_cast<uint4*>(line + i * 32) = make_uint4(c[0], c[1], c[2], c[3]);
        }
    }
}
