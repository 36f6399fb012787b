// Which keys the queries of a row see.
//
// Without POSITIONS a row has one position, and the plan has its keys. With POSITIONS a row has up to that many
// adjacent positions, and only the device knows where they begin: the plan has bounds, which cover the keys of all
// cases.
#pragma once

#include "decode_line.cuh"

#ifndef FIRST_KEY
#define FIRST_KEY 0  // with POSITIONS: keys before it are seen by no query
#endif

// Keys from `begin` to before `end`.
struct Keys {
    int begin;
    int end;
};

#if POSITIONS

// What the plan has only bounds of. It is read before the kernel waits for its predecessors, like the plan.
struct Counters {
    const int* known;    // [rows of the block tables]: tokens of a row up to its first query's position, included
    const int* drafted;  // [batch]: present queries of a row after its first one; null: none
    int window;          // number of positions that a query sees, its own included
};

struct Sight {
    int known;
    int end;
    int window;

    // Counters outside the plan's bounds are clamped to them.
    static __device__ __forceinline__ Sight of(const Row& row, const Counters& counters) {
        int known = min(max(__ldg(counters.known + row.table), 0), row.length);
        int drafted = counters.drafted ? min(max(__ldg(counters.drafted + row.index), 0), POSITIONS - 1) : 0;
        return {known, min(known + drafted, row.length), counters.window};
    }
    static __device__ __forceinline__ int visible_from(int begin) { return FIRST_KEY ? max(begin, FIRST_KEY) : begin; }

    // Returns the keys that any query sees in the tile at `position`, within the tile, and as bit 16 whether this step
    // writes keys there.
    __device__ __forceinline__ unsigned bounds(int position) const {
        int begin = min(max(visible_from(known - window) - position, 0), kTile);
        return begin | min(max(end - position, 0), kTile) << 8 | (known - position <= kTile ? 1u << 16 : 0u);
    }
    // Whether every query sees all keys from `first` to before `last`.
    __device__ __forceinline__ bool sees_all(int first, int last) const {
        return first >= visible_from(known + POSITIONS - 1 - window) && last <= known;
    }
    // An absent query sees no more than the last one that is present.
    __device__ __forceinline__ Keys keys_of(int query) const {
        int length = known + query / GROUP_SIZE;
        return {visible_from(length - window), min(length, end)};
    }
};

#else

struct Counters {};

struct Sight {
    int begin;
    int end;

    static __device__ __forceinline__ Sight of(const Row& row, const Counters&) { return {row.first, row.length}; }
    __device__ __forceinline__ unsigned bounds(int position) const {
        return max(begin - position, 0) | min(end - position, kTile) << 8 | (end - position <= kTile ? 1u << 16 : 0u);
    }
};

#endif

// Location of a tile's keys and values.
struct Tile {
    unsigned source;  // (position in the cache) * KV_HEADS + key-value head
    // First visible position in the tile | (last visible position + 1) << 8 | whether this step writes to it << 16.
    unsigned bounds;
};

// Finds tile `flat` of the line, which is at or after `row`, and stores its row in `row`.
__device__ __forceinline__ Tile locate(
    int flat, Row& row, const Row* rows, const int* __restrict__ block_tables, int table_stride,
    const Counters& counters) {
    while (flat >= (row.start + row.tiles) * kUnits) row = load_row(rows + row.index + 1);
    int offset = flat - row.start * kUnits;
    int unit = offset / row.tiles;
    int position = row.first / kTile * kTile + (offset - unit * row.tiles) * kTile;
    int block = __ldg(block_tables + static_cast<long long>(row.table) * table_stride + position / BLOCK_SIZE);
    Tile tile;
    tile.source = (static_cast<unsigned>(block) * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + unit / kUnitsPerHead;
    tile.bounds = Sight::of(row, counters).bounds(position);
    return tile;
}
