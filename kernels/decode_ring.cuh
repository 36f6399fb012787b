// A warp's ring of tiles in shared memory, filled by cp.async.
#pragma once

#include "decode_line.cuh"

constexpr int kHalfStageBytes = kTile * CachedRows::kRowBytes;
constexpr int kStageBytes = 2 * kHalfStageBytes;

// A warp's tiles, copied ahead of their use.
struct TileRing {
    const char* keys;
    const char* values;
    unsigned ring;  // shared memory
    int lane;
    unsigned long long policy;

    // Copies one half of a stage; rows outside [begin, end) become zero.
    __device__ __forceinline__ void copy(const char* source, unsigned target, int begin, int end) const {
#pragma unroll
        for (int i = 0; i < kTile * CachedRows::kChunks / 32; i++) {
            int index = i * 32 + lane, row = index / CachedRows::kChunks, chunk = index % CachedRows::kChunks;
            const char* from = source + static_cast<long long>(row) * (KV_HEADS * CachedRows::kRowBytes) + chunk * 16;
            copy_async(target + CachedRows::offset(row, chunk), from, row >= begin && row < end ? 16 : 0, policy);
        }
    }
    // Keys outside a row's range are masked by position, so their contents do not matter.
    __device__ __forceinline__ void copy_keys(int stage, unsigned source) const {
        copy(keys + static_cast<long long>(source) * CachedRows::kRowBytes, ring + stage * kStageBytes, 0, kTile);
    }
    __device__ __forceinline__ void copy_values(int stage, unsigned source, unsigned bounds) const {
        unsigned target = ring + stage * kStageBytes + kHalfStageBytes;
        copy(values + static_cast<long long>(source) * CachedRows::kRowBytes, target, bounds & 0xff, bounds >> 8 & 0xff);
    }
};
