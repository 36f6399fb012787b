// residual += hidden, and rms_norm(residual) * weight rounded to e4m3, in one pass: a block per row, in registers.
//
// It is add_rms_norm.cu followed by fp8_rows.cu: sum and norm are rounded to bf16 before what follows them.
// Macros: WIDTH, a multiple of 16; VECTORS, 16-element chunks per thread; ADD, 0 for the norm of `residual` alone; SCALED,
// 1 for sums that are yet to be multiplied by scales (fp8_scale.cu); GROUPED and STATIC as in fp8_rows.cu.

#include "fp8_rounding.cuh"

using Scalar = __nv_bfloat16;
constexpr int kChunks = WIDTH / 16;
using Numbers = Vector<Scalar, 16>;

__device__ __forceinline__ Chunk chunk_of(const Numbers& numbers) { return *reinterpret_cast<const Chunk*>(&numbers); }
__device__ __forceinline__ Numbers numbers_of(const Chunk& chunk) { return *reinterpret_cast<const Numbers*>(&chunk); }

__device__ __forceinline__ void store_chunk(Scalar* address, const Chunk& chunk) {
    uint4* words = reinterpret_cast<uint4*>(address);
    words[0] = chunk.low, words[1] = chunk.high;
}

// Multiplies 16 sums by their factor and the scales of their columns.
__device__ __forceinline__ void scale_sums(Numbers& sums, float factor, const float* scales) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        const auto four = load_vector<float, 4>(scales + i);
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i + j] = from_float<Scalar>(to_float(sums[i + j]) * factor * four[j]);
    }
}

extern "C" __global__ void __launch_bounds__(512) fp8_norm(
    const Scalar* hidden,  // [rows, WIDTH], unused without ADD
    const float* sum_factors,  // [rows] of `hidden`, only if SCALED
    const float* sum_scales,   // [WIDTH] of `hidden`, only if SCALED
    Scalar* residual,      // [rows, WIDTH], updated in place with ADD
    const Scalar* weight,  // [WIDTH]
    float eps,
    float bound,           // as in fp8_rows.cu
    unsigned char* codes,  // [rows, WIDTH] out
    float* factors,        // [rows] out, unused with GROUPED
    float* scales,         // [ceil(WIDTH / 128), pitch] out, only if GROUPED
    int pitch) {
    __shared__ float scratch[32];
#if !STATIC && !GROUPED
    __shared__ unsigned largest;
    if (threadIdx.x == 0) largest = 0;
#endif
    release_successors();
    const int row = blockIdx.x;
    Numbers weights[VECTORS], values[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int chunk = threadIdx.x + i * blockDim.x;
        weights[i] = numbers_of(load_chunk(weight + chunk * 16, chunk < kChunks));
    }
    wait_for_predecessors();
#if SCALED
    const float factor = __ldcg(sum_factors + row);
#endif
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int chunk = threadIdx.x + i * blockDim.x;
        const long long place = row * static_cast<long long>(WIDTH) + chunk * 16;
        values[i] = numbers_of(load_chunk(residual + place, chunk < kChunks));
#if ADD
        Numbers added = numbers_of(load_chunk(hidden + place, chunk < kChunks));
#if SCALED
        if (chunk < kChunks) scale_sums(added, factor, sum_scales + chunk * 16);
#endif
#pragma unroll
        for (int j = 0; j < 16; j++) {
            values[i][j] = from_float<Scalar>(to_float(added[j]) + to_float(values[i][j]));
        }
        if (chunk < kChunks) store_chunk(residual + place, chunk_of(values[i]));
#endif
#pragma unroll
        for (int j = 0; j < 16; j++) squares += to_float(values[i][j]) * to_float(values[i][j]);
    }
    const float inverse = rsqrtf(block_sum(squares, scratch) / WIDTH + eps);
    float scale = bound;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
#pragma unroll
        for (int j = 0; j < 16; j++) {
            values[i][j] = from_float<Scalar>(to_float(values[i][j]) * inverse * to_float(weights[i][j]));
        }
#if !STATIC && !GROUPED
        const unsigned most = __reduce_max_sync(~0u, largest_bits(chunk_of(values[i])));
        if (threadIdx.x % 32 == 0) atomicMax(&largest, most);
#endif
    }
#if !STATIC && !GROUPED
    __syncthreads();
    scale = scale_of(largest, bound);
#endif
#if !GROUPED
    if (threadIdx.x == 0) factors[row] = scale;
#endif
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int chunk = threadIdx.x + i * blockDim.x;
#if GROUPED
        unsigned most = largest_bits(chunk_of(values[i]));
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) most = max(most, __shfl_xor_sync(~0u, most, distance));
        scale = scale_of(most, bound);
        if (threadIdx.x % 8 == 0 && chunk < kChunks) scales[chunk / 8 * static_cast<long long>(pitch) + row] = scale;
#endif
        const uint4 rounded = codes_of(chunk_of(values[i]), 1.0f, scale, 1.0f / scale);
        if (chunk < kChunks) {
            *reinterpret_cast<uint4*>(codes + row * static_cast<long long>(WIDTH) + chunk * 16) = rounded;
        }
    }
}
