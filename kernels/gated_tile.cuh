// Tiles of a product of many rows of x with two halves of a matrix, by persistent blocks: what gated_product.cu and
// canonical_product.cu share. Only for sm_90a.
//
// A tile is CONSUMERS times 64 rows of x by COLUMNS rows of the matrix's first half, G, and the same COLUMNS of its second,
// U. G's rows are above U's in one matrix in shared memory, so that a thread has sums of both for the same columns. One
// thread copies pieces of 64 columns through a ring of stages; CONSUMERS warpgroups multiply 64 rows each. The copies of
// the next tile run while the last one's outputs are written. Warpgroup 0 is HEAD_START stages ahead, so that one
// warpgroup multiplies while another writes.
//
// A cluster has CLUSTER_ROWS by CLUSTER_COLUMNS adjacent tiles. Blocks that need the same rows of x, or the same
// weights, each copy a part for all of them. Rows of x beyond the end are copied as zeros.
//
// With SPLIT the columns of x have as many parts, which are multiplied as further tiles: all tiles of the first part, then
// all of the second.
//
// Macros: SCALAR; CONSUMERS, 2 or 3; COLUMNS, a multiple of 16 from 48 to 128, or 96 or 112 with three consumers; STAGES;
// CLUSTER_ROWS and CLUSTER_COLUMNS, 1 or 2; HEAD_START, below STAGES; SPLIT, 1 by default.
#pragma once

#ifndef SPLIT
#define SPLIT 1
#endif

#include "hopper_cluster.cuh"
#include "vector.cuh"
#include "wgmma.cuh"

using Scalar = SCALAR;
// With a third consumer the assembler accepts no instruction of more than 128 registers, so gate and up are multiplied
// separately.
constexpr int kProducts = CONSUMERS == 2 ? 1 : 2;
constexpr int kProductSums = COLUMNS / kProducts;
using Product = Wgmma<Scalar, kProductSums>;

constexpr int kRows = CONSUMERS * 64;
constexpr int kThreads = (CONSUMERS + 1) * 128;
constexpr int kInputBytes = kRows * 128;      // 64 columns of x
constexpr int kWeightBytes = COLUMNS * 128;  // of each half
constexpr int kStageBytes = kInputBytes + 2 * kWeightBytes;
constexpr int kRingBytes = STAGES * (kStageBytes + 16);
constexpr int kCluster = CLUSTER_ROWS * CLUSTER_COLUMNS;
constexpr int kPartRows = kRows / CLUSTER_COLUMNS;  // rows of x that a block copies
constexpr int kProducerRegisters = CONSUMERS == 2 ? 40 : 32, kConsumerRegisters = CONSUMERS == 2 ? 232 : 160;
constexpr int kHeadStartBarrier = 1;

// Shared memory: the ring, with x, gate and up in each stage; then a full and an empty barrier for each stage.
struct Shared {
    unsigned base;

    __device__ __forceinline__ unsigned inputs(int stage) const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned weights(int stage) const { return inputs(stage) + kInputBytes; }
    __device__ __forceinline__ unsigned full(int stage) const { return base + STAGES * kStageBytes + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
};

// A block's place in its cluster, which determines the parts that it copies and their target blocks.
struct Member {
    int row;
    int column;

    __device__ __forceinline__ static Member self() {
        const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
        return {rank / CLUSTER_COLUMNS, rank % CLUSTER_COLUMNS};
    }
    // Bit masks of the blocks that need the same rows of x, and of those that need the same weights.
    __device__ __forceinline__ unsigned same_inputs() const {
        return ((1u << CLUSTER_COLUMNS) - 1) << (row * CLUSTER_COLUMNS);
    }
    __device__ __forceinline__ unsigned same_weights() const {
        return (CLUSTER_ROWS == 1 ? 1u : 1u | 1u << CLUSTER_COLUMNS) << column;
    }
};

// Numbering of clusters' tiles: part by part, and in each column by column within `group` adjacent rows of tiles.
struct Tiles {
    int rows;
    int columns;
    int group;

    __device__ __forceinline__ int places() const { return rows * columns; }
    __device__ __forceinline__ int count() const { return SPLIT * places(); }
    __device__ __forceinline__ int first() const { return blockIdx.x / kCluster; }
    __device__ __forceinline__ int step() const { return gridDim.x / kCluster; }
};

// The pieces of 64 columns of x that a tile multiplies.
struct Part {
    int begin;
    int end;

    static __device__ __forceinline__ Part of(const Tiles& tiles, int tile, int steps) {
        if (SPLIT == 1) return {0, steps};
        const int part = tile / tiles.places();
        return {steps * part / SPLIT, steps * (part + 1) / SPLIT};
    }
};

// The first row of x and the first output of a block's tile.
struct Place {
    int row;
    int column;

    __device__ __forceinline__ Place(const Tiles& tiles, int tile, Member member) {
        if (SPLIT > 1) tile %= tiles.places();
        const int first = tile / (tiles.group * tiles.columns) * tiles.group;
        const int height = min(tiles.group, tiles.rows - first), index = tile - first * tiles.columns;
        row = ((first + index % height) * CLUSTER_ROWS + member.row) * kRows;
        column = (index / height * CLUSTER_COLUMNS + member.column) * COLUMNS;
    }
};

// Fills the ring for all of a block's tiles. Used by one thread.
struct Producer {
    Shared shared;
    const TensorMap* inputs;
    const TensorMap* weights;
    int num_columns;  // of G
    Member member;

