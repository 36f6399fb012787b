// The warpgroups of the Hopper prefill that multiply.
#pragma once

#include "hopper_converter.cuh"
#include "hopper_softmax.cuh"

// One of the two warpgroups that multiply.
struct Consumer {
    Shared shared;
    const int* plan;
    int pieces;
    int window;
    float soft_cap;
    Scalar* output;
    long long output_stride;

    const float* cache_scales;
    float scale;

    int index;  // of the warpgroup
    bool leads;  // this thread arrives for the warpgroup
    int warp_row;  // the warp's first query in a piece
    unsigned query_matrix, key_matrix, value_matrix;
    Ring<QUERY_STAGES> query_ring;
    Ring<KEY_STAGES> key_ring;
    Ring<VALUE_STAGES> value_ring;
    Softmax softmax;
    Piece piece;
    int tile;  // of keys
    int round;
    float scores[64];
    float outputs[kOutputs];

    __device__ __forceinline__ void score() {
        // The same in all lanes, which the compiler must see to step them in uniform registers.
        unsigned a = __shfl_sync(kFullWarp, query_matrix + query_ring.stage * (kTileBytes >> 4), 0);
        unsigned b = __shfl_sync(kFullWarp, key_matrix + key_ring.stage * (kTileBytes >> 4), 0);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            int step = k / 4 * (kHalfBytes >> 4) + k % 4 * 2;
            Wgmma<Operand>::score(scores, a + step, b + step, k > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void mix(const unsigned (&p)[32], bool accumulate) {
        unsigned b = value_matrix + value_ring.stage * (kTileBytes >> 4);
        Wgmma<Operand>::mix(outputs, p, b, accumulate);
#pragma unroll
        for (int k = 1; k < kGroups; k++) Wgmma<Operand>::mix(outputs, p + 4 * k, b + k * (kGroupBytes >> 4), 1);
        wgmma_commit();
    }

    __device__ __forceinline__ void write(const float (&sums)[2]) {
        long long row = piece.tile.query + warp_row;
        float unit = cached_unit(cache_scales, KV_HEADS + piece.kv_head());
        write_output(outputs, sums, unit, output + row * output_stride + piece.head * HEAD_DIM, output_stride,
                     piece.tile.rows - warp_row);
    }

    __device__ __forceinline__ void release_keys(bool queries_too) {
        if (leads) {
            barrier_arrive(shared.keys().empty(key_ring.stage));
            if (queries_too) barrier_arrive(shared.queries().empty(query_ring.stage));
        }
        key_ring.advance();
    }

    // Scores to probabilities.
    __device__ __forceinline__ void exponentiate(const Piece& of, int keys, unsigned (&p)[32]) {
        softmax.exponentiate(scores, keys * kKeys, of.tile.position + warp_row, window, soft_cap);
        pack(scores, p);
    }

    // For a new piece, whose queries must have been copied to `query_ring.stage`.
    __device__ __forceinline__ void wait_for_queries() {
        barrier_wait(shared.queries().full(query_ring.stage), query_ring.parity);
#if FP8_CACHE
        convert_queries(shared.queries().tile(query_ring.stage) + index * (64 * 128), threadIdx.x & 127);
        asm volatile("bar.sync %0, 128;" ::"r"(3 + index) : "memory");
#endif
    }

    __device__ __forceinline__ void reset_softmax(const Piece& of) {
        softmax.reset();
        if (FP8_CACHE) softmax.scale = scale * cached_unit(cache_scales, of.kv_head());
    }

    // Scores and probabilities of the first piece's first tile.
    __device__ __forceinline__ void begin(unsigned (&p)[32]) {
        piece = Piece::load(plan, dealt_piece(plan, 0));
        round = 0;
        tile = piece.last_keys;
        reset_softmax(piece);
#pragma unroll
        for (int i = 0; i < kOutputs; i++) outputs[i] = 0.0f;
        wait_for_queries();
        barrier_wait(shared.keys().full(0), 0);
        wgmma_fence();
        score();
        wgmma_wait<0>();
        pin(scores);
        release_keys(tile == piece.first_keys);
        exponentiate(piece, tile, p);
    }

    // Adds the present tile's values, by its probabilities `present`, and makes those of the next tile, which may be of
    // the next piece. False when there is no next.
    __device__ __forceinline__ bool advance(unsigned (&present)[32], unsigned (&next)[32]) {
        bool ends_piece = tile == piece.first_keys, begins_piece = tile == piece.last_keys;
        Piece next_piece = piece;
        int next_tile = tile - 1;
        if (ends_piece) {
            int next_index = dealt_piece(plan, ++round);
            if (next_index >= pieces) {
                barrier_wait(shared.values().full(value_ring.stage), value_ring.parity);
                wgmma_fence();
                mix(present, !begins_piece);
                wgmma_wait<0>();
                pin(outputs);
                write(softmax.sum);
                return false;
            }
            next_piece = Piece::load(plan, next_index);
            next_tile = next_piece.last_keys;
            query_ring.advance();
            wait_for_queries();
        }
        barrier_wait(shared.keys().full(key_ring.stage), key_ring.parity);
        take_turn();
        wgmma_fence();
        score();
        barrier_wait(shared.values().full(value_ring.stage), value_ring.parity);
        wgmma_fence();  // the compiler would put one into the wait's loop, and serialize all products
        mix(present, !begins_piece);
        pass_turn();
        wgmma_wait<1>();
        pin(scores);
        release_keys(next_tile == next_piece.first_keys);
        float sums[2] = {softmax.sum[0], softmax.sum[1]};
        if (ends_piece) reset_softmax(next_piece);
        exponentiate(next_piece, next_tile, next);
        keep_before_wait(next, softmax.sum[0] + softmax.sum[1], shared.base);
        wgmma_wait<0>();
        pin(outputs);
        if (leads) barrier_arrive(shared.values().empty(value_ring.stage));
        value_ring.advance();
        if (ends_piece) {
            write(sums);
        } else {
#pragma unroll
            for (int i = 0; i < kOutputs; i++) outputs[i] *= softmax.factor[i >> 1 & 1];
        }
        if (ends_piece) piece = next_piece;
        tile = next_tile;
        return true;
    }

    // The warpgroups issue products in turns, so that one multiplies while the other does its softmax.
    __device__ __forceinline__ void take_turn() const {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + index), "n"(kConsumers * 128) : "memory");
    }
    __device__ __forceinline__ void pass_turn() const {
        asm volatile("bar.arrive %0, %1;" ::"r"(2 - index), "n"(kConsumers * 128) : "memory");
    }
};
