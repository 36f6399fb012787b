// The tiles of the Hopper prefill in shared memory, and the pieces of work that they belong to.
//
// Tiles have swizzled rows of 128 bytes, each a 64-element part of a head: queries [kParts][128 rows], keys
// [kParts][KEYS rows], values [groups of 16 positions][kParts][16 rows]. The second part of a head of 96 is half full.
// An FP8 cache's tiles arrive unconverted, [KEYS rows][HEAD_DIM bytes], in separate stages.
#pragma once

#include "cached.cuh"
#include "hopper.cuh"
#include "prefill_tile.cuh"

constexpr int kQueries = 128;
constexpr int kKeys = KEYS;
constexpr int kGroup = 16;  // positions copied at once
constexpr int kGroups = kKeys / kGroup;
constexpr int kParts = (HEAD_DIM + 63) / 64;  // of a head
// The last part is not full, and planes of tensor maps are heads, not parts. Nothing reads beyond the head: scores take
// HEAD_DIM / 16 steps, and products with values have HEAD_DIM columns.
constexpr bool kPadded = HEAD_DIM % 64 != 0;
constexpr int kQueryPartBytes = kQueries * 128;
constexpr int kQueryTileBytes = kParts * kQueryPartBytes;
constexpr int kKeyPartBytes = kKeys * 128;
constexpr int kTileBytes = kParts * kKeyPartBytes;  // of keys or values
constexpr int kGroupBytes = kTileBytes / kGroups;
constexpr int kHeads = KV_HEADS * GROUP_SIZE;
constexpr int kConsumers = 2;
constexpr int kOutputs = HEAD_DIM / 2;  // a multiplying thread's accumulators of outputs
constexpr int kScores = kKeys / 2;      // and of scores
constexpr int kWriters = FP8_CACHE ? 4 : 1;  // arrivals that fill a tile: the converting warps, or the copying thread
static_assert(HEAD_DIM == 64 || HEAD_DIM == 96 || HEAD_DIM == 128 || (HEAD_DIM == 256 && !FP8_CACHE),
              "made for heads of 64, 96 and 128, and of 256 but for an FP8 cache");
static_assert(KEYS % kGroup == 0 && COPIED_KEYS == kGroup, "copies bring whole groups");
static_assert(BLOCK_SIZE % kGroup == 0, "a group lies in one block");

// Sizes as copied from the cache.
constexpr int kCopiedTileBytes = FP8_CACHE ? kKeys * HEAD_DIM : kTileBytes;
constexpr int kCopiedGroupBytes = kCopiedTileBytes / kGroups;
constexpr int kCopiedKeyStages = FP8_CACHE ? RAW_STAGES : KEY_STAGES;
constexpr int kCopiedValueStages = FP8_CACHE ? RAW_STAGES : VALUE_STAGES;

// Stages of one kind, each with a full barrier and, at a fixed distance, an empty barrier.
struct Stages {
    unsigned first;
    unsigned bytes;
    unsigned first_full;
    static constexpr int kCount = QUERY_STAGES + KEY_STAGES + VALUE_STAGES + 2 * RAW_STAGES;

    __device__ __forceinline__ unsigned tile(int stage) const { return first + stage * bytes; }
    __device__ __forceinline__ unsigned full(int stage) const { return first_full + stage * 8; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + kCount * 8; }
};

// Description of a piece for the multiplying warps, written by the copying warp when it starts to copy the queries.
struct PieceRecord {
    int position;  // of the first query
    int first_keys, last_keys;
    int rows;  // 0 after the last piece
    int query;
    int head;

    __device__ __forceinline__ static PieceRecord load(unsigned address) {
        uint4 a = load_shared(address), b = load_shared(address + 16);
        return {static_cast<int>(a.x), static_cast<int>(a.y), static_cast<int>(a.z), static_cast<int>(a.w),
                static_cast<int>(b.x), static_cast<int>(b.y)};
    }
    __device__ __forceinline__ void store(unsigned address) const {
        store_shared(address, make_uint4(position, first_keys, last_keys, rows));
        store_shared(address + 16, make_uint4(query, head, 0, 0));
    }
};
// A record is read for one piece longer than its queries, when the outputs are written. There are enough records that
// none is overwritten by then.
constexpr int kRecords = 32;
constexpr int kRecordBytes = 32;

