// 1 / rms of rows from their sums of squares, in the order of canonical_norm.cuh. Four lanes share a row.
//
// Macros: CANONICAL, 1.

#include "canonical_norm.cuh"

extern "C" __global__ void canonical_scales(
    const float* squares,  // [row tile][tile of columns][kRowTile]
    float* scales,         // [rows]
    int tiles,             // of columns
    float inverse_width,   // 1 / (number of columns)
    float eps,
    int rows) {
    release_successors();
    wait_for_predecessors();
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / kScaleLanes;
    const bool present = row < rows;
    const float* own = present ? squares + squares_place(row, tiles) : nullptr;
    const float sum = row_squares(own, tiles, threadIdx.x % kScaleLanes);
    if (present && threadIdx.x % kScaleLanes == 0) scales[row] = inverse_rms(sum, inverse_width, eps);
}
