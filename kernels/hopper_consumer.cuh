// The multiplying warpgroups of the Hopper prefill.
#pragma once

#include "hopper_products.cuh"
#include "hopper_softmax.cuh"

// One of the two multiplying warpgroups.
struct Consumer : Products {
    static constexpr float kScoreUnit = kLog2E;  // of Products::scale
    Softmax softmax;
    bool begins;  // the current tile is the first computed one of its piece

    static __device__ __forceinline__ Consumer of(const Products& products) {
        return Consumer{products, Softmax{products.scale}};
    }

    // Begins the next piece, once its queries are at `query_ring.stage`. Returns false if there is none.
    __device__ __forceinline__ bool take_piece() {
        PieceRecord record = next_record();
        if (record.rows == 0) return false;
        begin_piece(record, record.last_keys, record.first_keys);
#if FP8_CACHE
        softmax.scale = scale * cached_unit(cache_scales, record.head / GROUP_SIZE);
#endif
        prepare_queries();
        return true;
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
            while (tile > final_tile) {
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
