// Rows of the residual stream in the canonical order (canonical_norm.cuh), with the bits of skinny_product.cu's ends. A block
// per row, four adjacent columns per thread.
//
// Macros: CANONICAL, 1; ENDS, one of those below; PARTS, of products whose sums are added in ascending order.

#include "canonical_norm.cuh"

#define ENDS_TAKE 0      // the row `indexes[row]` of `source`; out = row * norm_weight; squares of the row
#define ENDS_RESIDUAL 1  // residual += scale * (sum over parts); out = residual * norm_weight; squares of the residual

using Scalar = __nv_bfloat16;
using Quad = Vector<float, 4>;

#if ENDS != ENDS_TAKE
__device__ __forceinline__ Quad add_up(const float* parts, long long part_stride) {
    Quad loaded[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) loaded[part] = load_vector<float, 4>(parts + part * part_stride);
    Quad total{{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int j = 0; j < 4; j++) total[j] = __fadd_rn(total[j], loaded[part][j]);
    }
    return total;
}

// 1 / rms of x's row, for all threads of the block.
__device__ __forceinline__ float row_scale(const float* squares, int tiles, float inverse_width, float eps) {
    if (squares == nullptr) return 1.0f;
    __shared__ float scale;
    if (threadIdx.x < 32) {
        const bool adds = threadIdx.x < kScaleLanes;
        const float* own = adds ? squares + squares_place(blockIdx.x, tiles) : nullptr;
        const float sum = row_squares(own, tiles, threadIdx.x % kScaleLanes);
        if (threadIdx.x == 0) scale = inverse_rms(sum, inverse_width, eps);
    }
    __syncthreads();
    return scale;
}
#endif

__device__ __forceinline__ void store_rounded(Scalar* place, const Quad& values) {
    Vector<Scalar, 4> rounded;
#pragma unroll
    for (int j = 0; j < 4; j++) rounded[j] = from_float<Scalar>(values[j]);
    store_vector(place, rounded);
}

extern "C" __global__ void canonical_residual(
    const float* parts,         // [PARTS, rows, width]; unused by ENDS_TAKE
    long long part_stride,      // elements between parts
    const float* squares,       // of x's rows (canonical_norm.cuh), or null if x has no scale; unused by ENDS_TAKE
    int tiles_of_x,             // 64 columns each
    float inverse_width,        // 1 / (number of elements of a row of x)
    float eps,
    const Scalar* source,       // [any, width], only for ENDS_TAKE
    const int* indexes,         // [rows] rows of `source`, or null for all; only for ENDS_TAKE
    Scalar* residual,           // [rows, width]; for ENDS_TAKE it gets the rows, or null
    const Scalar* norm_weight,  // [width]
    Scalar* out,                // [rows, width], its rows apart by `pitch`
    long long pitch,
    float* new_squares,         // [row tile][tile of columns][kRowTile]
    int width) {                // a multiple of 4
    release_successors();
    wait_for_predecessors();
    const int row = blockIdx.x, quads = width / 4, tiles = (width + kTileColumns - 1) / kTileColumns;
    const long long begin = static_cast<long long>(row) * width;
#if ENDS == ENDS_TAKE
    const Scalar* taken = source + static_cast<long long>(indexes ? indexes[row] : row) * width;
#else
    const float scale = row_scale(squares, tiles_of_x, inverse_width, eps);
#endif
    // All lanes of a warp take part in the sum over a tile.
    for (int base = 0; base < quads; base += blockDim.x) {
        const int quad = base + threadIdx.x, column = quad * 4;
        const bool present = quad < quads;
        Quad values{};
        float sum = 0.0f;
        if (present) {
#if ENDS == ENDS_TAKE
            const auto loaded = load_vector<Scalar, 4>(taken + column);
#pragma unroll
            for (int j = 0; j < 4; j++) values[j] = to_float(loaded[j]);
#else
            values = add_up(parts + begin + column, part_stride);
#pragma unroll
            for (int j = 0; j < 4; j++) values[j] = __fmul_rn(values[j], scale);
#endif
#if ENDS == ENDS_RESIDUAL
            const auto carried = load_vector<Scalar, 4>(residual + begin + column);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                values[j] = to_float(from_float<Scalar>(__fadd_rn(to_float(carried[j]), values[j])));
            }
#endif
            if (residual != nullptr) store_rounded(residual + begin + column, values);
            const auto weights = load_vector<Scalar, 4>(norm_weight + column);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum = __fadd_rn(sum, __fmul_rn(values[j], values[j]));
                values[j] = __fmul_rn(values[j], to_float(weights[j]));
            }
            store_rounded(out + row * pitch + column, values);
        }
        sum = lane_sum(sum, kTileQuads);
        if (present && quad % kTileQuads == 0) {
            new_squares[squares_place(row, tiles) + quad / kTileQuads * kRowTile] = sum;
        }
    }
}
