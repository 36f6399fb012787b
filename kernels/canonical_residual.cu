// Rows of the residual stream in the canonical order (canonical_norm.cuh), with the bits of the products' ends: out = row *
// norm_weight, and sums of squares of the row. A block per row, four adjacent columns per thread.
//
// Macros: CANONICAL, 1.

#include "canonical_norm.cuh"

using Scalar = __nv_bfloat16;

extern "C" __global__ void canonical_residual(
    const Scalar* source,       // [any, width]
    const int* indexes,         // [rows] rows of `source`, or null for all
    Scalar* residual,           // [rows, width], gets the rows; or null
    const Scalar* norm_weight,  // [width]
    Scalar* out,                // [rows, width]
    float* squares,             // [row tile][tile of columns][kRowTile]
    int width) {                // a multiple of 4
    release_successors();
    wait_for_predecessors();
    const int row = blockIdx.x, quads = width / 4, tiles = (width + kTileColumns - 1) / kTileColumns;
    const long long begin = static_cast<long long>(row) * width;
    const Scalar* taken = source + static_cast<long long>(indexes ? indexes[row] : row) * width;
    // All lanes of a warp take part in the sum over a tile.
    for (int base = 0; base < quads; base += blockDim.x) {
        const int quad = base + threadIdx.x, column = quad * 4;
        const bool present = quad < quads;
        float sum = 0.0f;
        if (present) {
            const auto values = load_vector<Scalar, 4>(taken + column);
            if (residual != nullptr) store_vector(residual + begin + column, values);
            const auto weights = load_vector<Scalar, 4>(norm_weight + column);
            Vector<Scalar, 4> normed;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float value = to_float(values[j]);
                sum = __fadd_rn(sum, __fmul_rn(value, value));
                normed[j] = from_float<Scalar>(__fmul_rn(value, to_float(weights[j])));
            }
            store_vector(out + begin + column, normed);
        }
        sum = lane_sum(sum, kTileQuads);
        if (present && quad % kTileQuads == 0) {
            squares[squares_place(row, tiles) + quad / kTileQuads * kRowTile] = sum;
        }
    }
}
