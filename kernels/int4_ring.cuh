// The ring of stages through which a product with a 4-bit matrix copies x and the tiles of W, and what it multiplies.
//
// Macros: those of kernels/int4_product.cu.
#pragma once

#include "int4_tile.cuh"
#include "product_ends.cuh"
#include "hopper.cuh"

#define CLUSTER (SPLIT * SHARERS)
#if CLUSTER > 1
#include "hopper_cluster.cuh"
#endif

constexpr int kWarpgroups = ROW_GROUPS * PARTS;
constexpr int kConsumers = kWarpgroups * 128;
constexpr int kThreads = kConsumers + 64;  // with a warp that copies and one that reads the scales of x's rows
constexpr int kTeam = PARTS * 128;         // the threads of a tile
constexpr int kPlaneBytes = TOKENS * 128;  // of 64 columns of x
constexpr int kInputBytes = 2 * kPlaneBytes;
constexpr int kHalfTile = kTileBytes / 2;  // the unit of gates
constexpr int kTurnedTiles = 8;            // adjacent tiles whose columns are added in the same order
static_assert(kTurnedTiles % (SHARERS * ROW_GROUPS) == 0, "which depends on the matrix alone");
static_assert(STAGES >= 2, "a warpgroup waits for the next stage before it releases its own");

// Shared memory: the rings of x and of weights, sums [ROW_GROUPS][PARTS][TOKENS][kPitch], scales [TOKENS], a full and an
// empty barrier for each stage.
struct Shared {
    char* bytes;
    unsigned base;

    static constexpr int kWeights = STAGES * PARTS * kInputBytes;
    static constexpr int kSumsPlace = kWeights + STAGES * kWarpgroups * kTileBytes;
    static constexpr int kScalesPlace = kSumsPlace + kWarpgroups * kSumBytes;
    static constexpr int kBarriers = kScalesPlace + TOKENS * 4;

    __device__ __forceinline__ explicit Shared(char* bytes) : bytes(bytes), base(shared_address(bytes)) {}
    __device__ __forceinline__ unsigned inputs(int stage, int part) const {
        return base + (stage * PARTS + part) * kInputBytes;
    }
    // Place of the tile of warpgroup `owner`.
    __device__ __forceinline__ int weights(int stage, int owner) const {
        return kWeights + (stage * kWarpgroups + owner) * kTileBytes;
    }
    __device__ __forceinline__ char* sums(int owner) const { return bytes + kSumsPlace + owner * kSumBytes; }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bytes + kScalesPlace); }
    __device__ __forceinline__ unsigned full(int stage) const { return base + kBarriers + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
};

struct Problem {
    int steps;  // of kStep columns of W
    int tiles;  // of kOutputs outputs
    int up;     // where gated, the half tile of W with the first row of up
    int rank;   // of this block among those that split its columns
    int sharer;  // of this block among those that share x

    __device__ __forceinline__ int begin(int part) const { return steps * (rank * PARTS + part) / (SPLIT * PARTS); }
    __device__ __forceinline__ int length(int part) const { return begin(part + 1) - begin(part); }
    // The first tiles of a cluster; this block has those from `own` on.
    __device__ __forceinline__ int first() const { return blockIdx.x / CLUSTER * (SHARERS * ROW_GROUPS); }
    __device__ __forceinline__ int stride() const { return gridDim.x / CLUSTER * (SHARERS * ROW_GROUPS); }
    __device__ __forceinline__ int own(int clusters_first) const { return clusters_first + sharer * ROW_GROUPS; }
    // Stages of a tile, of which a part may leave the last one unused.
    __device__ __forceinline__ int longest() const {
        int most = 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++) most = max(most, length(part));
        return most;
    }
};

// One thread, which fills the ring.
struct Producer {
    Shared shared;
    const char* matrix;
    const TensorMap* inputs;
    Problem problem;

