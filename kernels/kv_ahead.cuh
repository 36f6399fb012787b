// Asks L2 for the keys and values that the next layer's decode attention (paged_decode.cu) begins with. Its plan is read
// as decode_line.cuh describes it, but for any shape of the cache.
#pragma once

#include "vector.cuh"

// Keys and values of a layer's positions, of `row_bytes` for each of `heads`; the step's block tables and plan; positions
// of a block, units of a head, and how many tiles of each of the plan's ranges are asked for, up to 32; 0: none.
struct KvAhead {
    const char* keys;
    const char* values;
    const int* tables;
    const int* plan;
    int table_stride, batch, ranges, tiles, heads, units, block_positions, row_bytes;
};

constexpr int kTilePositions = 16;
constexpr int kRowWords = 8, kRangeWords = 16;  // of the plan
enum { kRowStart, kRowTiles, kRowLength, kRowFirst, kRowTable, kRowQuery, kRowIndex };
enum { kRangeBegin = kRowWords, kRangeEnd };

// For a multiple of 16 bytes.
__device__ __forceinline__ void ask(const char* source, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}

// By a warp, for one range: each lane finds a tile before the predecessor has ended, and asks for it afterwards.
__device__ __forceinline__ void fetch_range(const KvAhead& ahead, int index) {
    const int* range = ahead.plan + ahead.batch * kRowWords + index * kRangeWords;
    const bool exists = index < ahead.ranges;
    const int lane = threadIdx.x % 32, tile = exists ? range[kRangeBegin] + lane : 0;
    const bool has = exists && lane < ahead.tiles && tile < range[kRangeEnd];
    long long offset = 0;
    if (has) {
        const int* row = range;
        const int units = ahead.heads * ahead.units;
        while (tile >= (row[kRowStart] + row[kRowTiles]) * units) row = ahead.plan + (row[kRowIndex] + 1) * kRowWords;
        const int inside = tile - row[kRowStart] * units, unit = inside / row[kRowTiles];
        const int position = (row[kRowFirst] / kTilePositions + inside - unit * row[kRowTiles]) * kTilePositions;
        const long long block =
            ahead.tables[row[kRowTable] * static_cast<long long>(ahead.table_stride) + position / ahead.block_positions];
        offset = ((block * ahead.block_positions + position % ahead.block_positions) * ahead.heads + unit / ahead.units) *
                 ahead.row_bytes;
    }
    wait_for_predecessors();
    if (!has) return;
    for (int i = 0; i < kTilePositions; i++, offset += ahead.heads * ahead.row_bytes) {
        ask(ahead.keys + offset, ahead.row_bytes);
        ask(ahead.values + offset, ahead.row_bytes);
    }
}
