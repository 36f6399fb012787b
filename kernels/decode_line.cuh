// Decode's line of work, as runner_svc/attention/decode_plan.py packs it: rows, units, tiles, ranges.
#pragma once

#include "cached.cuh"

constexpr int kTile = 16;
constexpr int kColumnTiles = COLUMNS / 8;
constexpr int kUnitsPerHead = (GROUP_SIZE + COLUMNS - 1) / COLUMNS;
constexpr int kUnits = KV_HEADS * kUnitsPerHead;
// Query heads of a unit; the last unit of a key-value head can have fewer.
constexpr int kHeads = GROUP_SIZE < COLUMNS ? GROUP_SIZE : COLUMNS;

static_assert(BLOCK_SIZE % kTile == 0, "a tile lies in one block");
static_assert(COLUMNS % 8 == 0, "query heads come in columns of eight");

// One row of the step, as in the plan.
struct __align__(16) Row {
    int start;      // tiles of a unit before this row
    int tiles;      // tiles of a unit, at least 1
    int length;     // positions
    int first;      // first visible position (0, or the window's first)
    int table;      // row of the block tables
    int query;      // row of the queries and the output
    int index;      // index among the step's rows
    int reserved;
};

// The blocks that share a (row, unit).
struct Split {
    int first_slot;  // of the partial results: twice the first block, plus 1 if its range begins before the (row, unit)
    int last_block;

    __device__ __forceinline__ int first_block() const { return first_slot >> 1; }
    __device__ __forceinline__ bool is_whole() const { return first_block() == last_block; }
};

// A block's share of the line, as in the plan.
struct __align__(16) Range {
    Row row;  // the row in which it begins
    int begin;
    int end;
    Split head;  // split of its first segment
    Split tail;  // split of its last segment
    int reserved[2];
};

// Location of a tile's keys and values.
struct Tile {
    unsigned source;  // (position in the cache) * KV_HEADS + key-value head
    unsigned bounds;  // first valid position in the tile | (last valid position + 1) << 8 | whether it is the row's last << 16
};

__device__ __forceinline__ Row load_row(const Row* row) {
    const int4* words = reinterpret_cast<const int4*>(row);
    int4 a = __ldg(words), b = __ldg(words + 1);
    return Row{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ Range load_range(const Range* range) {
    const int4* words = reinterpret_cast<const int4*>(range) + 2;
    int4 a = __ldg(words), b = __ldg(words + 1);
    return Range{load_row(&range->row), a.x, a.y, {a.z, a.w}, {b.x, b.y}, {b.z, b.w}};
}

__device__ __forceinline__ int first_head(int unit) {
    return unit / kUnitsPerHead * GROUP_SIZE + unit % kUnitsPerHead * COLUMNS;
}

__device__ __forceinline__ int head_count(int unit) {
    return min(kHeads, GROUP_SIZE - unit % kUnitsPerHead * COLUMNS);
}

// Finds tile `flat` of the line, which is at or after `row`, and stores its row in `row`.
__device__ __forceinline__ Tile locate(
    int flat, Row& row, const Row* rows, const int* __restrict__ block_tables, int table_stride) {
    while (flat >= (row.start + row.tiles) * kUnits) row = load_row(rows + row.index + 1);
    int offset = flat - row.start * kUnits;
    int unit = offset / row.tiles;
    int position = row.first / kTile * kTile + (offset - unit * row.tiles) * kTile;
    int block = __ldg(block_tables + static_cast<long long>(row.table) * table_stride + position / BLOCK_SIZE);
    Tile tile;
    tile.source = (static_cast<unsigned>(block) * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + unit / kUnitsPerHead;
    tile.bounds = max(row.first - position, 0) | min(row.length - position, kTile) << 8 |
                  (row.length - position <= kTile ? 1u << 16 : 0u);
    return tile;
}
