// What follows a product of few rows, out^T = W x^T, whose sums over parts of W's columns are in shared memory: adding
// up the parts in a fixed order, bias, activation, residual stream.
//
// RMSNorm is split between the products around it, as kernels/skinny_product.cu says.
//
// Macros: SCALAR, type of the residual stream, of biases and of norm weights; TOKENS; SPLIT, adjacent blocks of a cluster,
// each with PARTS parts; OUT, type of `out`; EPILOGUE, one of those below; ACTIVATION, for EPILOGUE_GATED; TILE_ROWS, rows
// of W of a tile, a multiple of 16, 64 if it is not defined; SLICE, tokens that a block ends at once, its part of all if it
// is not defined; PARTS_IN_MEMORY, 1: the sums of adjacent blocks that split columns are in memory, one after another, and
// PARTS is 1.
#pragma once

#include "activation.cuh"
#include "residual_quad.cuh"
#include "vector.cuh"
#ifndef PARTS_IN_MEMORY
#define PARTS_IN_MEMORY 0
#endif
#define IN_CLUSTER (SPLIT > 1 && !PARTS_IN_MEMORY)
#if IN_CLUSTER
#include "hopper_cluster.cuh"
#endif

#ifndef TILE_ROWS
#define TILE_ROWS 64
#endif
#ifndef SLICE
#define SLICE ((TOKENS + SPLIT - 1) / SPLIT)
#endif
#define EPILOGUE_STORE 0     // out = scale * product + bias
#define EPILOGUE_GATED 1     // out = activation(gate) * up of scale * product + bias; W: the rows of gate, then of up
#define EPILOGUE_RESIDUAL 2  // residual += product + bias; out = residual * norm_weight; squares of the residual

constexpr bool kGated = EPILOGUE == EPILOGUE_GATED;
constexpr int kPitch = TILE_ROWS + 4;  // of a token's sums, such that lanes of a warp write to different banks
constexpr int kSumBytes = TOKENS * kPitch * 4;  // of a part
constexpr int kOutputs = kGated ? TILE_ROWS / 2 : TILE_ROWS;  // of a tile, per token
constexpr int kQuads = kOutputs / 4;
constexpr int kSquareLanes = kQuads % 32 == 0 ? 32 : kQuads % 16 == 0 ? 16 : 8;  // of a warp, which add up squares
static_assert(EPILOGUE != EPILOGUE_RESIDUAL || kQuads % kSquareLanes == 0, "lanes of a warp add up squares");
constexpr int kSlice = SLICE;  // most tokens that a block writes at once
constexpr int kSquaresPitch = 128;
// Rank of this block among those that split its columns.
#if IN_CLUSTER
__device__ __forceinline__ int split_rank() { return cluster_rank() % SPLIT; }
#else
__device__ __forceinline__ int split_rank() { return static_cast<int>(blockIdx.x) % SPLIT; }
#endif
static_assert(PARTS_IN_MEMORY || TOKENS % SPLIT == 0, "each block of a cluster writes some tokens");

struct Ends {
    const float* squares;  // [num_squares, kSquaresPitch]: sums of squares of x's rows, or null if x has no scale
    int num_squares;
    float inverse_width;  // 1 / (number of elements of a row of x)
    float eps;
    OUT* out;                          // [tokens, outputs], its rows apart by `pitch`
    const SCALAR* bias;         // [rows of W], or null
    SCALAR* residual;           // [tokens, outputs]
    const SCALAR* norm_weight;  // [outputs]
    float* new_squares;                // [parts of 4 * kSquareLanes outputs, kSquaresPitch]
    int outputs;                       // columns of `out`
    int pitch;                         // elements between rows of `out`
    int tokens;                        // rows of `out`, at most TOKENS
};

template <int Count>
__device__ __forceinline__ Vector<float, Count> load_past_l1(const float* address) {
    if constexpr (Count == 4) {
        const float4 loaded = __ldcg(reinterpret_cast<const float4*>(address));
        return {{loaded.x, loaded.y, loaded.z, loaded.w}};
    } else if constexpr (Count == 2) {
        const float2 loaded = __ldcg(reinterpret_cast<const float2*>(address));
        return {{loaded.x, loaded.y}};
    } else {
        return {{__ldcg(address)}};
    }
}

// Called by one warp: computes 1 / rms of each token, which chains of loads keep short. With few tokens, several lanes share
// a token; with many, a lane has adjacent ones. More than kSquaresPitch tokens have no squares.
__device__ __forceinline__ void read_scales(float* scales, const Ends& ends) {
    constexpr int kLanes = TOKENS < 32 ? 32 / TOKENS : 1, kEach = TOKENS < 64 ? 1 : TOKENS < 128 ? 2 : 4;
    constexpr int kInFlight = kEach == 1 ? 16 : 64 / kEach;
    const int lane = threadIdx.x % 32;
    wait_for_predecessors();
    for (int token = lane / kLanes * kEach; token < TOKENS; token += 32 / kLanes * kEach) {
        float sums[kEach] = {};
#pragma unroll kInFlight
        for (int i = lane % kLanes; i < ends.num_squares; i += kLanes) {
            const auto squares = load_past_l1<kEach>(ends.squares + i * kSquaresPitch + token);
#pragma unroll
            for (int j = 0; j < kEach; j++) sums[j] += squares[j];
        }
#pragma unroll
        for (int j = 0; j < kEach; j++) {
            const float sum = lane_sum(sums[j], kLanes);
            scales[token + j] = ends.squares ? rsqrtf(sum * ends.inverse_width + ends.eps) : 1.0f;
        }
    }
}