    __device__ __forceinline__ void copy_inputs(int stage, const Place& place, int step) const {
        const unsigned target = shared.inputs(stage) + member.column * kPartRows * 128;
        const int row = place.row + member.column * kPartRows;
        if (CLUSTER_COLUMNS == 1) {
            copy_tensor(target, inputs, 0, row, step, shared.full(stage));
        } else {
            copy_tensor_to(member.same_inputs(), target, inputs, 0, row, step, shared.full(stage));
        }
    }

    __device__ __forceinline__ void copy_weights(int stage, const Place& place, int step) const {
        const unsigned gate = shared.weights(stage), full = shared.full(stage);
        if (CLUSTER_ROWS == 1) {
            copy_tensor(gate, weights, 0, place.column, step, full);
            copy_tensor(gate + kWeightBytes, weights, 0, num_columns + place.column, step, full);
        } else {  // one block copies the gate's rows, the other those of up
            copy_tensor_to(member.same_weights(), gate + member.row * kWeightBytes, weights, 0,
                           member.row * num_columns + place.column, step, full);
        }
    }

    __device__ __forceinline__ void produce(const Tiles& tiles, int steps) const {
        Ring<STAGES> ring(1);
        for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
            const Place place(tiles, tile, member);
            const Part part = Part::of(tiles, tile, steps);
            int step = part.begin;
            if (tile == tiles.first()) {  // the copies of weights need not wait for predecessors
                const int ahead = min(STAGES, part.end - part.begin);
                for (int i = 0; i < ahead; i++) {
                    barrier_expect(shared.full(i), kStageBytes);
                    copy_weights(i, place, part.begin + i);
                }
                wait_for_predecessors();
                for (int i = 0; i < ahead; i++, step++, ring.advance()) copy_inputs(i, place, step);
            }
            for (; step < part.end; step++, ring.advance()) {
                barrier_wait(shared.empty(ring.stage), ring.parity);
                barrier_expect(shared.full(ring.stage), kStageBytes);
                copy_inputs(ring.stage, place, step);
                copy_weights(ring.stage, place, step);
            }
        }
    }
};

// One of the multiplying warpgroups: rows index * 64 to index * 64 + 63 of each tile.
struct Multiplier {
    Shared shared;
    Member member;
    int index;
    bool leads;  // this thread arrives for the warpgroup
    unsigned input_matrix, weight_matrix;
    Ring<STAGES> ring;
    float sums[kProducts][kProductSums];  // of gate, then of up

    // Releases a stage to all blocks that copy into it.
    __device__ __forceinline__ void release(int stage) const {
        if (!leads) return;
        if (kCluster == 1) {
            barrier_arrive(shared.empty(stage));
            return;
        }
        const unsigned senders = member.same_inputs() | member.same_weights();
#pragma unroll
        for (int rank = 0; rank < kCluster; rank++) {
            if (senders >> rank & 1) barrier_arrive_at(shared.empty(stage), rank);
        }
    }

    // Computes the sums of a tile, or of a part of it, over `steps` pieces of columns.
    __device__ __forceinline__ void multiply(int steps, bool first_tile) {
        int last_stage = 0;
        for (int step = 0; step < steps; step++) {
            barrier_wait(shared.full(ring.stage), ring.parity);
            wgmma_fence();
            // Equal in all lanes; the shuffle shows that to the compiler, which then uses uniform registers.
            const unsigned place = __shfl_sync(kFullWarp, ring.stage * (kStageBytes >> 4), 0);
#pragma unroll
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (int i = 0; i < kProducts; i++) {
                    Product::multiply(sums[i], input_matrix + place + 2 * k,
                                      weight_matrix + place + 2 * k + i * (kWeightBytes >> 4), step > 0 || k > 0);
                }
            }
            wgmma_commit();
            if (step > 0) {
                wgmma_wait<1>();
                release(last_stage);
            }
            if (HEAD_START > 0 && first_tile && index == 0 && step + 1 == min(HEAD_START, steps)) {
                asm volatile("bar.arrive %0, %1;" ::"n"(kHeadStartBarrier), "n"(CONSUMERS * 128) : "memory");
            }
            last_stage = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        release(last_stage);
#pragma unroll
        for (int i = 0; i < kProducts; i++) Product::pin(sums[i]);
    }

    __device__ __forceinline__ void await_head_start() const {
        if (HEAD_START > 0 && index > 0) {
            asm volatile("bar.sync %0, %1;" ::"n"(kHeadStartBarrier), "n"(CONSUMERS * 128) : "memory");
        }
    }
    __device__ __forceinline__ float sum(int i) const { return sums[i / kProductSums][i % kProductSums]; }

    // The first of the thread's rows of a tile: lane / 4; the second is eight further.
    __device__ __forceinline__ int first_row(const Place& place) const {
        return place.row + index * 64 + (threadIdx.x & 127) / 32 * 16 + ((threadIdx.x & 31) >> 2);
    }
};

// Called by all threads first.
__device__ __forceinline__ void init_barriers(const Shared& shared) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), (CLUSTER_ROWS + CLUSTER_COLUMNS - 1) * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (kCluster > 1) cluster_sync();
    else __syncthreads();
}
