// The warps that copy: one for queries and keys, one for values, by tensor copies of 16 positions.
//
// Groups beyond the row's end are copied from outside of the tensor, which gives zeros; values of the group in which
// the row ends are copied by ordinary loads, zeros from there on, because 0 * NaN would be NaN. Keys need no such care:
// their scores are masked.
#pragma once

#include "hopper_tile.cuh"

#if FP8_CACHE
constexpr int kParts = 1;  // tensor copies of a group of keys
#else
constexpr int kParts = kHalves;
#endif

// Row of the cache, counted in positions, at which a group of positions lies; a negative one beyond the row's end.
__device__ __forceinline__ int group_row(const int* table, int position, int length) {
    if (position >= length) return -kGroup;
    return __ldg(table + position / BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE;
}

// The launch's pieces, longest first: each block begins with the piece of its own number and takes the next that is left
// whenever it is ready to copy one more.
struct PieceQueue {
    int* counters;  // pieces taken beyond the first of each block, blocks that are done; zero between launches
    int pieces;

    // By one thread.
    __device__ __forceinline__ int take() const { return gridDim.x + atomicAdd(counters, 1); }
    // By one thread, after it took an index that is no piece.
    __device__ __forceinline__ void leave() const {
        __threadfence();
        if (atomicAdd(counters + 1, 1) == min(static_cast<int>(gridDim.x), pieces) - 1) counters[0] = counters[1] = 0;
    }
};

__device__ __forceinline__ void produce_queries_and_keys(
    Shared shared, const TensorMap* query_map, const TensorMap* key_map, const int* block_tables, int table_stride,
    const int* plan, PieceQueue queue) {
    const Stages queries = shared.queries(), keys = shared.copied_keys();
    int lane = threadIdx.x & 31, group = lane / kParts, part = lane % kParts;
    Ring<QUERY_STAGES> query_ring(1);
    Ring<kCopiedKeyStages> key_ring(1);
    for (int index = blockIdx.x, next = 0; index < queue.pieces; index = __shfl_sync(kFullWarp, next, 0)) {
        if (lane == 0) next = queue.take();
        Piece piece = Piece::load(plan, index);
        const int* table = block_tables + static_cast<long long>(piece.tile.table) * table_stride;
        int row = group_row(table, piece.last_keys * kKeys + group % kGroups * kGroup, piece.tile.length);
        barrier_wait(queries.empty(query_ring.stage), query_ring.parity);
        if (lane == 0) {
            unsigned full = queries.full(query_ring.stage);
            store_shared_word(shared.piece_index(query_ring.stage), index);
            barrier_expect(full, kTileBytes);
            copy_tensor(queries.tile(query_ring.stage), query_map, 0, piece.tile.query, piece.head * kHalves, full);
        }
        query_ring.advance();
        for (int tile = piece.last_keys; tile >= piece.first_keys; tile--) {
            int copied_row = row;
            if (tile > piece.first_keys) {  // looked up a tile ahead
                row = group_row(table, (tile - 1) * kKeys + group % kGroups * kGroup, piece.tile.length);
            }
#pragma unroll
            for (int copy = 0; copy < kCopiesOfTile; copy++) {
                unsigned full = keys.full(key_ring.stage);
                barrier_wait(keys.empty(key_ring.stage), key_ring.parity);
                if (lane == 0) barrier_expect(full, kCopiedBytes);
                __syncwarp();
                if (group / kCopiedGroups == copy) {
                    int place = part * kCopiedGroups + group % kCopiedGroups;
                    unsigned target = keys.tile(key_ring.stage) + place * (kCopiedGroupBytes / kParts);
                    copy_tensor(target, key_map, 0, copied_row, piece.kv_head() * kParts + part, full);
                }
                key_ring.advance();
            }
        }
    }
    barrier_wait(queries.empty(query_ring.stage), query_ring.parity);
    if (lane == 0) {
        store_shared_word(shared.piece_index(query_ring.stage), kNoPiece);
        barrier_arrive(queries.full(query_ring.stage));
        queue.leave();
    }
}

// Copies a group of values of which only `valid` rows count, the rest becoming zeros; by a whole warp.
__device__ __forceinline__ void copy_partial_values(
    unsigned target, const char* values, int row, int kv_head, int valid) {
    constexpr int kRowBytes = HEAD_DIM * kCachedBytes, kChunks = kRowBytes / 16;
    int chunk = threadIdx.x % kChunks;
    long long first = (static_cast<long long>(row) * KV_HEADS + kv_head) * kChunks + chunk;
    const uint4* source = reinterpret_cast<const uint4*>(values) + first;
#pragma unroll 1
    for (int line = threadIdx.x % 32 / kChunks; line < kGroup; line += 32 / kChunks) {
        uint4 data = make_uint4(0, 0, 0, 0);
        if (line < valid) data = __ldg(source + line * (KV_HEADS * kChunks));
        int offset = line * 128 + ((chunk % 8 ^ line % 8) << 4) + chunk / 8 * (kGroup * 128);
        store_shared(target + (FP8_CACHE ? line * kRowBytes + chunk * 16 : offset), data);
    }
    fence_async_proxy();
    __syncwarp();
}

__device__ __forceinline__ void produce_values(
    Shared shared, const TensorMap* value_map, const char* values, const int* block_tables, int table_stride,
    const int* plan) {
    const Stages stages = shared.copied_values();
    int lane = threadIdx.x & 31, group = lane % kGroups;
    Ring<kCopiedValueStages> ring(1);
    PieceReader reader{shared};
    for (int index = reader.next(); index != kNoPiece; index = reader.next()) {
        Piece piece = Piece::load(plan, index);
        int kv_head = piece.kv_head();
        const int* table = block_tables + static_cast<long long>(piece.tile.table) * table_stride;
        int row = group_row(table, piece.last_keys * kKeys + group * kGroup, piece.tile.length);
        for (int tile = piece.last_keys; tile >= piece.first_keys; tile--) {
            int copied_row = row;
            if (tile > piece.first_keys) {
                row = group_row(table, (tile - 1) * kKeys + group * kGroup, piece.tile.length);
            }
            int end = piece.tile.length - tile * kKeys;  // of the row, within this tile
            int partial = end < kKeys && end % kGroup ? end / kGroup : kGroups;
#pragma unroll
            for (int copy = 0; copy < kCopiesOfTile; copy++) {
                unsigned full = stages.full(ring.stage), target = stages.tile(ring.stage);
                bool is_partial = partial / kCopiedGroups == copy && partial < kGroups;
                barrier_wait(stages.empty(ring.stage), ring.parity);
                if (is_partial) {
                    int partial_row = __shfl_sync(kFullWarp, copied_row, partial);
                    unsigned place = target + partial % kCopiedGroups * kCopiedGroupBytes;
                    copy_partial_values(place, values, partial_row, kv_head, end % kGroup);
                }
                if (lane == 0) barrier_expect(full, kCopiedBytes - (is_partial ? kCopiedGroupBytes : 0));
                __syncwarp();
                if (lane < kGroups && group / kCopiedGroups == copy && group != partial) {
                    unsigned place = target + group % kCopiedGroups * kCopiedGroupBytes;
                    copy_tensor(place, value_map, 0, copied_row, kv_head * kParts, full);
                }
                ring.advance();
            }
        }
    }
}