// The sums of a tile, [PARTS][TOKENS][kPitch] at the same address in each block of the cluster, or [SPLIT][TOKENS][kPitch]
// in memory.
struct TileSums {
    char* sums;

    // Four adjacent sums of a token over all parts.
    __device__ __forceinline__ Vector<float, 4> add_up(int token, int row) const {
        Vector<float, 4> parts[SPLIT * PARTS];
#pragma unroll
        for (int part = 0; part < SPLIT * PARTS; part++) {
            parts[part] = load(part / PARTS, sums + part % PARTS * kSumBytes + (token * kPitch + row) * 4);
        }
        Vector<float, 4> total = parts[0];
#pragma unroll
        for (int part = 1; part < SPLIT * PARTS; part++) {
#pragma unroll
            for (int j = 0; j < 4; j++) total[j] += parts[part][j];
        }
        return total;
    }

private:
    static __device__ __forceinline__ Vector<float, 4> load(int rank, const char* place) {
#if PARTS_IN_MEMORY && SPLIT > 1
        return load_past_l1<4>(reinterpret_cast<const float*>(place + rank * kSumBytes));
#elif SPLIT > 1
        unsigned address = shared_address(place);
        Vector<float, 4> value;
        rank += cluster_rank() - split_rank();
        asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                     : "r"(address)
                     : "memory");
        return value;
#else
        return load_vector<float, 4>(reinterpret_cast<const float*>(place));
#endif
    }
};

__device__ __forceinline__ void scale_and_add(
    Vector<float, 4>& values, float scale, const SCALAR* bias, long long column) {
#pragma unroll
    for (int j = 0; j < 4; j++) values[j] *= scale;
    if (bias == nullptr) return;
    const auto added = load_vector<SCALAR, 4>(bias + column);
#pragma unroll
    for (int j = 0; j < 4; j++) values[j] += to_float(added[j]);
}

// The place of four adjacent outputs of a tile, and their sums.
struct Quad {
    int token, row;
    long long column;
    bool present;
    Vector<float, 4> values, up;

    // Quad `index` of those of this block's tokens.
    __device__ __forceinline__ void load(const TileSums& sums, const Ends& ends, int tile, int index) {
        token = split_rank() * kSlice + index / kQuads, row = index % kQuads * 4;
        column = static_cast<long long>(tile) * kOutputs + row;
        present = index < kSlice * kQuads && token < ends.tokens && column < ends.outputs;
        const int loaded = min(token, SPLIT * kSlice < TOKENS ? kSlice - 1 : TOKENS - 1);  // without a branch, so that loads of several quads are in flight
        values = sums.add_up(loaded, row);
        if (kGated) up = sums.add_up(loaded, row + kOutputs);
    }

    // Applies the epilogue; returns the sum of the new residual's squares.
    __device__ __forceinline__ float end(const Ends& ends, float scale) {
        scale_and_add(values, scale, ends.bias, column);
        Vector<OUT, 4> result;
        float squares = 0.0f;
#if EPILOGUE == EPILOGUE_GATED
        scale_and_add(up, scale, ends.bias, ends.outputs + column);
#pragma unroll
        for (int j = 0; j < 4; j++) values[j] = ACTIVATION(values[j]) * up[j];
#elif EPILOGUE == EPILOGUE_RESIDUAL
        const long long place = token * static_cast<long long>(ends.outputs) + column;
        squares = add_to_residual(values, ends.residual + place, ends.norm_weight + column);
#endif
#pragma unroll
        for (int j = 0; j < 4; j++) result[j] = from_float<OUT>(values[j]);
        store_vector(ends.out + token * static_cast<long long>(ends.pitch) + column, result);
        return squares;
    }
};

// Writes this block's tokens of a tile, by `threads` threads in whole warps, of which this one is `thread`.
__device__ __forceinline__ void end_tile(
    const TileSums& sums, const float* scales, const Ends& ends, int tile, int thread, int threads) {
    constexpr int kAtOnce = PARTS_IN_MEMORY && SPLIT > 1 ? (kGated || SPLIT > 4 ? 2 : 4) : 1;  // memory is far
    for (int base = 0; base < kSlice * kQuads; base += kAtOnce * threads) {
        Quad quads[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) quads[i].load(sums, ends, tile, base + i * threads + thread);
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            Quad& quad = quads[i];
            float squares = quad.present ? quad.end(ends, scales[quad.token]) : 0.0f;
            if (EPILOGUE == EPILOGUE_RESIDUAL) {
                squares = lane_sum(squares, kSquareLanes);
                if (quad.present && quad.row % (4 * kSquareLanes) == 0) {
                    const int place = static_cast<int>(quad.column / (4 * kSquareLanes));
                    ends.new_squares[place * kSquaresPitch + quad.token] = squares;
                }
            }
        }
    }
}
