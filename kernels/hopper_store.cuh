// What follows the softmax of the Hopper prefill: operands of the second product, and outputs.
#pragma once

#include "hopper_tile.cuh"

// Probabilities as A fragments of the second product.
__device__ __forceinline__ void pack(const float (&s)[kScores], unsigned (&p)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; i++) p[i] = Tensor16<Operand>::pack(s[2 * i], s[2 * i + 1]);
}

// Without a use before the wait for the value product, the compiler moves the softmax after the wait, and nothing
// overlaps. The store is never executed: sums are not negative.
__device__ __forceinline__ void keep_before_wait(float sum, unsigned shared) {
    if (sum < 0.0f) asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(sum) : "memory");
}

// Stores a thread's part of row `r` of its two; `pack` makes a word of two outputs. Quads exchange columns so that each
// lane stores 16 bytes at a time.
template <typename Pack>
__device__ __forceinline__ void store_row(
    const float (&o)[kOutputs], int r, Scalar* output, long long stride, int rows, const Pack& pack) {
    int lane = threadIdx.x & 31, quad = lane & 3;
    int row = (lane >> 2) + r * 8;
    Scalar* line = output + row * stride + quad * 8;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) {
        unsigned c[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* pair = o + (4 * i + j) * 4 + r * 2;
            c[j] = pack(pair[0], pair[1]);
        }
        exchange_in_quad(c, quad & 1, quad & 2);
        if (row < rows) *reinterpret_cast<uint4*>(line + i * 32) = make_uint4(c[0], c[1], c[2], c[3]);
    }
}
