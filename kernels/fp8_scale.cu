// Scales the sums of codes that torch's FP8 product left: out = raw * factors of rows * scales of columns (+ bias), or
// activation(gate) * up from rows with gate and up side by side. 8 outputs per thread.
//
// Macros: WIDTH, columns of `raw`, a multiple of 16; RAW, its type; OUT, type of `out`; GATED, 1 for the second form, with ACTIVATION,
// one of the functions of activation.cuh; BIAS, 1 to add one.

#include "activation.cuh"
#include "vector.cuh"

constexpr int kOutputs = GATED ? WIDTH / 2 : WIDTH;
constexpr int kVectors = kOutputs / 8;

struct Eight {
    float values[8];
};

__device__ __forceinline__ Eight scaled(const RAW* raw, const float* scales, float factor) {
    Eight eight;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto sums = load_vector<RAW, 4>(raw + 4 * half);
        const auto four = load_vector<float, 4>(scales + 4 * half);
#pragma unroll
        for (int j = 0; j < 4; ++j) eight.values[4 * half + j] = to_float(sums[j]) * factor * four[j];
    }
    return eight;
}

extern "C" __global__ void fp8_scale(
    const RAW* raw,             // [rows, WIDTH]
    const float* factors,       // [rows]
    const float* scales,        // [WIDTH]
    const __nv_bfloat16* bias,  // [WIDTH], unused without BIAS
    OUT* out,                   // [rows, kOutputs]
    long long out_stride,       // elements between rows of `out`, a multiple of 4
    int rows) {
    release_successors();
    wait_for_predecessors();
    const long long total = static_cast<long long>(rows) * kVectors;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long index = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; index < total; index += step) {
        const long long row = index / kVectors;
        const int column = static_cast<int>(index - row * kVectors) * 8;
        const float factor = factors[row];
        Eight first = scaled(raw + row * WIDTH + column, scales + column, factor);
#if GATED
        const Eight up = scaled(raw + row * WIDTH + kOutputs + column, scales + kOutputs + column, factor);
#pragma unroll
        for (int j = 0; j < 8; ++j) first.values[j] = ACTIVATION(first.values[j]) * up.values[j];
#elif BIAS
        const auto added = load_vector<__nv_bfloat16, 8>(bias + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) first.values[j] += to_float(added[j]);
#endif
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vector<OUT, 4> four;
#pragma unroll
            for (int j = 0; j < 4; ++j) four[j] = from_float<OUT>(first.values[4 * half + j]);
            store_vector(out + row * out_stride + column + 4 * half, four);
        }
    }
}
