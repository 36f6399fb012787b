// FP8 tiles become fp16 tiles: a warpgroup converts keys and values, between the copies and the products.
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

// The warpgroup that converts takes a tile into registers, so that the next copy need not wait for the products of a tile
// before, nor for the conversion. A warp has 32 rows of it, a lane 16 elements of each kRows-th.
template <bool IsValues>
struct Converter {
    static constexpr int kStages = IsValues ? VALUE_STAGES : KEY_STAGES;
    static constexpr int kChunks = HEAD_DIM / 16;
    static constexpr int kRows = 32 / kChunks;
    static constexpr int kSteps = 32 / kRows;

    Shared shared;
    Ring<RAW_STAGES> raw_ring{0};
    Ring<kStages> ring{1};

    // The next tile, of which `valid` rows or more count. Later values become zeros, because 0 * NaN would be NaN.
    __device__ __forceinline__ void convert(int valid) {
        const Stages raw = IsValues ? shared.raw_values() : shared.raw_keys();
        const Stages tiles = IsValues ? shared.values() : shared.keys();
        int lane = threadIdx.x & 31, first_row = (threadIdx.x & 96) + lane / kChunks;
        uint4 words[kSteps];
        barrier_wait(raw.full(raw_ring.stage), raw_ring.parity);
        unsigned source = raw.tile(raw_ring.stage) + (threadIdx.x & 96) * HEAD_DIM + lane * 16;
#pragma unroll
        for (int i = 0; i < kSteps; i++) words[i] = load_shared(source + i * 512);
        fence_async_proxy();  // the next copy must not overtake these loads
        __syncwarp();
        if (lane == 0) barrier_arrive(raw.empty(raw_ring.stage));
        if (IsValues && valid < kKeys) {
#pragma unroll
            for (int i = 0; i < kSteps; i++) {
                if (first_row + i * kRows >= valid) words[i] = make_uint4(0, 0, 0, 0);
            }
        }
        barrier_wait(tiles.empty(ring.stage), ring.parity);
        store(tiles.tile(ring.stage), first_row, lane % kChunks, words);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(tiles.full(ring.stage));
        raw_ring.advance();
        ring.advance();
    }

private:
    // Of a row in a tile of keys or of values.
    static __device__ __forceinline__ constexpr int row_offset(int row) {
        return IsValues ? row / kGroup * kGroupBytes + row % kGroup * 128 : row * 128;
    }

    static __device__ __forceinline__ void store(unsigned tile, int first_row, int chunk, const uint4 (&words)[kSteps]) {
        // Of the two halves of a long row, one begins with its second 8 elements: neighbours then write to different banks.
        int second = HEAD_DIM == 128 ? chunk >> 2 : 0, eight = 2 * chunk + second;
        unsigned place = tile + row_offset(first_row) + eight / 8 * (IsValues ? kGroup * 128 : kHalfBytes) +
                         ((eight % 8 ^ first_row % 8) << 4);
#pragma unroll
        for (int i = 0; i < kSteps; i++) {
            uint4 low = expand_in_order(words[i].x, words[i].y), high = expand_in_order(words[i].z, words[i].w);
            unsigned swizzled = place ^ i * kRows % 8 << 4;
            store_shared(swizzled + row_offset(i * kRows), second ? high : low);
            store_shared((swizzled ^ 16) + row_offset(i * kRows), second ? low : high);
        }
    }
};

__device__ __forceinline__ void convert(Shared shared, const int* plan) {
    int pieces;  // loaded here, as the compiler would rather spill it than keep it across the branches to here
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(pieces) : "l"(plan));
    pieces *= kHeads;
    Converter<false> keys{shared};
    Converter<true> values{shared};
    for (int round = 0, index = dealt_piece(plan, 0); index < pieces; index = dealt_piece(plan, ++round)) {
        Piece piece = Piece::load(plan, index);
        for (int tile = piece.last_keys; tile >= piece.first_keys; tile--) {
            keys.convert(kKeys);
            values.convert(piece.tile.length - tile * kKeys);
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
