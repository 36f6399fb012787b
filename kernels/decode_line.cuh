// Decode's line of work, as runner_svc/attention/decode_plan.py packs it: rows, units, tiles, ranges.
#pragma once

#include "cached.cuh"

constexpr int kTile = 16;
constexpr int kColumnTiles = COLUMNS / 8;
// Queries of a key-value head: its query heads at a row's first position, then at the second, and so on.
constexpr int kGroupQueries = GROUP_SIZE * (POSITIONS ? POSITIONS : 1);
// A team of SHARERS warps works on the same tiles; each warp has COLUMNS of a unit's queries.
constexpr int kTeams = WARPS / SHARERS;
constexpr int kUnitColumns = SHARERS * COLUMNS;
constexpr int kUnitsPerHead = (kGroupQueries + kUnitColumns - 1) / kUnitColumns;
constexpr int kUnits = KV_HEADS * kUnitsPerHead;
// Queries of a unit; the last unit of a key-value head can have fewer.
constexpr int kUnitQueries = kGroupQueries < kUnitColumns ? kGroupQueries : kUnitColumns;

static_assert(BLOCK_SIZE % kTile == 0, "a tile lies in one block");
static_assert(COLUMNS % 8 == 0, "queries come in columns of eight");
static_assert(WARPS % SHARERS == 0, "teams have the same size");

// One row of the step, as in the plan.
struct __align__(16) Row {
    int start;      // tiles of a unit before this row
    int tiles;      // tiles of a unit, at least 1
    int length;     // positions; with POSITIONS, the most that the row can have
    int first;      // first visible position (0, or the window's first); with POSITIONS, the least that it can be
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

// Index of a unit's first query among those of its key-value head.
__device__ __forceinline__ int first_query(int unit) { return unit % kUnitsPerHead * kUnitColumns; }

__device__ __forceinline__ int query_count(int unit) { return min(kUnitQueries, kGroupQueries - first_query(unit)); }

// First query head of a unit's key-value head or, if all its queries are at one position, of the unit.
__device__ __forceinline__ int first_head(int unit) {
    return unit / kUnitsPerHead * GROUP_SIZE + (POSITIONS > 1 ? 0 : first_query(unit));
}

// Head of a unit's query, after first_head(unit).
__device__ __forceinline__ int head_of(int unit, int query) {
    return POSITIONS > 1 ? (first_query(unit) + query) % GROUP_SIZE : query;
}

// Position of a unit's query, after the row's first.
__device__ __forceinline__ int position_of(int unit, int query) {
    return POSITIONS > 1 ? (first_query(unit) + query) / GROUP_SIZE : 0;
}
