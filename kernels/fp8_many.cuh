// A block of fp8_many.cu: sizes, shared memory, its place in a cluster, and the scales of sums.
#pragma once

#if GATED
#include "activation.cuh"
#endif
#include "fp8_wgmma.cuh"
#include "hopper_cluster.cuh"
#include "vector.cuh"

using Scalar = __nv_bfloat16;

constexpr int kStep = 128;  // columns of x and W in a stage: 128 bytes
constexpr int kConsumers = 2;
constexpr int kRows = kConsumers * 64;
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kHalf = COLUMNS / 2;  // rows of W in a copy: gate or up, or half of a tile's
constexpr int kOutputs = GATED ? kHalf : COLUMNS;
constexpr int kSums = COLUMNS / 2;  // of a thread
constexpr int kInputBytes = kRows * kStep;
constexpr int kHalfBytes = kHalf * kStep;
constexpr int kStageBytes = kInputBytes + 2 * kHalfBytes;
constexpr int kCluster = CLUSTER_ROWS * SPLIT;
constexpr int kHeadStart = 2;  // steps; fewer than there are stages
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kHeadStartBarrier = 1;
static_assert(kCluster <= 2, "clusters of four leave multiprocessors without work");
static_assert(SPLIT == 1 || !GATED, "gate and up would be in different halves");
static_assert(SPLIT == 1 || COLUMNS % 32 == 0, "a thread exchanges four sums at a time");
static_assert(SPLIT == 1 || kSums / 2 * 4 * kConsumers * 128 <= STAGES * kStageBytes, "the ring holds what is exchanged");

// d [64, COLUMNS] (+)= a [64, 32] * b [COLUMNS, 32]^T
__device__ __forceinline__ void multiply_codes(float (&d)[kSums], unsigned a, unsigned b, int accumulate) {
#if COLUMNS == 112
    WGMMA_E4M3("m64n112k32", REGISTERS_WIDE_56, "%56", "%57", "%58", ACCUMULATORS_WIDE_56(d));
#elif COLUMNS == 128
    WGMMA_E4M3("m64n128k32", REGISTERS_WIDE_64, "%64", "%65", "%66", ACCUMULATORS_WIDE_64(d));
#else
#error "COLUMNS is 112 or 128"
#endif
}

// Keeps the compiler from moving uses of the sums above a wait.
__device__ __forceinline__ void pin_sums(float (&d)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; i++) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(2), "n"(kConsumers * 128) : "memory");
}

// The address of the same place in the shared memory of block `rank`.
__device__ __forceinline__ unsigned remote_address(unsigned address, unsigned rank) {
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    return address;
}

__device__ __forceinline__ float4 load_remote(unsigned address) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// Shared memory: the ring, with x and W in each stage; a full and an empty barrier for each stage; for each warpgroup
// the scales of a tile's rows of W.
struct Shared {
    unsigned base;

    __device__ __forceinline__ unsigned inputs(int stage) const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned weights(int stage) const { return inputs(stage) + kInputBytes; }
    __device__ __forceinline__ unsigned full(int stage) const { return base + STAGES * kStageBytes + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
    static constexpr int kScales = STAGES * (kStageBytes + 16);
};

// A block's place in its cluster.
struct Member {
    int part;
    int row;

    __device__ __forceinline__ static Member self() {
        const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
        return {rank / CLUSTER_ROWS, rank % CLUSTER_ROWS};
    }
};

// Numbering of clusters' tiles: column by column.
struct Tiles {
    int rows;
    int columns;

    __device__ __forceinline__ int count() const { return rows * columns; }
    __device__ __forceinline__ int first() const { return blockIdx.x / kCluster; }
    __device__ __forceinline__ int step() const { return gridDim.x / kCluster; }
};

struct Problem {
    const float* input_factors;  // [rows], only without GROUPED
    const float* input_scales;   // [all_steps, scales_pitch], only with GROUPED
    const float* weight_scales;  // [rows of W], or [ceil(rows of W / 128), all_steps] with GROUPED
    Scalar* out;                 // [rows, outputs]
    int rows;
    int outputs;
    int out_stride;  // elements between rows of `out`, even
    int scales_pitch;
    int all_steps;
    int begin;  // of this block's steps
    int steps;

    // The scale of a row of W; of those beyond, which are never written, any.
    __device__ __forceinline__ float row_scale(int row) const {
        return GROUPED ? 1.0f : __ldg(weight_scales + min(row, (GATED ? 2 : 1) * outputs - 1));
    }
};

// The first row of x and the first output of a block's tile.
struct Place {
    int row;
    int column;
    int steps;
    int turn;  // the step with which the tile begins: all would ask L2 for the same columns of x at once
    static constexpr bool kTurns = !(GROUPED && SPLIT == 2);  // there it would spill registers

