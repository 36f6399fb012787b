// What a block of canonical_product.cu needs once a tile is multiplied, got meanwhile by the copying warpgroup's other
// warps: 1 / rms of x's rows, and in L2 the residual stream that is added to.
//
// One slot is enough: the next tile's are computed once all have read this one's, long before they are needed.
#pragma once

#include "canonical_norm.cuh"
#include "gated_tile.cuh"

constexpr int kAheadWarps = 3;
constexpr int kWarpRows = 32 / kScaleLanes;  // of which a warp computes scales at a time

// Shared memory behind the ring: a full and an empty barrier, then scales.
struct Scales {
    char* bytes;
    unsigned base;

    __device__ __forceinline__ Scales(char* shared, unsigned base)
        : bytes(shared + kRingBytes), base(base + kRingBytes) {}
    __device__ __forceinline__ unsigned full() const { return base; }
    __device__ __forceinline__ unsigned empty() const { return base + 8; }
    __device__ __forceinline__ float* values() const { return reinterpret_cast<float*>(bytes + 16); }
    // Called by the thread that initializes the ring's barriers.
    __device__ __forceinline__ void init() const {
        barrier_init(full(), kAheadWarps);
        barrier_init(empty(), CONSUMERS * 4);
    }
    // Called by whole warps.
    __device__ __forceinline__ void arrive(unsigned barrier) const {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
    }
};

// The tiles of a block that have an end: with SPLIT, those of the last part.
__device__ __forceinline__ bool has_end(const Tiles& tiles, int tile) { return tile >= (SPLIT - 1) * tiles.places(); }

struct Ahead {
    Scales scales;
    const float* squares;  // of x's rows, or null
    int tiles_of_x;
    float inverse_width;
    float eps;
    int num_rows;
    Member member;

    // Computes the scales of all tiles. `ask(place, index, count)` asks L2 for a part of what the tile's end reads.
    template <typename Ask>
    __device__ __forceinline__ void run(const Tiles& tiles, const Ask& ask) const {
        wait_for_predecessors();  // they write squares and the residual stream
        const int warp = (threadIdx.x & 127) / 32 - 1;
        unsigned parity = 1;
        for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
            if (!has_end(tiles, tile)) continue;
            barrier_wait(scales.empty(), parity);
            parity ^= 1;
            const Place place(tiles, tile, member);
            ask(place, (threadIdx.x & 127) - 32, kAheadWarps * 32);
            if (squares != nullptr) {
                for (int first = warp * kWarpRows; first < kRows; first += kAheadWarps * kWarpRows) store(place, first);
            }
            scales.arrive(scales.full());
        }
    }

private:
    // Those of kWarpRows rows of a tile.
    __device__ __forceinline__ void store(const Place& place, int first) const {
        const int lane = threadIdx.x & 31, own = first + lane / kScaleLanes, row = place.row + own;
        const float* line = row < num_rows ? squares + squares_place(row, tiles_of_x) : nullptr;
        const float total = row_squares<CONSUMERS == 2 ? 4 : 2>(line, tiles_of_x, lane % kScaleLanes);
        if (lane % kScaleLanes == 0) scales.values()[own] = inverse_rms(total, inverse_width, eps);
    }
};