// Shared memory: tiles of queries, keys and values, unconverted keys and values, the barriers, then records of pieces.
struct Shared {
    unsigned base;
    static constexpr int kBarriers = QUERY_STAGES * kQueryTileBytes + (KEY_STAGES + VALUE_STAGES) * kTileBytes +
                                     2 * RAW_STAGES * kCopiedTileBytes;

    __device__ __forceinline__ Stages queries() const { return {base, kQueryTileBytes, base + kBarriers}; }
    __device__ __forceinline__ Stages keys() const { return after(queries(), QUERY_STAGES, kTileBytes); }
    __device__ __forceinline__ Stages values() const { return after(keys(), KEY_STAGES, kTileBytes); }
    __device__ __forceinline__ Stages raw_keys() const { return after(values(), VALUE_STAGES, kCopiedTileBytes); }
    __device__ __forceinline__ Stages raw_values() const { return after(raw_keys(), RAW_STAGES, kCopiedTileBytes); }
    // Targets of tensor copies of keys and values.
    __device__ __forceinline__ Stages copied_keys() const { return FP8_CACHE ? raw_keys() : keys(); }
    __device__ __forceinline__ Stages copied_values() const { return FP8_CACHE ? raw_values() : values(); }

    // Address of the record of this round's piece.
    __device__ __forceinline__ unsigned record(int round) const {
        return base + kBarriers + Stages::kCount * 16 + static_cast<unsigned>(round) % kRecords * kRecordBytes;
    }

    // Called by one thread before any thread uses the barriers.
    __device__ __forceinline__ void init_barriers() const {
        init(queries(), QUERY_STAGES, 1, kConsumers);
        init(keys(), KEY_STAGES, kWriters, kConsumers);
        init(values(), VALUE_STAGES, kWriters, kConsumers);
        init(raw_keys(), 2 * RAW_STAGES, 1, kWriters);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    static constexpr int kBytes = kBarriers + Stages::kCount * 16 + kRecords * kRecordBytes;

private:
    static __device__ __forceinline__ Stages after(Stages stages, int count, unsigned bytes) {
        return {stages.tile(count), bytes, stages.full(count)};
    }
    static __device__ __forceinline__ void init(Stages stages, int count, int writers, int readers) {
        for (int i = 0; i < count; i++) {
            barrier_init(stages.full(i), writers);
            barrier_init(stages.empty(i), readers);
        }
    }
};

static_assert(Shared::kBytes == SHARED_BYTES, "the launch asks for what is used");

// Pieces are dealt to the number of blocks in the plan; further blocks have none.
__device__ __forceinline__ int dealt_piece(const int* plan, int round) {
    int blocks;  // read in each round: the copying warps have no register to keep it in
    asm volatile("ld.global.nc.s32 %0, [%1 + 4];" : "=r"(blocks) : "l"(plan));
    return dealt_piece(round, blockIdx.x, blocks);
}

// A tile of queries for one head, with the range of key tiles that it sees.
struct Piece {
    PrefillTile tile;
    int head;
    int first_keys;
    int last_keys;

    __device__ __forceinline__ static Piece load(const int* plan, int piece) {
        Piece loaded;
        loaded.tile = load_prefill_tile(plan, piece / kHeads);
        loaded.head = piece % kHeads;
        loaded.first_keys = loaded.tile.first / kKeys;
        loaded.last_keys = (loaded.tile.position + loaded.tile.rows - 1) / kKeys;
        return loaded;
    }
    __device__ __forceinline__ int kv_head() const { return head / GROUP_SIZE; }

    // Key tiles are processed from the last to the first, or ascending in the canonical order.
#if CANONICAL
    __device__ __forceinline__ int begin_tile() const { return first_keys; }
    __device__ __forceinline__ bool has(int tile) const { return tile <= last_keys; }
    __device__ __forceinline__ bool has_after(int tile) const { return tile < last_keys; }
    static __device__ __forceinline__ int after(int tile) { return tile + 1; }
#else
    __device__ __forceinline__ int begin_tile() const { return last_keys; }
    __device__ __forceinline__ bool has(int tile) const { return tile >= first_keys; }
    __device__ __forceinline__ bool has_after(int tile) const { return tile > first_keys; }
    static __device__ __forceinline__ int after(int tile) { return tile - 1; }
#endif
    __device__ __forceinline__ PieceRecord record() const {
        return {tile.position, first_keys, last_keys, tile.rows, tile.query, head};
    }
};
