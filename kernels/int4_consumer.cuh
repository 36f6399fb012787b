// The warpgroups that multiply with a 4-bit matrix: codes to whole numbers in registers, products, scales.
//
// Macros: those of kernels/int4_product.cu.
#pragma once

#include "int4_codes.cuh"
#include "int4_ring.cuh"
#include "wgmma.cuh"

constexpr int kSums = TOKENS / 2;
constexpr bool kFewRegisters = TOKENS >= 64 || kWarpgroups * BLOCKS >= 8;
constexpr int kChunk = GROUP < 64 || kFewRegisters ? 32 : 64;  // columns whose numbers are in registers at a time
constexpr int kFragments = kChunk / 16;
using Product = Wgmma<SCALAR, kSums>;

// One of the warpgroups that multiply.
struct Consumer {
    Shared shared;
    Problem problem;
    Ends ends;
    Ring<STAGES> ring;
    int owner;  // number of this warpgroup, the same in a warp for the compiler too: row_group * PARTS + part
    int part = owner % PARTS;
    int row_group = owner / PARTS;
    LanePlaces places{static_cast<int>(threadIdx.x / 32 % 4), static_cast<int>(threadIdx.x % 32)};

    __device__ __forceinline__ void consume() {
        for (int tile = problem.first(); tile < problem.tiles; tile += problem.stride()) {
            float total[kSums];
            multiply(total);
            store_sums(total);
#if SPLIT > 1
            cluster_sync();
#else
            if (tile == problem.first()) meet(1, kConsumers + 32);  // scales
            else meet(2 + row_group, kTeam);
#endif
            const TileSums sums{shared.sums(row_group * PARTS)};
            const int own = problem.own(tile) + row_group;
            if (own < problem.tiles) end_tile(sums, shared.scales(), ends, own, threadIdx.x % kTeam, kTeam);
            if (SPLIT == 1) meet(2 + row_group, kTeam);
        }
    }

private:
    static __device__ __forceinline__ void meet(int name, int threads) {
        asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
    }

    __device__ __forceinline__ const char* tile_in(int stage) const { return shared.bytes + shared.weights(stage, owner); }

    // The numbers of a chunk of a tile's columns: code - zero.
    __device__ __forceinline__ void load(unsigned (&a)[kFragments][4], const char* tile, int chunk) const {
        const auto words = load_codes<kFragments>(tile + places.codes, chunk * kChunk);
        const auto zeros = load_zeros(tile + places.zeros, chunk * kChunk / GROUP);
        const unsigned zero[2] = {raised_twice<SCALAR>(zeros[0]), raised_twice<SCALAR>(zeros[1])};
#pragma unroll
        for (int f = 0; f < kFragments; f++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[f][i] = minus<SCALAR>(raised<SCALAR>(words[f] >> 4 * i), zero[i % 2]);
                asm volatile("" : "+r"(a[f][i]));  // before the next wait or fence
            }
        }
    }

#if BY_WARPS
    // Multiplies this warpgroup's columns of a tile, each warp its own rows: few tokens make wgmma wait for itself.
    __device__ __forceinline__ void multiply(float (&total)[kSums]) {
        const int own = problem.length(part), lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kSums; i++) total[i] = 0.0f;
        for (int step = 0; step < own; step++, ring.advance()) {
            barrier_wait(shared.full(ring.stage), ring.parity);
            const char* tile = tile_in(ring.stage);
            const unsigned x = shared.inputs(ring.stage, part) + lane % 8 * 128;
#pragma unroll
            for (int group = 0; group < kGroups; group++) {
                float scale[2], sums[TOKENS / 8][4] = {};
                read_group_scales(scale, tile, group);
#pragma unroll
                for (int chunk = group * GROUP / kChunk; chunk < (group + 1) * GROUP / kChunk; chunk++) {
                    unsigned a[kFragments][4];
                    load(a, tile, chunk);
#pragma unroll
                    for (int f = 0; f < kFragments; f += 2) multiply_pair(sums, a[f], a[f + 1], x, chunk * kChunk + f * 16);
                }
#pragma unroll
                for (int i = 0; i < kSums; i++) total[i] = fmaf(sums[i / 4][i % 4], scale[i / 2 % 2], total[i]);
            }
            release(ring.stage);
        }
        skip(problem.longest() - own);
    }

    // 32 columns of a tile from `column` on. `x` is the place of a row of x for this lane.
    __device__ __forceinline__ static void multiply_pair(
        float (&sums)[TOKENS / 8][4], const unsigned (&first)[4], const unsigned (&second)[4], unsigned x, int column) {
        const int lane = threadIdx.x % 32, chunk = (column % 64 / 8 + lane / 8) ^ lane % 8;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            unsigned b[4];
            load_matrices(b, x + column / 64 * kPlaneBytes + j * 1024 + chunk * 16);
            Tensor16<SCALAR>::mma(sums[j], first, b[0], b[1]);
            Tensor16<SCALAR>::mma(sums[j], second, b[2], b[3]);
        }
    }
