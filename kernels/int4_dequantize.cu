// Writes a matrix of 4-bit numbers as SCALAR [rows, columns], for products of many rows: as fast as memory takes it.
//
// A block converts a tile: its codes are in the order of fragments, so rows are put together in shared memory.
//
// Macros: those of int4_tile.cuh; SCALAR.

#include "int4_tile.cuh"

using Scalar = SCALAR;

constexpr int kThreads = 128;
constexpr int kPitch = kStep + 8;  // elements between rows: lanes of a warp write to different banks
constexpr int kChunk = 8;          // elements that are written at once; the number of columns is a multiple of it
constexpr int kRowChunks = kStep / kChunk;

struct __align__(16) Row {
    Scalar values[kPitch];
};

// The numbers at bits 4 * i and 4 * i + 16 of a word of codes.
__device__ __forceinline__ Vector<Scalar, 2> numbers(unsigned word, int i, float zero, float scale) {
    const int first = word >> 4 * i & 15, second = word >> (4 * i + 16) & 15;
    return {{from_float<Scalar>((static_cast<float>(first) - zero) * scale),
             from_float<Scalar>((static_cast<float>(second) - zero) * scale)}};
}

// By a warp: 16 rows of a tile.
__device__ __forceinline__ void convert(const char* tile, Row* rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const LanePlaces places(warp, lane);
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int begin = 0; begin < kStep; begin += 32) {  // no group ends within
        const auto words = load_codes<2>(tile + places.codes, begin);
        const auto scales = load_scales(tile + places.scales, begin / GROUP);
        const auto zeros = load_zeros(tile + places.zeros, begin / GROUP);
#pragma unroll
        for (int f = 0; f < 2; f++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const auto pair = numbers(words[f], i, static_cast<float>(zeros[i % 2]), to_float(scales[i % 2]));
                store_vector(&rows[row + i % 2 * 8].values[begin + f * 16 + i / 2 * 8 + column], pair);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) int4_dequantize(
    const char* matrix, Scalar* out, int steps, int rows, int columns) {
    __shared__ Row numbers_of[kRows];
    const int tile = blockIdx.x / steps, step = blockIdx.x % steps;
    convert(matrix + static_cast<long long>(blockIdx.x) * kTileBytes, numbers_of);
    __syncthreads();
    wait_for_predecessors();  // which may read `out`
    release_successors();
    for (int index = threadIdx.x; index < kRows * kRowChunks; index += kThreads) {
        const int row = index / kRowChunks, column = index % kRowChunks * kChunk;
        const long long place = tile * kRows + row, first = step * kStep + column;
        if (place >= rows || first >= columns) continue;
        store_vector(out + place * columns + first, load_vector<Scalar, kChunk>(&numbers_of[row].values[column]));
    }
}
