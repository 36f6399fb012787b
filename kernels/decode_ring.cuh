// A ring of tiles in shared memory, filled by cp.async: of a warp, or of the warps of a team.
#pragma once

#include "decode_line.cuh"

constexpr int kHalfStageBytes = kTile * CachedRows::kRowBytes;
constexpr int kStageBytes = 2 * kHalfStageBytes;

constexpr int kPieces = kTile * CachedRows::kChunks / 32;  // of half a stage, of 16 bytes for each lane

// Orders what the warps of a team did before and do afterwards.
__device__ __forceinline__ void meet_team(int team) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(SHARERS * 32) : "memory");
}

// Tiles, copied ahead of their use.
struct TileRing {
    const char* keys;
    const char* values;
    unsigned ring;  // shared memory
    int lane;
    int sharer;
    unsigned long long policy;

    // Copies one half of a stage; rows outside [begin, end) become zero.
    __device__ __forceinline__ void copy(const char* source, unsigned target, int begin, int end) const {
#pragma unroll
        for (int i = 0; i < (kPieces + SHARERS - 1) / SHARERS; i++) {
            int piece = SHARERS == 1 ? i : i * SHARERS + sharer;
            if (kPieces % SHARERS && piece >= kPieces) continue;
            int index = piece * 32 + lane, row = index / CachedRows::kChunks, chunk = index % CachedRows::kChunks;
            const char* from = source + static_cast<long long>(row) * (KV_HEADS * CachedRows::kRowBytes) + chunk * 16;
            copy_async(target + CachedRows::offset(row, chunk), from, row >= begin && row < end ? 16 : 0, policy);
        }
    }
    // Keys outside a row's range are masked by position, so their contents do not matter.
    __device__ __forceinline__ void copy_keys(int stage, unsigned source, unsigned bounds) const {
        int end = POSITIONS && (bounds & 0xff) >= (bounds >> 8 & 0xff) ? 0 : kTile;
        copy(keys + static_cast<long long>(source) * CachedRows::kRowBytes, ring + stage * kStageBytes, 0, end);
    }
    __device__ __forceinline__ void copy_values(int stage, unsigned source, unsigned bounds) const {
        unsigned target = ring + stage * kStageBytes + kHalfStageBytes;
        copy(values + static_cast<long long>(source) * CachedRows::kRowBytes, target, bounds & 0xff, bounds >> 8 & 0xff);
    }
};
