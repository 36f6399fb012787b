// residual += hidden, and out = norm(residual), in one pass, for the norms that add_rms_norm.cu lacks: a block per token,
// with the row in registers.
//
// The sum is rounded to SCALAR before it is squared, as it is stored: the norm is that of the stored residual.
// Macros: SCALAR; HIDDEN_SIZE, a multiple of 8; VECTORS, 8-element vectors per thread;
// KIND   0: x / rms(x) * weight, 1: x / rms(x) * (1 + weight), 2: (x - mean) / std * weight + bias, where the bias
//        follows the weight
// ADD    0: `hidden` is normed and not added
// POST   1: the norm of `hidden` with post_weight is added, rounded to SCALAR, in place of `hidden`; needs ADD
// OUT    0: nothing is written to `out`
// MULTIPLIER, a float by which is multiplied what is added

#include "vector.cuh"

constexpr int NUM_VECTORS = HIDDEN_SIZE / 8;
constexpr int SUMS = KIND == 2 ? 2 : 1; // over the block, of a norm
using Elements = Vector<SCALAR, 8>;

// The block's row, or a norm's weights: thread t has vectors t, t + blockDim.x, ...
struct Row {
    Elements vectors[VECTORS];
};

// A norm's weights; `biases` only for layer norms.
struct Weights {
    Row scales;
#if KIND == 2
    Row biases;
#endif
};

__device__ inline int vector_index(int i) { return threadIdx.x + i * blockDim.x; }

__device__ inline void load_row(Row& row, const SCALAR* address) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (vector_index(i) < NUM_VECTORS) row.vectors[i] = load_vector<SCALAR, 8>(address + vector_index(i) * 8);
    }
}

__device__ inline void load_weights(Weights& weights, const SCALAR* address) {
    load_row(weights.scales, address);
#if KIND == 2
    load_row(weights.biases, address + HIDDEN_SIZE);
#endif
}

// Sums of x - shift, or of its square, over the row.
template <bool SQUARED> __device__ inline float row_sum(const Row& row, float shift, float* scratch) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (vector_index(i) >= NUM_VECTORS) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float x = to_float(row.vectors[i][j]) - shift;
            sum += SQUARED ? x * x : x;
        }
    }
    return block_sum(sum, scratch);
}

// Replaces a row by its norm, rounded to SCALAR.
__device__ inline void normalise(Row& row, const Weights& weights, float (*scratch)[32], float eps) {
#if KIND == 2
    const float mean = row_sum<false>(row, 0.0f, scratch[0]) / HIDDEN_SIZE;
#else
    const float mean = 0.0f;
#endif
    const float scale = rsqrtf(row_sum<true>(row, mean, scratch[SUMS - 1]) / HIDDEN_SIZE + eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (vector_index(i) >= NUM_VECTORS) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float weight = to_float(weights.scales.vectors[i][j]);
            float x = (to_float(row.vectors[i][j]) - mean) * scale * (KIND == 1 ? 1.0f + weight : weight);
#if KIND == 2
            x += to_float(weights.biases.vectors[i][j]);
#endif
            row.vectors[i][j] = from_float<SCALAR>(x);
        }
    }
}

// Rows of three vectors a thread would take more registers than a block of 512 threads may have.
extern "C" __global__ void __launch_bounds__(512) residual_norm(
    const SCALAR* hidden,    // [tokens, HIDDEN_SIZE]
    SCALAR* residual,        // [tokens, HIDDEN_SIZE], updated in place; unused without ADD
    const SCALAR* weight,    // [HIDDEN_SIZE], or [2, HIDDEN_SIZE] with a bias; unused without OUT
    SCALAR* out,             // [tokens, HIDDEN_SIZE]; may be `hidden`; unused without OUT
    long long hidden_stride, // elements between rows of `hidden`
    float eps,
    const SCALAR* post_weight // as `weight`; unused without POST
) {
    __shared__ float scratch[SUMS * (POST + OUT)][32];
    release_successors();
    const long long row = blockIdx.x;
    Row values;
#if POST
    Weights post_weights;
    load_weights(post_weights, post_weight);
#endif
#if OUT
    Weights weights;
    load_weights(weights, weight);
#endif
    wait_for_predecessors();
    load_row(values, hidden + row * hidden_stride);
#if POST
    normalise(values, post_weights, scratch + SUMS * OUT, eps);
#endif
#if ADD
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (vector_index(i) >= NUM_VECTORS) continue;
        SCALAR* address = residual + row * HIDDEN_SIZE + vector_index(i) * 8;
        const auto carried = load_vector<SCALAR, 8>(address);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float added = to_float(values.vectors[i][j]) * MULTIPLIER;
            values.vectors[i][j] = from_float<SCALAR>(added + to_float(carried[j]));
        }
        store_vector(address, values.vectors[i]);
    }
#endif
#if OUT
    normalise(values, weights, scratch, eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (vector_index(i) < NUM_VECTORS) store_vector(out + row * HIDDEN_SIZE + vector_index(i) * 8, values.vectors[i]);
    }
#endif
}
