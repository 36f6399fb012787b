// Rows in bf16 rounded to e4m3, for products of many rows: a block per row, with the row in registers.
//
// If `squares` is given, rows are yet to be multiplied by 1 / rms: see skinny_product.cu.
// Macros: WIDTH, a multiple of 16; VECTORS, 16-element chunks per thread; GROUPED, 1 for a scale per 128 columns instead
// of one per row; STATIC, 1 for the given scale.

#include "fp8_rounding.cuh"

constexpr int kChunks = WIDTH / 16;
constexpr int kSquaresPitch = 128;

extern "C" __global__ void __launch_bounds__(512) fp8_rows(
    const __nv_bfloat16* x,  // [rows, WIDTH]
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
    const __nv_bfloat16* source = x + row * static_cast<long long>(WIDTH);
    Chunk chunks[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int chunk = threadIdx.x + i * blockDim.x;
        chunks[i] = load_chunk(source + chunk * 16, chunk < kChunks);
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
    scale = scale_of(largest, bound);
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
