// Where the tiles of a gated product of experts lie in W: 64 rows of gate, then the same of up, then the next 64 of both.
#pragma once

#include "hopper.cuh"

constexpr int kBlocks = 4;            // of 64 rows of W in a tile
constexpr int kGatedOutputs = 128;    // of a tile

// First row of a tile's block; W has all rows of an expert's gate, `outputs`, then those of up.
__device__ __forceinline__ int gated_row(int expert, int tile, int block, int outputs) {
    return (expert * 2 + block % 2) * outputs + tile * kGatedOutputs + block / 2 * 64;
}

// Asks L2 for `count` pieces of 64 columns of the `index`-th tile, every `stride`-th, on the guess that each expert has one
// job. Each of `threads` threads asks for some.
__device__ __forceinline__ void fetch_tile(
    const TensorMap* weights, int index, int tiles, int outputs, int count, int stride, int thread = 0, int threads = 1) {
    const int expert = index / tiles, tile = index % tiles;
    for (int i = thread; i < count * kBlocks; i += threads) {
        const int step = (i / kBlocks + 1) * stride - 1;
        prefetch_tensor(weights, 0, gated_row(expert, tile, i % kBlocks, outputs), step);
    }
}
