// The multiplying warpgroups of the Hopper prefill.
#pragma once

#include "hopper_converter.cuh"
#include "hopper_softmax.cuh"
#include "wgmma.cuh"

using ScoreProduct = Wgmma<Operand, kScores>;
using ValueProduct = Wgmma<Operand, kOutputs>;

// One of the two multiplying warpgroups.
struct Consumer {
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
    Softmax softmax;
    int round;  // of the current piece
    int position;  // of the warp's first query
    int tile;      // of keys
    int first_tile;
    int plain_begin, plain_end;  // tiles whose keys are all visible to all of the warpgroup's queries
    bool begins;  // the current tile is the first computed one of its piece
    float scores[kScores];
    float outputs[kOutputs];

    // Starts the product of the queries and keys of the current stages.
    __device__ __forceinline__ void score() {
        // Equal in all lanes; the shuffle shows that to the compiler, which then uses uniform registers.
        unsigned a = __shfl_sync(kFullWarp, query_matrix + query_ring.stage * (kQueryTileBytes >> 4), 0);
        unsigned b = __shfl_sync(kFullWarp, key_matrix + key_ring.stage * (kTileBytes >> 4), 0);
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            int part = k / 4, step = k % 4 * 2;
            ScoreProduct::multiply(
                scores, a + part * (kQueryPartBytes >> 4) + step, b + part * (kKeyPartBytes >> 4) + step, k > 0);
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

    // Begins the next piece, once its queries are at `query_ring.stage`. Returns false if there is none.
    __device__ __forceinline__ bool take_piece() {
        barrier_wait(shared.queries().full(query_ring.stage), query_ring.parity);
        PieceRecord record = PieceRecord::load(shared.record(++round));
        if (record.rows == 0) return false;
        position = record.position + warp_row;
        tile = record.last_keys;
        first_tile = record.first_keys;
        int query = record.position + index * 64;  // the warpgroup's first
        plain_end = (query + 1) / kKeys;
        plain_begin = max(first_tile, (max(query + 63 - window, -1) + kKeys) / kKeys);
#if FP8_CACHE
        softmax.scale = scale * cached_unit(cache_scales, record.head / GROUP_SIZE);
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

    // Adds the sink of the piece of this round to its sums, once its last tile is in them.
    __device__ __forceinline__ void add_sink() {
#if SINKS
        int head = PieceRecord::load(shared.record(round)).head;
        bool first = (threadIdx.x & 3) == 0;  // `write_output` adds up the sums of a quad
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (first) softmax.sum[r] += sink_weight(sinks, head, softmax.maximum[r] * softmax.unit());
        }
#endif
    }

    // Writes the outputs of the piece of this round.
    __device__ __forceinline__ void write(int of_round, const float (&sums)[2]) {
        PieceRecord record = PieceRecord::load(shared.record(of_round));
        long long row = record.query + warp_row;
        float unit = cached_unit(cache_scales, KV_HEADS + record.head / GROUP_SIZE);
        write_output(outputs, sums, unit, output + row * output_stride + record.head * HEAD_DIM, output_stride,
                     record.rows - warp_row);
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

    // Converts completed scores to probabilities.
    template <bool Plain>
    __device__ __forceinline__ void exponentiate() {
        ScoreProduct::pin(scores);
        release_keys();
        softmax.exponentiate<Plain>(scores, tile * kKeys, position, window, soft_cap);
    }

    // Computes the probabilities of the piece's first tile, with no value product to overlap.
    __device__ __forceinline__ void begin(unsigned (&p)[kScores / 2]) {
        begins = true;
        softmax.reset();
        start_scores();
        wgmma_wait<0>();
        exponentiate<false>();
        pack(scores, p);
    }

    // Adds the last tile's values, weighted by its probabilities `p`, and computes those of the current tile.
    template <bool Plain>
    __device__ __forceinline__ void advance(unsigned (&p)[kScores / 2], bool accumulate) {
        start_scores();
        mix(p, accumulate);
        wgmma_wait<1>();
        exponentiate<Plain>();
        keep_before_wait(softmax.sum[0] + softmax.sum[1], shared.base);
        wait_for_outputs();
        pack(scores, p);  // only now, because the product reads `p`
    }

    // Advances to the next tile of the same piece.
    template <bool Plain>
    __device__ __forceinline__ void next_tile(unsigned (&p)[kScores / 2]) {
        bool accumulate = !begins;
        begins = false;
        tile--;
        advance<Plain>(p, accumulate);
        if (__builtin_expect(softmax.shrinks, 0)) {
#pragma unroll
            for (int i = 0; i < kOutputs; i++) outputs[i] *= softmax.factor[i >> 1 & 1];
        }
    }

    // Adds the last tile's values.
    __device__ __forceinline__ void finish(unsigned (&p)[kScores / 2]) {
        mix(p, !begins);
        wait_for_outputs();
    }

    // Advances to the next piece's first tile. Returns false if there is no next piece.
    __device__ __forceinline__ bool next_piece(unsigned (&p)[kScores / 2]) {
        add_sink();
        if (QUERY_STAGES == 1) {  // the next queries are copied during this piece's last product and output
            finish(p);
            write(round, softmax.sum);
            query_ring.advance();
            if (!take_piece()) return false;
            begin(p);
            return true;
        }
        bool accumulate = !begins;
        float sums[2] = {softmax.sum[0], softmax.sum[1]};
        query_ring.advance();
        bool more = take_piece();
        if (more) {
            begins = true;
            softmax.reset();
            advance<false>(p, accumulate);
        } else {
            finish(p);
        }
        write(round - 1, sums);
        return more;
    }

    // Computes all pieces.
    __device__ __forceinline__ void consume() {
        unsigned p[kScores / 2];
#pragma unroll
        for (int i = 0; i < kOutputs; i++) outputs[i] = 0.0f;
        take_piece();
        begin(p);
        do {
            while (tile > first_tile) {
                if (is_next_plain()) {
                    next_tile<true>(p);
                } else {
                    next_tile<false>(p);
                }
            }
        } while (next_piece(p));
    }

    // Whether all keys of the next tile are visible to all of the warpgroup's queries.
    __device__ __forceinline__ bool is_next_plain() const { return tile > plain_begin && tile <= plain_end; }
};
