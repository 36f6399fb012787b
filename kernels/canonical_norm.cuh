// The canonical order of a row's norm (docs/determinism.md), for all kernels that read or store sums of squares.
//
// Squares are added by tiles of 64 adjacent columns: four adjacent columns one after another, then the tile's 16 groups
// of four as a tree of lanes 8, 4, 2 and 1 apart. A row's tiles are added by kScaleLanes lanes, each of which has every
// fourth tile, ascending; then lanes 2 and 1 apart.
#pragma once

#include "vector.cuh"

constexpr int kScaleLanes = 4;
constexpr int kTileColumns = 64;
constexpr int kTileQuads = kTileColumns / 4;
constexpr int kRowTile = 128;  // rows whose sums of squares are adjacent: [row tile][tile of columns][kRowTile]

// The sum of a row's tiles, in all kScaleLanes adjacent lanes, of which this is `lane`. All lanes of the warp take part;
// `squares` is the row's in the first tile, or null for lanes without a row, which get zero. `Loads` are under way at once.
template <int Loads = 16>
__device__ __forceinline__ float row_squares(const float* squares, int tiles, int lane) {
    float sum = 0.0f;
    if (squares != nullptr) {
#pragma unroll Loads
        for (int i = lane; i < tiles; i += kScaleLanes) sum = __fadd_rn(sum, __ldcg(squares + i * kRowTile));
    }
#pragma unroll
    for (int distance = kScaleLanes / 2; distance > 0; distance /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
    }
    return sum;
}

__device__ __forceinline__ float inverse_rms(float squares, float inverse_width, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fmul_rn(squares, inverse_width), eps)));
}

// Adds adjacent biases, which are rounded to 16 bits as they are.
template <typename Scalar, int N>
__device__ __forceinline__ void add_biases(Vector<float, N>& values, const Scalar* biases) {
    const auto own = load_vector<Scalar, N>(biases);
#pragma unroll
    for (int j = 0; j < N; j++) values[j] = __fadd_rn(values[j], to_float(own[j]));
}

// Where a row's sums of squares begin, of `tiles` tiles of columns.
__device__ __forceinline__ long long squares_place(int row, int tiles) {
    return static_cast<long long>(row / kRowTile) * tiles * kRowTile + row % kRowTile;
}
