// Rows in bf16 rounded to e4m3: a block per row, with the row in registers.
//
// If `squares` is given, rows are yet to be multiplied by 1 / rms: see skinny_product.cu. With GATED, rows are
// activation(gate) * up, rounded to bf16: of the sums that torch's FP8 product left (1, see fp8_scale.cu), or of gate and
// up themselves (2).
// Macros: WIDTH, a multiple of 16; VECTORS, 16-element chunks per thread; GROUPED, 1 for a scale per 128 columns instead
// of one per row; STATIC, 1 for the given scale; GATED, 0, 1 or 2, with ACTIVATION, one of the functions of activation.cuh;
// CANONICAL, 1 for the root of docs/determinism.md.

#include "activation.cuh"
#include "fp8_rounding.cuh"

constexpr int kChunks = WIDTH / 16;
constexpr int kSquaresPitch = 128;

#if GATED
// Four sums times their factor and scales; with GATED 2, they have none.
__device__ __forceinline__ Vector<float, 4> scaled(const __nv_bfloat16* raw, const float* scales, float factor) {
    const auto sums = load_vector<__nv_bfloat16, 4>(raw);
    Vector<float, 4> four;
#if GATED == 1
    four = load_vector<float, 4>(scales);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) four[j] = GATED == 1 ? to_float(sums[j]) * factor * four[j] : to_float(sums[j]);
    return four;
}

// Two words of bf16: four outputs.
__device__ __forceinline__ uint2 activated(const __nv_bfloat16* raw, const float* scales, float factor) {
    const auto gate = scaled(raw, scales, factor), up = scaled(raw + WIDTH, scales + WIDTH, factor);
    Vector<__nv_bfloat16, 4> four;
#pragma unroll
    for (int j = 0; j < 4; j++) four[j] = from_float<__nv_bfloat16>(ACTIVATION(gate[j]) * up[j]);
    return *reinterpret_cast<const uint2*>(&four);
}
#endif

// 16 adjacent numbers of the row that begins at `row`.
__device__ __forceinline__ Chunk numbers_at(
    const __nv_bfloat16* row, int chunk, const float* raw_scales, float raw_factor) {
#if GATED
    if (chunk >= kChunks) return load_chunk(row, false);
    uint2 fours[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = chunk * 16 + 4 * i;
        fours[i] = activated(row + column, raw_scales + column, raw_factor);
    }
    return {make_uint4(fours[0].x, fours[0].y, fours[1].x, fours[1].y),
            make_uint4(fours[2].x, fours[2].y, fours[3].x, fours[3].y)};
#else
    return load_chunk(row + chunk * 16, chunk < kChunks);
#endif
}

extern "C" __global__ void __launch_bounds__(512) fp8_rows(
    const __nv_bfloat16* x,  // [rows, WIDTH]; GATED: sums [rows, 2 * WIDTH]
    const float* raw_factors,  // [rows] of the sums, only if GATED is 1
    const float* raw_scales,   // [2 * WIDTH] of the sums, only if GATED is 1
    const float* squares,    // [num_squares, kSquaresPitch] or null
    int num_squares,
    float inverse_width,
    float eps,
    float bound,             // the largest magnitude that a scale is made for; STATIC: the scale
    unsigned char* codes,    // [rows, WIDTH] out
    float* factors,          // [rows] out: of the products with a row's codes (GROUPED: beside the groups' scales)
    float* scales,           // [ceil(WIDTH / 128), pitch] out, only if GROUPED
    int pitch) {
#if !STATIC && !GROUPED
    __shared__ unsigned largest;
    if (threadIdx.x == 0) largest = 0;
#endif
    __shared__ float shared_rms;
    release_successors();
    wait_for_predecessors();
    const int row = blockIdx.x;
    const __nv_bfloat16* source = x + row * static_cast<long long>(GATED ? 2 * WIDTH : WIDTH);
    const float raw_factor = GATED == 1 ? raw_factors[row] : 1.0f;
    Chunk chunks[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        chunks[i] = numbers_at(source, threadIdx.x + i * blockDim.x, raw_scales, raw_factor);
    }
    if (threadIdx.x < 32) {
        const float rms = inverse_rms(squares, num_squares, kSquaresPitch, row, inverse_width, eps);
        if (threadIdx.x == 0) shared_rms = rms;
    }
    __syncthreads();
    float scale = bound, factor = 1.0f;
#if STATIC
    factor = shared_rms;
    if (threadIdx.x == 0) factors[row] = scale;
#elif GROUPED
    if (threadIdx.x == 0) factors[row] = shared_rms;
#else
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const unsigned most = __reduce_max_sync(~0u, largest_bits(chunks[i]));
        if (threadIdx.x % 32 == 0) atomicMax(&largest, most);
    }
    __syncthreads();
    scale = scale_of(largest, bound / shared_rms);  // `bound` is one of rows after the norm
    if (threadIdx.x == 0) factors[row] = scale * shared_rms;
#endif
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int chunk = threadIdx.x + i * blockDim.x;
#if GROUPED
        unsigned most = largest_bits(chunks[i]);
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) most = max(most, __shfl_xor_sync(~0u, most, distance));
        scale = scale_of(most, bound);
        if (threadIdx.x % 8 == 0 && chunk < kChunks) scales[chunk / 8 * static_cast<long long>(pitch) + row] = scale;
#endif
        const uint4 rounded = codes_of(chunks[i], factor, scale, 1.0f / scale);
        if (chunk < kChunks) {
            *reinterpret_cast<uint4*>(codes + row * static_cast<long long>(WIDTH) + chunk * 16) = rounded;
        }
    }
}
