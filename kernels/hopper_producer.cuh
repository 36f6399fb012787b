// The copying warps: one for queries and keys, one for values, by tensor copies of 16 positions (a group).
//
// Groups beyond the row's end are copied from outside of the tensor, which gives zeros. Values of the group in which
// the row ends are copied by ordinary loads, with zeros from the end on, because 0 * NaN would be NaN. (The conversion
// zeros such values of an FP8 cache.) Keys need no such treatment: their scores are masked.
#pragma once

#include "hopper_tile.cuh"

// Number of tensor copies for a group of keys, a group of values, and a tile of queries: a map with a plane per head
// copies one part of a head at a time, a map with a plane per part copies as many parts as its box has.
constexpr int kKeyCopies = FP8_CACHE ? 1 : kParts;
constexpr int kValueCopies = !FP8_CACHE && kPadded ? kParts : 1;
constexpr int kQueryCopies = kPadded ? kParts : 1;
static_assert(COPIED_PLANES * kQueryCopies == kParts, "copies of queries and values bring all parts of a head");

// Copies rows of 16-bit elements of `head`, from part `part` on.
__device__ __forceinline__ void copy_head(
    unsigned target, const TensorMap* map, int row, int head, int part, unsigned full) {
    copy_tensor(target, map, kPadded ? part * 64 : 0, row, kPadded ? head : head * kParts + part, full);
}

// Copies rows of keys or values of `head`, from part `part` on.
__device__ __forceinline__ void copy_cached(
    unsigned target, const TensorMap* map, int row, int head, int part, unsigned full) {
    if (FP8_CACHE) {
        copy_tensor(target, map, 0, row, head, full);
    } else {
        copy_head(target, map, row, head, part, full);
    }
}

// Position in the cache of a group of a row's positions; negative beyond the row's end.
__device__ __forceinline__ int group_row(const int* table, int position, int length) {
    if (position >= length) return -kGroup;
    return __ldg(table + position / BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE;
}

__device__ __forceinline__ void produce_queries_and_keys(
    Shared shared, const TensorMap* query_map, const TensorMap* key_map, const int* block_tables, int table_stride,
    const int* plan, int pieces) {
    const Stages queries = shared.queries(), keys = shared.copied_keys();
    int lane = threadIdx.x & 31, group = lane / kKeyCopies, part = lane % kKeyCopies;
    Ring<QUERY_STAGES> query_ring(1);
    Ring<kCopiedKeyStages> key_ring(1);
    int round = 0;
    for (int index = dealt_piece(plan, 0); index < pieces; index = dealt_piece(plan, ++round)) {
        Piece piece = Piece::load(plan, index);
        const int* table = block_tables + static_cast<long long>(piece.tile.table) * table_stride;
        int row = group_row(table, piece.begin_tile() * kKeys + group % kGroups * kGroup, piece.tile.length);
        barrier_wait(queries.empty(query_ring.stage), query_ring.parity);
        if (lane == 0) {
            piece.record().store(shared.record(round));
            unsigned full = queries.full(query_ring.stage);
            barrier_expect(full, kQueryTileBytes);
#pragma unroll
            for (int i = 0; i < kQueryCopies; i++) {
                unsigned target = queries.tile(query_ring.stage) + i * kQueryPartBytes;
                copy_head(target, query_map, piece.tile.query, piece.head, i, full);
            }
        }
        query_ring.advance();
        for (int tile = piece.begin_tile(); piece.has(tile); tile = piece.after(tile)) {
            int copied_row = row;
            if (piece.has_after(tile)) {  // look up one tile ahead
                row = group_row(table, piece.after(tile) * kKeys + group % kGroups * kGroup, piece.tile.length);
            }
            unsigned full = keys.full(key_ring.stage);
            barrier_wait(keys.empty(key_ring.stage), key_ring.parity);
            if (lane == 0) barrier_expect(full, kCopiedTileBytes);
            __syncwarp();
            if (group < kGroups) {
                unsigned target = keys.tile(key_ring.stage) + (part * kGroups + group) * (kCopiedGroupBytes / kKeyCopies);
                copy_cached(target, key_map, copied_row, piece.kv_head(), part, full);
            }
            key_ring.advance();
        }
    }
    barrier_wait(queries.empty(query_ring.stage), query_ring.parity);
    if (lane == 0) {
        PieceRecord{}.store(shared.record(round));
        barrier_arrive(queries.full(query_ring.stage));
    }
}

// Copies a group of values by a whole warp; rows from `valid` on become zeros.
__device__ __forceinline__ void copy_partial_values(
    unsigned target, const char* values, int row, int kv_head, int valid) {
    constexpr int kRowBytes = HEAD_DIM * sizeof(Scalar), kChunks = kRowBytes / 16;
    const uint4* source =
        reinterpret_cast<const uint4*>(values + (static_cast<long long>(row) * KV_HEADS + kv_head) * kRowBytes);
#pragma unroll 2
    for (int i = threadIdx.x & 31; i < kGroup * kChunks; i += 32) {
        int line = i / kChunks, chunk = i % kChunks;
        uint4 data = make_uint4(0, 0, 0, 0);
        if (line < valid) data = __ldg(source + static_cast<long long>(line) * (KV_HEADS * kChunks) + chunk);
        store_shared(target + chunk / 8 * (kGroup * 128) + line * 128 + ((chunk % 8 ^ line % 8) << 4), data);
    }
    fence_async_proxy();
    __syncwarp();
}

__device__ __forceinline__ void produce_values(
    Shared shared, const TensorMap* value_map, const char* values, const int* block_tables, int table_stride,
    const int* plan, int pieces) {
    const Stages stages = shared.copied_values();
    int lane = threadIdx.x & 31, group = lane % kGroups, part = lane / kGroups;
    Ring<kCopiedValueStages> ring(1);
    for (int round = 0, index = dealt_piece(plan, 0); index < pieces; index = dealt_piece(plan, ++round)) {
        Piece piece = Piece::load(plan, index);
        int kv_head = piece.kv_head();
        const int* table = block_tables + static_cast<long long>(piece.tile.table) * table_stride;
        int row = group_row(table, piece.begin_tile() * kKeys + group * kGroup, piece.tile.length);
        for (int tile = piece.begin_tile(); piece.has(tile); tile = piece.after(tile)) {
            int copied_row = row;
            if (piece.has_after(tile)) {
                row = group_row(table, piece.after(tile) * kKeys + group * kGroup, piece.tile.length);
            }
            unsigned full = stages.full(ring.stage), target = stages.tile(ring.stage);
            int end = piece.tile.length - tile * kKeys;  // the row's end within this tile
            int partial = !FP8_CACHE && end < kKeys && end % kGroup ? end / kGroup : kGroups;
            barrier_wait(stages.empty(ring.stage), ring.parity);
            if (partial < kGroups) {
                int partial_row = __shfl_sync(kFullWarp, copied_row, partial);
                copy_partial_values(target + partial * kCopiedGroupBytes, values, partial_row, kv_head, end % kGroup);
            }
            if (lane == 0) barrier_expect(full, kCopiedTileBytes - (partial < kGroups ? kCopiedGroupBytes : 0));
            __syncwarp();
            if (part < kValueCopies && group != partial) {
                unsigned own = target + group * kCopiedGroupBytes + part * (kGroup * 128);
                copy_cached(own, value_map, copied_row, kv_head, part, full);
            }
            ring.advance();
        }
    }
}
