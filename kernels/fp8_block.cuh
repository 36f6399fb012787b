// A block of fp8_product.cu: sizes, products of a warpgroup, shared memory, and the kernel's arguments.
#pragma once

#include "fp8_rounding.cuh"
#include "fp8_wgmma.cuh"
#include "hopper_cluster.cuh"

using Scalar = __nv_bfloat16;

constexpr int kColumns = 128;  // of W in a step: 128 bytes
constexpr int kRows = 64 * GROUPS;
constexpr int kConsumers = 128 * GROUPS;
constexpr int kWarps = kConsumers / 32;
constexpr int kThreads = kConsumers + 64;  // with a warp that copies and one that reads the rows' factors
constexpr int kWeightBytes = kRows * kColumns;
constexpr int kInputBytes = TOKENS * kColumns;
constexpr int kStageBytes = kWeightBytes + (RESIDENT ? 0 : kInputBytes);
constexpr int kAccumulators = TOKENS / 2;
constexpr int kPitch = kRows + 4;  // of a token's sums, such that lanes of a warp write to different banks
constexpr bool kGated = EPILOGUE == EPILOGUE_GATED;
constexpr int kOutputs = kGated ? kRows / 2 : kRows;  // per token
constexpr int kQuads = kOutputs / 4;
constexpr int kSlice = TOKENS / SPLIT;  // tokens that a block of a cluster writes
constexpr int kSquaresPitch = 128;
constexpr int kSegment = 512;  // columns of a row that a warp rounds at once
constexpr int kBatch = 8;      // segments in flight per warp
static_assert(!RESIDENT || SPLIT == 1, "a block that rounds x sees whole rows");
static_assert(SPLIT <= TOKENS && TOKENS % SPLIT == 0, "each block of a cluster writes some tokens");

// d [64, TOKENS] (+)= a [64, 32] * b [TOKENS, 32]^T
__device__ __forceinline__ void multiply(float (&d)[kAccumulators], unsigned a, unsigned b, int accumulate) {
#if TOKENS == 8
    WGMMA_E4M3("m64n8k32", REGISTERS_WIDE_4, "%4", "%5", "%6", ACCUMULATORS_WIDE_4(d));
#elif TOKENS == 16
    WGMMA_E4M3("m64n16k32", REGISTERS_WIDE_8, "%8", "%9", "%10", ACCUMULATORS_WIDE_8(d));
#elif TOKENS == 32
    WGMMA_E4M3("m64n32k32", REGISTERS_WIDE_16, "%16", "%17", "%18", ACCUMULATORS_WIDE_16(d));
#elif TOKENS == 64
    WGMMA_E4M3("m64n64k32", REGISTERS_WIDE_32, "%32", "%33", "%34", ACCUMULATORS_WIDE_32(d));
#elif TOKENS == 128
    WGMMA_E4M3("m64n128k32", REGISTERS_WIDE_64, "%64", "%65", "%66", ACCUMULATORS_WIDE_64(d));
#else
#error "TOKENS is 8, 16, 32, 64 or 128"
#endif
}

__device__ __forceinline__ void pin_all(float (&d)[kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kAccumulators; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Loads four floats from the shared memory of block `rank` of this cluster.
__device__ __forceinline__ float4 load_shared(unsigned address, int rank) {
    float4 value;
#if SPLIT > 1
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
#else
    const uint4 words = load_shared(address);
    value = make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                        __uint_as_float(words.w));
#endif
    return value;
}

// Shared memory: the ring; resident inputs [STEPS][TOKENS][128] e4m3; sums [TOKENS][kPitch]; of tokens, largest
// magnitudes, scales, 1 / scale and factors; scales of groups [STEPS][TOKENS]; two barriers for each stage.
struct Shared {
    unsigned base;

    static constexpr int kInputs = STAGES * kStageBytes;
    static constexpr int kSums = kInputs + (RESIDENT ? STEPS * kInputBytes : 0);
    static constexpr int kLargest = kSums + TOKENS * kPitch * 4;
    static constexpr int kScales = kLargest + TOKENS * 4;
    static constexpr int kInverses = kScales + TOKENS * 4;
    static constexpr int kFactors = kInverses + TOKENS * 4;
    static constexpr int kGroups = kFactors + TOKENS * 4;
    static constexpr int kBarriers = kGroups + (GROUPED ? STEPS * TOKENS * 4 : 0);

    __device__ __forceinline__ unsigned weights(int stage) const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned inputs(int place) const {  // of a stage, or of a step if RESIDENT
        return RESIDENT ? base + kInputs + place * kInputBytes : weights(place) + kWeightBytes;
    }
    __device__ __forceinline__ unsigned full(int stage) const { return base + kBarriers + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
};

struct Problem {
    int width;    // columns of W
    int tiles;    // of kRows rows of W
    int outputs;  // columns of `out`
    int tokens;   // rows of `out`
    int begin;    // columns of W that this block multiplies, in steps
    int steps;
};

struct Inputs {
    const Scalar* rows;      // [tokens, width], if RESIDENT
    const float* factors;    // [tokens], else
    const float* scales;     // [steps of W, kSquaresPitch]: scales of groups, else
    const float* squares;    // [num_squares, kSquaresPitch]: sums of squares of x's rows, or null if x has no factor
    int num_squares;
    float inverse_width;     // 1 / (number of elements of a row of x)
    float eps;
    float bound;             // see fp8_rows.cu
};

struct Ends {
    const float* weight_scales;  // [rows of W], or [rows / 128, columns / 128] if GROUPED
    OUT* out;                    // [tokens, outputs]
    int out_stride;              // elements between its rows
    Scalar* residual;            // [tokens, outputs]
    const Scalar* norm_weight;   // [outputs]
    float* new_squares;          // [outputs / 64, kSquaresPitch]
    const Scalar* bias;          // [rows of W], if BIAS
};

// The consumers' tables in shared memory.
struct Tables {
    unsigned* largest;  // [TOKENS] bits of bf16
    float* scales;      // [TOKENS]
    float* inverses;    // [TOKENS]
    float* factors;     // [TOKENS]
    float* groups;      // [STEPS][TOKENS]
};

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(1), "n"(kConsumers) : "memory");
}

// Waits for the factors of tokens.
__device__ __forceinline__ void factors_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(2), "n"(kConsumers + 32) : "memory");
}
