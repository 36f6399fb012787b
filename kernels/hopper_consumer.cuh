// The warpgroups of the Hopper prefill that multiply.
#pragma once

#include "hopper_converter.cuh"
#include "hopper_softmax.cuh"

// One of the two warpgroups that multiply.
struct Consumer {
    Shared shared;
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
    int round;  // of the present piece
    int head;
    int position;  // of the warp's first query
    int tile;      // of keys
    int first_tile;
    bool begins;  // the present tile is its piece's first to be computed
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

    // Takes up the next piece, whose queries are or will be at `query_ring.stage`. False when there is none.
    __device__ __forceinline__ bool take_piece() {
        barrier_wait(shared.queries().full(query_ring.stage), query_ring.parity);
        PieceRecord record = PieceRecord::load(shared.record(++round));
        if (record.rows == 0) return false;
        head = record.head;
        position = record.position + warp_row;
        tile = record.last_keys;
        first_tile = record.first_keys;
#if FP8_CACHE
        convert_queries(shared.queries().tile(query_ring.stage) + index * (64 * 128), threadIdx.x & 127);
        asm volatile("bar.sync %0, 128;" ::"r"(3 + index) : "memory");
#endif
        return true;
    }

    __device__ __forceinline__ void release_keys() {
        if (leads) {
            barrier_arrive(shared.keys().empty(key_ring.stage));
            if (tile == first_tile) barrier_arrive(shared.queries().empty(query_ring.stage));
        }
        key_ring.advance();
    }

    __device__ __forceinline__ void reset_softmax() {
        softmax.reset();
        if (FP8_CACHE) softmax.scale = scale * cached_unit(cache_scales, head / GROUP_SIZE);
    }

    // Scores to probabilities.
    __device__ __forceinline__ void exponentiate() {
        softmax.exponentiate(scores, tile * kKeys, position, window, soft_cap);
    }

    // Writes the outputs of the piece of this round.
    __device__ __forceinline__ void write(int of_round, const float (&sums)[2]) {
        PieceRecord record = PieceRecord::load(shared.record(of_round));
        long long row = record.query + warp_row;
        float unit = cached_unit(cache_scales, KV_HEADS + record.head / GROUP_SIZE);
        write_output(outputs, sums, unit, output + row * output_stride + record.head * HEAD_DIM, output_stride,
                     record.rows - warp_row);
    }

    // Scores and probabilities of the first piece's first tile.
    __device__ __forceinline__ void begin(unsigned (&p)[32]) {
        take_piece();
        begins = true;
        reset_softmax();
#pragma unroll
        for (int i = 0; i < kOutputs; i++) outputs[i] = 0.0f;
        barrier_wait(shared.keys().full(0), 0);
        wgmma_fence();
        score();
        wgmma_wait<0>();
        pin(scores);
        release_keys();
        exponentiate();
        pack(scores, p);
    }

    // Adds the present tile's values by its probabilities `p` and makes those of the next tile, which may be of the next
    // piece. False when there is no next.
    __device__ __forceinline__ bool advance(unsigned (&p)[32]) {
        bool ends = tile == first_tile, accumulate = !begins;
        tile--;
        begins = ends;
        if (ends) {
            query_ring.advance();
            if (!take_piece()) {
                finish(p, accumulate);
                return false;
            }
        }
        barrier_wait(shared.keys().full(key_ring.stage), key_ring.parity);
        wgmma_fence();
        score();
        barrier_wait(shared.values().full(value_ring.stage), value_ring.parity);
        wgmma_fence();  // the compiler would put one into the wait's loop, and serialize all products
        mix(p, accumulate);
        wgmma_wait<1>();
        pin(scores);
        release_keys();
        float sums[2] = {softmax.sum[0], softmax.sum[1]};
        if (ends) reset_softmax();
        exponentiate();
        keep_before_wait(softmax.sum[0] + softmax.sum[1], shared.base);
        wgmma_wait<0>();
        pin(outputs);
        if (leads) barrier_arrive(shared.values().empty(value_ring.stage));
        value_ring.advance();
        pack(scores, p);  // only now, as the product read `p`
        if (ends) {
            write(round - 1, sums);
        } else if (softmax.shrinks) {
#pragma unroll
            for (int i = 0; i < kOutputs; i++) outputs[i] *= softmax.factor[i >> 1 & 1];
        }
        return true;
    }

    // The last tile's values.
    __device__ __forceinline__ void finish(const unsigned (&p)[32], bool accumulate) {
        barrier_wait(shared.values().full(value_ring.stage), value_ring.parity);
        wgmma_fence();
        mix(p, accumulate);
        wgmma_wait<0>();
        pin(outputs);
        write(round - 1, softmax.sum);
    }
};
