// FP8 tiles become fp16 tiles: one warp converts keys, one values, between the copies and the products.
#pragma once

#include "hopper_tile.cuh"

#if FP8_CACHE

// Eight e4m3 as fp16, in order.
__device__ __forceinline__ uint4 expand_in_order(unsigned low, unsigned high) {
    uint4 expanded;
    asm("{\n.reg .b16 a, b, c, d;\nmov.b32 {a, b}, %4;\nmov.b32 {c, d}, %5;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n"
        "cvt.rn.f16x2.e4m3x2 %2, c;\ncvt.rn.f16x2.e4m3x2 %3, d;\n}"
        : "=r"(expanded.x), "=r"(expanded.y), "=r"(expanded.z), "=r"(expanded.w)
        : "r"(low), "r"(high));
    return expanded;
}

// Where 8 elements of a row lie in a tile of keys or of values.
template <bool IsValues>
__device__ __forceinline__ int converted_offset(int row, int chunk) {
    int within = row % 128 * 128 + ((chunk % 8 ^ row % 8) << 4);
    if (!IsValues) return chunk / 8 * kHalfBytes + within;
    return row / kGroup * kGroupBytes + chunk / 8 * (kGroup * 128) + within % (kGroup * 128);
}

template <bool IsValues>
__device__ __forceinline__ void convert_tile(unsigned raw, unsigned tile) {
    constexpr int kChunks = HEAD_DIM / 16;  // of 16 elements in a row
    int lane = threadIdx.x & 31;
    // Of the two halves of a long row, one begins with its second chunk: neighbours then write to different banks.
    int first = HEAD_DIM == 128 ? lane >> 2 & 1 : 0;
#pragma unroll 4
    for (int i = lane; i < kKeys * kChunks; i += 32) {
        uint4 words = load_shared(raw + i * 16);
        uint4 low = expand_in_order(words.x, words.y), high = expand_in_order(words.z, words.w);
        int row = i / kChunks, chunk = i % kChunks * 2;
        store_shared(tile + converted_offset<IsValues>(row, chunk + first), first ? high : low);
        store_shared(tile + converted_offset<IsValues>(row, chunk + 1 - first), first ? low : high);
    }
    fence_async_proxy();
    __syncwarp();
}

template <bool IsValues>
__device__ __forceinline__ void convert(Shared shared, const int* plan, int pieces) {
    constexpr int kStages = IsValues ? VALUE_STAGES : KEY_STAGES;
    const Stages raw = IsValues ? shared.raw_values() : shared.raw_keys();
    const Stages tiles = IsValues ? shared.values() : shared.keys();
    Ring<RAW_STAGES> raw_ring(0);
    Ring<kStages> ring(1);
    for (int round = 0, index = dealt_piece(plan, 0); index < pieces; index = dealt_piece(plan, ++round)) {
        Piece piece = Piece::load(plan, index);
        for (int tile = piece.last_keys; tile >= piece.first_keys; tile--) {
            barrier_wait(raw.full(raw_ring.stage), raw_ring.parity);
            barrier_wait(tiles.empty(ring.stage), ring.parity);
            convert_tile<IsValues>(raw.tile(raw_ring.stage), tiles.tile(ring.stage));
            if ((threadIdx.x & 31) == 0) {
                barrier_arrive(tiles.full(ring.stage));
                barrier_arrive(raw.empty(raw_ring.stage));
            }
            raw_ring.advance();
            ring.advance();
        }
    }
}

// Turns a warpgroup's 64 rows of a tile of queries into fp16, where they are; a barrier of the warpgroup must follow.
__device__ __forceinline__ void convert_queries(unsigned tile, int thread) {
    constexpr float kMost = 65504.0f;
#pragma unroll 2
    for (int i = thread; i < kHalves * 64 * 8; i += 128) {
        unsigned address = tile + i / (64 * 8) * kHalfBytes + i % (64 * 8) * 16;
        uint4 words = load_shared(address);
        unsigned* pairs = &words.x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Vector<Scalar, 2> pair = *reinterpret_cast<Vector<Scalar, 2>*>(pairs + j);
            pairs[j] = Tensor16<__half>::pack(fminf(fmaxf(to_float(pair[0]), -kMost), kMost),
                                              fminf(fmaxf(to_float(pair[1]), -kMost), kMost));
        }
        store_shared(address, words);
    }
    fence_async_proxy();
}

#endif