#else
    // Multiplies this warpgroup's columns of a tile.
    __device__ __forceinline__ void multiply(float (&total)[kSums]) {
        constexpr int kChunks = kStep / kChunk;
        unsigned a[2][kFragments][4];
        float sums[kSums];
        const unsigned b = matrix_descriptor(shared.inputs(0, part), 16);
        const int own = problem.length(part), longest = problem.longest();
#pragma unroll
        for (int i = 0; i < kSums; i++) total[i] = 0.0f;
        if (own > 0) {
            barrier_wait(shared.full(ring.stage), ring.parity);
            load(a[0], tile_in(ring.stage), 0);
        }
        for (int step = 0; step < own; step++) {
            const int stage = ring.stage;
            const char* tile = tile_in(stage);
            const unsigned place = b + stage * (PARTS * kInputBytes >> 4);
            ring.advance();
#pragma unroll
            for (int chunk = 0; chunk < kChunks; chunk++) {
                const bool begins = chunk * kChunk % GROUP == 0, ends_group = (chunk + 1) * kChunk % GROUP == 0;
                float scale[2];
                if (ends_group) read_group_scales(scale, tile, chunk * kChunk / GROUP);
                wgmma_fence();
#pragma unroll
                for (int f = 0; f < kFragments; f++) {
                    const int column = chunk * kChunk + f * 16;
                    const unsigned x = place + column / 64 * (kPlaneBytes >> 4) + column % 64 / 8;
                    Product::multiply(sums, a[chunk % 2][f], x, !begins || f > 0);
                }
                wgmma_commit();
                if (!begins) wgmma_wait<1>();  // the chunk before has been multiplied: its registers are free
                if (chunk + 1 < kChunks) {
                    load(a[(chunk + 1) % 2], tile, chunk + 1);
                } else if (step + 1 < own) {
                    barrier_wait(shared.full(ring.stage), ring.parity);
                    load(a[0], tile_in(ring.stage), 0);
                }
                if (ends_group) {
                    wgmma_wait<0>();
                    Product::pin(sums);
#pragma unroll
                    for (int i = 0; i < kSums; i++) total[i] = fmaf(sums[i], scale[i / 2 % 2], total[i]);
                }
            }
            release(stage);
        }
        skip(longest - own);
    }
#endif

    // Passes stages that have nothing for this warpgroup.
    __device__ __forceinline__ void skip(int stages) {
        for (int i = 0; i < stages; i++, ring.advance()) {
            barrier_wait(shared.full(ring.stage), ring.parity);
            release(ring.stage);
        }
    }

    __device__ __forceinline__ void read_group_scales(float (&scale)[2], const char* tile, int group) const {
        const auto stored = load_scales(tile + places.scales, group);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scale[i] = to_float(stored[i]);
            asm volatile("" : "+f"(scale[i]));  // before the products are issued
        }
    }

    __device__ __forceinline__ void release(int stage) const {
        if (BY_WARPS) fence_async_proxy();  // waits for loads that nothing has used yet
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(shared.empty(stage));
#if SHARERS > 1
            barrier_arrive_at(shared.empty(stage), problem.rank + (1 - problem.sharer) * SPLIT);
#endif
        }
    }

    // Stores the sums of this warpgroup's rows in shared memory, [token][row].
    __device__ __forceinline__ void store_sums(const float (&total)[kSums]) const {
        float* sums = reinterpret_cast<float*>(shared.sums(owner));
        const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[(j * 8 + token + i % 2) * kPitch + row + i / 2 * 8] = total[4 * j + i];
        }
    }
};