    // The first stages get their weights before the wait for predecessors.
    __device__ __forceinline__ void produce() const {
        const int longest = problem.longest(), ahead = min(STAGES, longest);
        for (int i = 0; i < ahead; i++) copy_weights(problem.own(problem.first()), i, i);
        wait_for_predecessors();
        for (int i = 0; i < ahead; i++) copy_inputs(problem.first(), i, i);
        Ring<STAGES> ring(1);
        for (int i = 0; i < ahead; i++) ring.advance();
        int done = ahead;
        for (int tile = problem.first(); tile < problem.tiles; tile += problem.stride(), done = 0) {
            for (int i = done; i < longest; i++, ring.advance()) {
                barrier_wait(shared.empty(ring.stage), ring.parity);
                copy_weights(problem.own(tile), i, ring.stage);
                copy_inputs(tile, i, ring.stage);
            }
        }
    }

    // By another thread: brings the stages behind the first ones into L2.
    __device__ __forceinline__ void prefetch() const {
        const int longest = problem.longest();
        int left = PREFETCHED, done = min(STAGES, longest);
        for (int tile = problem.first(); tile < problem.tiles && left > 0; tile += problem.stride(), done = 0) {
            for (int i = done; i < longest && left > 0; i++, left--) {
                for_tiles(problem.own(tile), i, [&](int row_tile, int step, int) {
                    if (kGated) {
                        prefetch_bytes(half(row_tile, step), kHalfTile);
                        prefetch_bytes(half(problem.up + row_tile, step), kHalfTile);
                    } else {
                        prefetch_bytes(half(2 * row_tile, step), kTileBytes);
                    }
                });
            }
        }
    }

private:
    // Which of a part's steps is number `index`: blocks with other tiles begin elsewhere, for all would ask L2 for the
    // same columns of x at once. Those that share x have tiles of one group.
    __device__ __forceinline__ int turned(int tile, int part, int index) const {
        const int length = problem.length(part), step = index + tile / kTurnedTiles % length;
        return problem.begin(part) + (step < length ? step : step - length);
    }

    // Calls `act` with tile, step and warpgroup for each tile of W that a stage has.
    template <typename Act>
    __device__ __forceinline__ void for_tiles(int first, int stage_step, Act act) const {
        const int present = max(0, min(ROW_GROUPS, problem.tiles - first));
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (stage_step >= problem.length(part)) continue;
            for (int row_group = 0; row_group < present; row_group++) {
                act(first + row_group, turned(first, part, stage_step), row_group * PARTS + part);
            }
        }
    }

    __device__ __forceinline__ void copy_weights(int first, int step, int stage) const {
        const int present = max(0, min(ROW_GROUPS, problem.tiles - first));
        int parts = 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++) parts += step < problem.length(part);
        barrier_expect(shared.full(stage), parts * (present * kTileBytes + kInputBytes));
        for_tiles(first, step, [&](int tile, int place, int owner) {
            copy_tile(tile, place, shared.base + shared.weights(stage, owner), shared.full(stage));
        });
    }
    __device__ __forceinline__ void copy_tile(int tile, int step, unsigned target, unsigned full) const {
        if (kGated) {
            copy_bytes(target, half(tile, step), kHalfTile, full);
            copy_bytes(target + kHalfTile, half(problem.up + tile, step), kHalfTile, full);
        } else {
            copy_bytes(target, half(2 * tile, step), kTileBytes, full);
        }
    }
    __device__ __forceinline__ const char* half(int index, int step) const {
        const long long tile = static_cast<long long>(index / 2) * problem.steps + step;
        return matrix + tile * kTileBytes + index % 2 * kHalfTile;
    }
    __device__ __forceinline__ void copy_inputs(int tile, int step, int stage) const {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (step >= problem.length(part)) continue;
            const int plane = 2 * turned(tile, part, step);
#if SHARERS > 1
            // One plane for both blocks, each of which copies the other.
            const unsigned ranks = (1u << problem.rank) | (1u << (problem.rank + SPLIT));
            copy_tensor_to(ranks, shared.inputs(stage, part) + problem.sharer * kPlaneBytes, inputs, 0, 0,
                           plane + problem.sharer, shared.full(stage));
#else
            copy_tensor(shared.inputs(stage, part), inputs, 0, 0, plane, shared.full(stage));
#endif
        }
    }
};
