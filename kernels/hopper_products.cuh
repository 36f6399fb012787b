// Products, rings and pieces of the Hopper prefill's multiplying warpgroups, whatever the order of their softmax.
#pragma once

#include "hopper_converter.cuh"
#include "wgmma.cuh"

// Steps of a head's 16 elements whose queries a thread has in registers, where they take no time of shared memory.
#ifndef QUERY_STEPS
#define QUERY_STEPS 0
#endif

using ScoreProduct = Wgmma<Operand, kScores>;
using ValueProduct = Wgmma<Operand, kOutputs>;

// A multiplying warpgroup without its softmax.
struct Products {
    Shared shared;
    int window;
    float soft_cap;
    Scalar* output;
    long long output_stride;

    const float* cache_scales;
    const float* sinks;
    float scale;

    int index;  // of the warpgroup
    bool leads;  // this thread arrives for the warpgroup
    int warp_row;  // the warp's first query in a piece
    unsigned query_matrix, key_matrix, value_matrix;
    Ring<QUERY_STAGES> query_ring;
    Ring<KEY_STAGES> key_ring;
    Ring<VALUE_STAGES> value_ring;
    int round;  // of the current piece
    int position;  // of the warp's first query
    int tile;      // of keys
    int final_tile;  // of the piece, in the order of computation
    int plain_begin, plain_end;  // tiles whose keys are all visible to all of the warpgroup's queries
    float scores[kScores];
    float outputs[kOutputs];
    unsigned queries[QUERY_STEPS ? QUERY_STEPS : 1][4];

    // Starts the product of the queries and keys of the current stages.
    __device__ __forceinline__ void score() {
        // Equal in all lanes; the shuffle shows that to the compiler, which then uses uniform registers.
        unsigned a = __shfl_sync(kFullWarp, query_matrix + query_ring.stage * (kQueryTileBytes >> 4), 0);
        unsigned b = __shfl_sync(kFullWarp, key_matrix + key_ring.stage * (kTileBytes >> 4), 0);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            int part = k / 4, step = k % 4 * 2;
            unsigned keys = b + part * (kKeyPartBytes >> 4) + step;
            if (k < QUERY_STEPS) {
                ScoreProduct::multiply(scores, queries[k], keys, k > 0);
            } else {
                ScoreProduct::multiply(scores, a + part * (kQueryPartBytes >> 4) + step, keys, k > 0);
            }
        }
        wgmma_commit();
    }

    // Starts the product of the probabilities `p` and the next stage's values.
    __device__ __forceinline__ void mix(const unsigned (&p)[kScores / 2], bool accumulate) {
        barrier_wait(shared.values().full(value_ring.stage), value_ring.parity);
        unsigned b = value_matrix + value_ring.stage * (kTileBytes >> 4);
        wgmma_fence();  // otherwise the compiler puts one into the wait's loop and serializes all products
#pragma unroll
        for (int k = 0; k < kGroups; k++) {
            ValueProduct::mix(outputs, p + 4 * k, b + k * (kGroupBytes >> 4), k > 0 || accumulate);
        }
        wgmma_commit();
    }

    // Waits for the next piece's queries at `query_ring.stage`. Returns its record, with 0 rows if there is none.
    __device__ __forceinline__ PieceRecord next_record() {
        barrier_wait(shared.queries().full(query_ring.stage), query_ring.parity);
        return PieceRecord::load(shared.record(++round));
    }

    // Begins the piece of a record: its first tile to be computed is `from` and its last is `to`.
    __device__ __forceinline__ void begin_piece(const PieceRecord& record, int from, int to) {
        position = record.position + warp_row;
        tile = from;
        final_tile = to;
        int query = record.position + index * 64;  // the warpgroup's first
        plain_end = (query + 1) / kKeys;
        plain_begin = max(record.first_keys, (max(query + 63 - window, -1) + kKeys) / kKeys);
    }

    // Makes operands of the piece's queries.
    __device__ __forceinline__ void prepare_queries() {
#if FP8_CACHE
        convert_queries(shared.queries().tile(query_ring.stage) + index * (64 * 128), threadIdx.x & 127);
        asm volatile("bar.sync %0, 128;" ::"r"(3 + index) : "memory");
#endif
#pragma unroll
        for (int k = 0; k < QUERY_STEPS; k++) {
            int lane = threadIdx.x & 31, row = lane & 15, chunk = k % 4 * 2 + (lane >> 4);
            unsigned line = shared.queries().tile(query_ring.stage) + k / 4 * kQueryPartBytes + (warp_row + row) * 128;
            load_matrices(queries[k], line + ((chunk ^ (row & 7)) << 4));
        }
    }

    __device__ __forceinline__ void release_keys() {
        if (leads) {
            barrier_arrive(shared.keys().empty(key_ring.stage));
            if (tile == final_tile) barrier_arrive(shared.queries().empty(query_ring.stage));
        }
        key_ring.advance();
    }

    __device__ __forceinline__ void start_scores() {
        barrier_wait(shared.keys().full(key_ring.stage), key_ring.parity);
        wgmma_fence();
        score();
    }

    // Waits until the last values are added, and releases their stage.
    __device__ __forceinline__ void wait_for_outputs() {
        wgmma_wait<0>();
        ValueProduct::pin(outputs);
        if (leads) barrier_arrive(shared.values().empty(value_ring.stage));
        value_ring.advance();
    }
};
