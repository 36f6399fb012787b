// Products of a few rows with a matrix of 4-bit numbers, out = x W^T, for Hopper (sm_90a): each byte of the weights is
// read once, with the operations before and after the product fused.
//
// W's rows are the product's 64-row operand and x's rows, up to TOKENS, its columns (out^T = W x^T). A warpgroup turns
// its codes into whole numbers, code - zero, exact in 16 bits, in the registers of the product's A operand. The sums of
// a group of columns are multiplied by its scales in float32 when they are added to the total: weights are not rounded.
//
// The columns of a tile of 64 rows are divided into S = SPLIT * PARTS parts, the same for any number of tokens: PARTS
// warpgroups of each of the SPLIT blocks of a cluster. Each part's sums are added ascending, and the parts in order: the
// bits of a row's result depend on the matrix alone, not on the rows beside it. A block has ROW_GROUPS tiles at a time,
// which share x; SHARERS blocks with the same columns copy x for each other. One thread copies pieces of 128 columns through a ring of stages.
//
// The kernel is launched while its predecessor runs (programmatic dependent launch). Weights do not depend on the
// predecessor, so the ring is filled with them at once: only x waits.
//
// Macros: those of int4_tile.cuh and product_ends.cuh; TOKENS, 8, 16, 32, 64 or 128; ROW_GROUPS; PARTS; SPLIT, 1, 2, 4
// or 8; SHARERS, 1 or 2; STAGES; BLOCKS of a multiprocessor; PREFETCHED, stages behind those of the ring that are brought into L2 at once.

#include "int4_codes.cuh"
#include "int4_tile.cuh"
#include "product_ends.cuh"
#include "wgmma.cuh"

#define CLUSTER (SPLIT * SHARERS)
#if CLUSTER > 1
#include "hopper_cluster.cuh"
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kWarpgroups = ROW_GROUPS * PARTS;
constexpr int kConsumers = kWarpgroups * 128;
constexpr int kThreads = kConsumers + 64;  // with a warp that copies and one that reads the scales of x's rows
constexpr int kTeam = PARTS * 128;         // the threads of a tile
constexpr int kPlaneBytes = TOKENS * 128;  // of 64 columns of x
constexpr int kInputBytes = 2 * kPlaneBytes;
constexpr int kSums = TOKENS / 2;
constexpr bool kFewRegisters = TOKENS >= 64 || kWarpgroups * BLOCKS >= 8;
constexpr int kChunk = GROUP < 64 || kFewRegisters ? 32 : 64;  // columns whose numbers are in registers at a time
constexpr int kChunks = kStep / kChunk;
constexpr int kFragments = kChunk / 16;
using Product = Wgmma<SCALAR, kSums>;
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
        for (int i = 0; i < ahead; i++) copy_inputs(i, i);
        Ring<STAGES> ring(1);
        for (int i = 0; i < ahead; i++) ring.advance();
        int done = ahead;
        for (int tile = problem.first(); tile < problem.tiles; tile += problem.stride(), done = 0) {
            for (int i = done; i < longest; i++, ring.advance()) {
                barrier_wait(shared.empty(ring.stage), ring.parity);
                copy_weights(problem.own(tile), i, ring.stage);
                copy_inputs(i, ring.stage);
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
                        prefetch_bytes(half(row_tile, step), kHalfBytes);
                        prefetch_bytes(half(problem.up + row_tile, step), kHalfBytes);
                    } else {
                        prefetch_bytes(half(2 * row_tile, step), kTileBytes);
                    }
                });
            }
        }
    }

private:
    // Calls `act` with tile, step and warpgroup for each tile of W that a stage has.
    template <typename Act>
    __device__ __forceinline__ void for_tiles(int first, int stage_step, Act act) const {
        const int present = max(0, min(ROW_GROUPS, problem.tiles - first));
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (stage_step >= problem.length(part)) continue;
            for (int row_group = 0; row_group < present; row_group++) {
                act(first + row_group, problem.begin(part) + stage_step, row_group * PARTS + part);
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
            copy_bytes(target, half(tile, step), kHalfBytes, full);
            copy_bytes(target + kHalfBytes, half(problem.up + tile, step), kHalfBytes, full);
        } else {
            copy_bytes(target, half(2 * tile, step), kTileBytes, full);
        }
    }
    __device__ __forceinline__ const char* half(int index, int step) const {
        const long long tile = static_cast<long long>(index / 2) * problem.steps + step;
        return matrix + tile * kTileBytes + index % 2 * kHalfBytes;
    }
    __device__ __forceinline__ void copy_inputs(int step, int stage) const {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (step >= problem.length(part)) continue;
            const int plane = 2 * (problem.begin(part) + step);
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

    // Multiplies this warpgroup's columns of a tile.
    __device__ __forceinline__ void multiply(float (&total)[kSums]) {
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
        for (int step = own; step < longest; step++, ring.advance()) {
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

// matrix: tiles of W; inputs: planes of 64 columns of x in boxes of TOKENS rows, of which the first `tokens` are used, and
// of two planes, or of one with two sharers. With SPLIT > 1 the grid has a cluster for every ROW_GROUPS * SHARERS tiles.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, BLOCKS) int4_product(
    const __grid_constant__ TensorMap inputs, const char* matrix, const float* squares, int num_squares,
    float inverse_width, float eps, OUT* out, const SCALAR* bias, SCALAR* residual,
    const SCALAR* norm_weight, float* new_squares, int steps, int tiles, int outputs, int pitch, int tokens) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared(shared_bytes);
    if (threadIdx.x == kConsumers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), SHARERS * kConsumers / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#if SHARERS > 1
    cluster_sync();  // others may copy into this block, and arrive at its barriers
#else
    __syncthreads();
#endif
    release_successors();
    int sharer = 0;
#if SHARERS > 1
    sharer = cluster_rank() / SPLIT;
#endif
    const Problem problem{steps, tiles, outputs / kHalfRows, split_rank(), sharer};
    const Ends ends{squares,     num_squares, inverse_width, eps,   out,   bias,
                    residual, norm_weight, new_squares,   outputs, pitch, tokens};
    const Producer producer{shared, matrix, &inputs, problem};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp < kConsumers / 32) {
        wait_for_predecessors();  // the residual stream is read at the end
        Consumer{shared, problem, ends, Ring<STAGES>(0), warp / 4}.consume();
    } else if (warp == kConsumers / 32) {
        if (threadIdx.x % 32 == 0) producer.produce();
        __syncwarp();
#if SPLIT > 1
        cluster_sync();
#endif
    } else {
        if (PREFETCHED > 0 && threadIdx.x % 32 == 0) producer.prefetch();
        __syncwarp();
        read_scales(shared.scales(), ends);
        __syncwarp();
#if SPLIT > 1
        cluster_sync();
#else
        asm volatile("bar.arrive %0, %1;" ::"r"(1), "r"(kConsumers + 32) : "memory");
#endif
    }
#if CLUSTER > 1
    cluster_sync();  // others may still read this block's sums, copy into it or arrive at its barriers
#endif
}

#endif