    __device__ __forceinline__ Place(const Tiles& tiles, int tile, Member member, int steps) : steps(steps) {
        row = (tile % tiles.rows * CLUSTER_ROWS + member.row) * kRows;
        column = tile / tiles.rows * kOutputs;
        turn = kTurns ? tile / tiles.rows % steps : 0;
    }
    __device__ __forceinline__ int step(int index) const {
        if (!kTurns) return index;
        const int turned = turn + index;
        return turned < steps ? turned : turned - steps;
    }
    // The first row of W of one of the tile's halves.
    __device__ __forceinline__ int half(const Problem& problem, int index) const {
        return column + index * (GATED ? problem.outputs : kHalf);
    }
};

// A thread's rows of x, `row` and row + 8, with what their sums are multiplied by beside the scales of groups.
struct RowScales {
    int row;
    float factors[2];

    __device__ __forceinline__ RowScales(const Problem& problem, int row) : row(row) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            factors[half] = GROUPED ? 1.0f : __ldcg(problem.input_factors + min(row + half * 8, problem.rows - 1));
        }
    }
};

// The scales of a tile's rows of W: loaded before its products, and kept in shared memory after them.
struct TileScales {
    float* table;  // [COLUMNS], of this warpgroup
    float mine[2];

    __device__ __forceinline__ void load(const Problem& problem, const Place& place) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = i * 128 + (threadIdx.x & 127), half = row >= kHalf;
            if (row < COLUMNS) mine[i] = problem.row_scale(place.half(problem, half) + row - half * kHalf);
        }
    }
    // Called by the warpgroup: waits until all have read the last tile's, and until all of this tile's are there.
    __device__ __forceinline__ void keep() const {
        warpgroup_sync();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = i * 128 + (threadIdx.x & 127);
            if (row < COLUMNS) table[row] = mine[i];
        }
        warpgroup_sync();
    }
    // Those of two adjacent rows.
    __device__ __forceinline__ float2 two(int row) const { return *reinterpret_cast<const float2*>(table + row); }

private:
    __device__ __forceinline__ static void warpgroup_sync() {
        asm volatile("bar.sync %0, %1;" ::"r"(3 + static_cast<int>(threadIdx.x >> 7)), "n"(128) : "memory");
    }
};

// The blocks of 128 rows of W that a tile's halves are in; a half is in one or two of them.
struct Halves {
#if GROUPED
    const float* scales[2][2];
    int boundary[2];  // rows of the half in the first block

    __device__ __forceinline__ Halves(const Problem& problem, const Place& place) {
        const int last = ((GATED ? 2 : 1) * problem.outputs - 1) / 128;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = place.half(problem, i), block = min(row / 128, last);
            boundary[i] = 128 - row % 128;
            scales[i][0] = problem.weight_scales + block * static_cast<long long>(problem.all_steps) + problem.begin;
            scales[i][1] =
                problem.weight_scales + min(block + 1, last) * static_cast<long long>(problem.all_steps) + problem.begin;
        }
    }
#else
    __device__ __forceinline__ Halves(const Problem&, const Place&) {}
#endif
};

// The scales of groups of a step: of this thread's rows of x and of the tile's blocks of W.
struct StepScales {
#if GROUPED
    float inputs[2];
    float weights[2][2];

    __device__ __forceinline__ void load(const Problem& problem, const RowScales& rows, const Halves& halves, int step) {
        const float* source = problem.input_scales + (problem.begin + step) * static_cast<long long>(problem.scales_pitch);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            inputs[i] = __ldcg(source + min(rows.row + i * 8, problem.rows - 1));
#pragma unroll
            for (int j = 0; j < 2; j++) weights[i][j] = __ldg(halves.scales[i][j] + step);
        }
    }
#else
    __device__ __forceinline__ void load(const Problem&, const RowScales&, const Halves&, int) {}
#endif
};

// Adds a step's sums.
__device__ __forceinline__ void promote(
    float (&totals)[kSums], const float (&part)[kSums], const StepScales& scales, const Halves& halves) {
#if GROUPED
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float products[2][2];  // by block of W, then by row of x
#pragma unroll
        for (int i = 0; i < 4; i++) products[i / 2][i % 2] = scales.inputs[i % 2] * scales.weights[half][i / 2];
#pragma unroll
        for (int block = 0; block < kHalf / 8; block++) {
            const bool second = block * 8 >= halves.boundary[half];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int place = half * (kSums / 2) + 4 * block + i;
                totals[place] = fmaf(part[place], second ? products[1][i / 2] : products[0][i / 2], totals[place]);
            }
        }
    }
#else
#pragma unroll
    for (int i = 0; i < kSums; i++) totals[i] += part[i];
#endif
}
