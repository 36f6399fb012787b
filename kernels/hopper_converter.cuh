// Conversion of FP8 tiles of keys and values to fp16 by one warpgroup, between the copies and the products.
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

// The converting warpgroup loads a tile into registers, so that the next copy waits neither for the products of an
// earlier tile nor for the conversion. A warp has a quarter of the rows; a lane loads 16 elements of a row per step.
template <bool IsValues>
struct Converter {
    static constexpr int kStages = IsValues ? VALUE_STAGES : KEY_STAGES;
    static constexpr int kChunks = HEAD_DIM / 16;
    static constexpr int kWarpRows = kKeys / 4;
    static constexpr int kSteps = kWarpRows * kChunks / 32;
    static constexpr bool kEven = 32 % kChunks == 0;  // the warp loads whole rows at each step
    static constexpr int kRows = 32 / kChunks;        // rows per step
    static_assert(kWarpRows * kChunks % 32 == 0, "all lanes have work at each step");
    static_assert(kEven || HEAD_DIM < 128, "a lane's halves keep their order at all steps");

    Shared shared;
    Ring<RAW_STAGES> raw_ring{0};
    Ring<kStages> ring{1};

    // Converts the next tile. Values from row `valid` on become zeros, because 0 * NaN would be NaN.
    __device__ __forceinline__ void convert(int valid) {
        const Stages raw = IsValues ? shared.raw_values() : shared.raw_keys();
        const Stages tiles = IsValues ? shared.values() : shared.keys();
        int lane = threadIdx.x & 31, warp_row = (threadIdx.x & 96) / 32 * kWarpRows;
        uint4 words[kSteps];
        barrier_wait(raw.full(raw_ring.stage), raw_ring.parity);
        unsigned source = raw.tile(raw_ring.stage) + warp_row * HEAD_DIM + lane * 16;
#pragma unroll
        for (int i = 0; i < kSteps; i++) words[i] = load_shared(source + i * 512);
        fence_async_proxy();  // the next copy must not overtake these loads
        __syncwarp();
        if (lane == 0) barrier_arrive(raw.empty(raw_ring.stage));
        if (IsValues && valid < kKeys) {
#pragma unroll
            for (int i = 0; i < kSteps; i++) {
                if (warp_row + row_of(lane, i) >= valid) words[i] = make_uint4(0, 0, 0, 0);
            }
        }
        barrier_wait(tiles.empty(ring.stage), ring.parity);
        store(tiles.tile(ring.stage), warp_row, lane, words);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(tiles.full(ring.stage));
        raw_ring.advance();
        ring.advance();
    }

private:
    // Offset of a row in a tile of keys or of values.
    static __device__ __forceinline__ constexpr int row_offset(int row) {
        return IsValues ? row / kGroup * kGroupBytes + row % kGroup * 128 : row * 128;
    }

    // The row, among the warp's rows, and the chunk in it that a lane has at step i.
    static __device__ __forceinline__ int row_of(int lane, int i) {
        return kEven ? lane / kChunks + i * kRows : (i * 32 + lane) / kChunks;
    }
    static __device__ __forceinline__ int chunk_of(int lane, int i) {
        return kEven ? lane % kChunks : (i * 32 + lane) % kChunks;
    }

    // In long rows, chunks of every other group of four store their second 8 elements first, to avoid bank conflicts.
    static __device__ __forceinline__ int begins_with_second(int chunk) { return HEAD_DIM >= 128 ? chunk >> 2 & 1 : 0; }

    // Offset of 8 elements; the other 8 of their chunk are in the adjacent 16 bytes.
    static __device__ __forceinline__ unsigned place_of(int row, int eight) {
        return row_offset(row) + eight / 8 * (IsValues ? kGroup * 128 : kKeyPartBytes) + ((eight % 8 ^ row % 8) << 4);
    }

    static __device__ __forceinline__ void store(unsigned tile, int warp_row, int lane, const uint4 (&words)[kSteps]) {
        int second = begins_with_second(chunk_of(lane, 0)), eight = 2 * chunk_of(lane, 0) + second;
        unsigned first = tile + place_of(warp_row + row_of(lane, 0), eight);
#pragma unroll
        for (int i = 0; i < kSteps; i++) {
            uint4 low = expand_in_order(words[i].x, words[i].y), high = expand_in_order(words[i].z, words[i].w);
            unsigned place = (first ^ i * kRows % 8 << 4) + row_offset(i * kRows);
            if (!kEven) place = tile + place_of(warp_row + row_of(lane, i), 2 * chunk_of(lane, i));
            store_shared(place, second ? high : low);
            store_shared(place ^ 16, second ? low : high);
        }
    }
};

__device__ __forceinline__ void convert(Shared shared, const int* plan) {
    int pieces;  // loaded here: the compiler would spill it instead of keeping it across the branches
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(pieces) : "l"(plan));
    pieces *= kHeads;
    Converter<false> keys{shared};
    Converter<true> values{shared};
    for (int round = 0, index = dealt_piece(plan, 0); index < pieces; index = dealt_piece(plan, ++round)) {
        Piece piece = Piece::load(plan, index);
        for (int tile = piece.begin_tile(); piece.has(tile); tile = piece.after(tile)) {
            keys.convert(kKeys);
            values.convert(piece.tile.length - tile * kKeys);
        }
    }
}

// Converts a warpgroup's 64 rows of a tile of queries to fp16 in place; a barrier of the warpgroup must follow.
__device__ __forceinline__ void convert_queries(unsigned tile, int thread) {
    constexpr float kMost = 65504.0f;
#pragma unroll 2
    for (int i = thread; i < kParts * 64 * 8; i += 128) {
        unsigned address = tile + i / (64 * 8) * kQueryPartBytes + i % (64 * 8) * 16;
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
