// residual += hidden, and out = rms_norm(residual) * weight, in one pass: a block per token, with the row in registers.
//
// The sum is rounded to SCALAR before it is squared, as it is stored: the norm is that of the stored residual.
// Macros: SCALAR; HIDDEN_SIZE, a multiple of 8; VECTORS, 8-element vectors per thread; ADD, 0 for the norm of `hidden`.

#include "vector.cuh"

extern "C" __global__ void add_rms_norm(
    const SCALAR* hidden,    // [tokens, HIDDEN_SIZE]
    SCALAR* residual,        // [tokens, HIDDEN_SIZE], updated in place; unused without ADD
    const SCALAR* weight,    // [HIDDEN_SIZE]
    SCALAR* out,             // [tokens, HIDDEN_SIZE]; may be `hidden`
    long long hidden_stride, // elements between rows of `hidden`
    float eps) {
    __shared__ float scratch[32];
    release_successors();
    constexpr int NUM_VECTORS = HIDDEN_SIZE / 8;
    const long long row = blockIdx.x;
    Vector<SCALAR, 8> values[VECTORS], scales[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int vector = threadIdx.x + i * blockDim.x;
        if (vector < NUM_VECTORS) scales[i] = load_vector<SCALAR, 8>(weight + vector * 8);
    }
    wait_for_predecessors();
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int vector = threadIdx.x + i * blockDim.x;
        if (vector >= NUM_VECTORS) continue;
        values[i] = load_vector<SCALAR, 8>(hidden + row * hidden_stride + vector * 8);
#if ADD
        const auto carried = load_vector<SCALAR, 8>(residual + row * HIDDEN_SIZE + vector * 8);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            values[i][j] = from_float<SCALAR>(to_float(values[i][j]) + to_float(carried[j]));
        }
        store_vector(residual + row * HIDDEN_SIZE + vector * 8, values[i]);
#endif
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += to_float(values[i][j]) * to_float(values[i][j]);
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / HIDDEN_SIZE + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int vector = threadIdx.x + i * blockDim.x;
        if (vector >= NUM_VECTORS) continue;
        Vector<SCALAR, 8> normed;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            normed[j] = from_float<SCALAR>(to_float(values[i][j]) * scale * to_float(scales[i][j]));
        }
        store_vector(out + row * HIDDEN_SIZE + vector * 8, normed);
    }
}
