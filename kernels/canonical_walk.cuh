// The canonical decode's line of work and its copies: sub-tiles of segments of (row, unit)s, in order.
//
// Rows, units and ranges are those of decode_line.cuh, but the line's tiles are segments of kSegment positions: `tiles`
// of a row are those that the plan covers, `begin` and `end` of a range count them. A (row, unit) whose segments lie in
// several ranges is split; `first_slot` of a range's head and tail is then the place of its first segment among the
// partial results, and -1 otherwise.
#pragma once

#include "canonical.cuh"
#include "decode_sight.cuh"

constexpr int kSubTileKeys = kSubTile / kTile;
constexpr int kHalfBytes = kSubTile * CachedRows::kRowBytes;
constexpr int kSubTileBytes = 2 * kHalfBytes;
constexpr int kThreads = WARPS * 32;
constexpr int kCopies = kSubTile * CachedRows::kChunks / kThreads;  // of a half, by each thread

static_assert(WARPS == kSubTileKeys, "a warp has sixteen keys of a sub-tile");
static_assert(kSubTile * CachedRows::kChunks % kThreads == 0, "threads share the copies evenly");

// Positions of a segment that any query of its row sees, from the first one's sub-tile on.
struct Extent {
    int position;
    int end;

    static __device__ __forceinline__ Extent of(const Row& row, const Keys& seen, int index) {
        int segment = (row.first / kSegment + index) * kSegment;
        return {max(segment, seen.begin / kSubTile * kSubTile), min(segment + kSegment, seen.end)};
    }
};

// Keys that any query of a row sees.
__device__ __forceinline__ Keys seen_keys(const Sight& sight) {
#if POSITIONS
    return {max(sight.known - sight.window, 0), sight.end};
#else
    return {sight.begin, sight.end};
#endif
}

// Walks over the sub-tiles of a range, ahead of their use.
struct Walk {
    const Row* rows;
    const int* block_tables;
    int table_stride;
    Counters counters;
    int end;  // of the range

    Row row;
    Keys seen;
    int flat, unit, index;
    Extent extent;
    int source;  // in lane l: where the positions of tile l % kSubTileKeys of the sub-tile are in the cache

    __device__ __forceinline__ void begin(const Range& range) {
        row = range.row, flat = range.begin, end = range.end;
        seen = seen_keys(Sight::of(row, counters));
        int offset = flat - row.start * kUnits;
        unit = offset / row.tiles, index = offset - unit * row.tiles;
        extent = Extent::of(row, seen, index);
        settle();
    }
    __device__ __forceinline__ bool has_more() const { return flat < end; }
    __device__ __forceinline__ void advance() {
        extent.position += kSubTile;
        settle();
    }
    // Whether this step writes keys of the sub-tile.
    __device__ __forceinline__ bool is_written() const {
#if POSITIONS
        return extent.position + kSubTile >= min(Sight::of(row, counters).known, row.length);
#else
        return extent.position + kSubTile >= row.length;
#endif
    }

private:
    // Goes on to the next segment with visible keys where this one has no further ones, and looks up its blocks.
    __device__ __forceinline__ void settle() {
        while (extent.position >= extent.end) {
            if (++flat >= end) return;
            if (++index == row.tiles) {
                index = 0;
                if (++unit == kUnits) {
                    unit = 0;
                    row = load_row(rows + row.index + 1);
                    seen = seen_keys(Sight::of(row, counters));
                }
            }
            extent = Extent::of(row, seen, index);
        }
        int position = extent.position + (threadIdx.x & (kSubTileKeys - 1)) * kTile;
        source = 0;
        if (position >= seen.end || position + kTile <= seen.begin) return;
        const int* table = block_tables + static_cast<long long>(row.table) * table_stride;
        source = __ldg(table + position / BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE;
    }
};

// Where a sub-tile is copied from.
struct Source {
    int place;       // as Walk::source
    int begin, end;  // positions of the sub-tile that a query sees
    int kv_head;

    // Of the walk's sub-tile; behind the last one, of nothing.
    static __device__ __forceinline__ Source of(const Walk& walk) {
        int position = walk.extent.position, end = walk.has_more() ? walk.seen.end - position : 0;
        return {walk.source, max(walk.seen.begin - position, 0), end, walk.unit / kUnitsPerHead};
    }
};

// Stages of sub-tiles in shared memory, filled by cp.async of all threads. Positions that no query sees become zeros.
struct SubTiles {
    const char* keys;
    const char* values;
    unsigned first;
    unsigned long long policy;

    __device__ __forceinline__ unsigned keys_at(int stage) const { return first + stage * kSubTileBytes; }
    __device__ __forceinline__ unsigned values_at(int stage) const { return keys_at(stage) + kHalfBytes; }
    __device__ __forceinline__ void copy_keys(int stage, const Source& source) const {
        copy(keys, keys_at(stage), source);
    }
    __device__ __forceinline__ void copy_values(int stage, const Source& source) const {
        copy(values, values_at(stage), source);
    }

private:
    __device__ __forceinline__ void copy(const char* cache, unsigned target, const Source& source) const {
#pragma unroll
        for (int i = 0; i < kCopies; i++) {
            int piece = i * kThreads + threadIdx.x, row = piece / CachedRows::kChunks, chunk = piece % CachedRows::kChunks;
            long long place = __shfl_sync(kFullWarp, source.place, row / kTile) + row % kTile;
            const char* from = cache + (place * KV_HEADS + source.kv_head) * CachedRows::kRowBytes + chunk * 16;
            bool seen = row >= source.begin && row < source.end;
            copy_async(target + CachedRows::offset(row, chunk), from, seen ? 16 : 0, policy);
        }
    }
};
