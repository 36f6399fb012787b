// The multiplying warpgroups of the Hopper prefill in the canonical order: tiles ascend and are the order's sub-tiles.
//
// The outputs of a segment are accumulated by its products alone. When the last of them is done, beside the first scores
// of the next segment or piece, they are folded into those of the segments before.
#pragma once

#include "canonical_rows.cuh"
#include "hopper_products.cuh"
#include "hopper_store.cuh"

static_assert(kKeys == kSubTile, "tiles of keys are sub-tiles");
static_assert(QUERY_STAGES > 1, "the next piece's scores begin beside this one's last product");
constexpr int kSegmentTiles = kSegment / kSubTile;

// One of the two multiplying warpgroups.
struct Consumer : Products {
    static constexpr float kScoreUnit = 1.0f;  // of Products::scale
    SegmentRows segment;
    FoldedRows<kOutputs> folded;
    bool begins;  // the current tile is the first of its segment to be computed

    static __device__ __forceinline__ Consumer of(const Products& products) {
        Consumer consumer{products};
        consumer.set_unit(0);  // of all heads without an FP8 cache
        return consumer;
    }

    __device__ __forceinline__ void set_unit(int head) {
        segment.unit = ScoreUnit::of(scale, cached_unit(cache_scales, head / GROUP_SIZE), soft_cap);
    }

    // Begins the next piece, once its queries are at `query_ring.stage`. Returns false if there is none.
    __device__ __forceinline__ bool take_piece() {
        PieceRecord record = next_record();
        if (record.rows == 0) return false;
        begin_piece(record, record.first_keys, record.last_keys);
        if (FP8_CACHE) set_unit(record.head);
        prepare_queries();
        return true;
    }

    // Writes the folded outputs of the piece of this round.
    __device__ __forceinline__ void write(int of_round) {
        PieceRecord record = PieceRecord::load(shared.record(of_round));
        float unit = cached_unit(cache_scales, KV_HEADS + record.head / GROUP_SIZE);
        Scalar* target = output + (record.query + warp_row) * output_stride + record.head * HEAD_DIM;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float keep, inverse = folded.end(r, sinks, record.head, unit, keep);
            store_row(folded.output, r, target, output_stride, record.rows - warp_row, [&](float first, float second) {
                return stored_pair(scaled(first, keep, inverse), scaled(second, keep, inverse));
            });
        }
    }

    // Converts completed scores to probabilities.
    template <bool Plain>
    __device__ __forceinline__ void exponentiate() {
        ScoreProduct::pin(scores);
        release_keys();
        segment.exponentiate<Plain>(scores, tile * kKeys, position, window);
    }

    // Computes the probabilities of the first tile of all, with no value product to overlap.
    __device__ __forceinline__ void begin(unsigned (&p)[kScores / 2]) {
        begins = true;
        segment.reset();
        folded.clear();
        start_scores();
        wgmma_wait<0>();
        exponentiate<false>();
        pack(scores, p);
    }

    // Adds the last tile's values, weighted by its probabilities `p`, and computes those of the current tile. If the
    // current tile begins a segment, the last one's sums are folded.
    template <bool Plain>
    __device__ __forceinline__ void advance(unsigned (&p)[kScores / 2], bool begins_segment) {
        start_scores();
        mix(p, !begins);
        begins = begins_segment;
        if (begins_segment) {
            folded.fold_sums(segment);
            segment.reset();
        }
        wgmma_wait<1>();
        exponentiate<Plain>();
        keep_before_wait((segment.even[0] + segment.even[1]) + (segment.odd[0] + segment.odd[1]), shared.base);
        wait_for_outputs();
        pack(scores, p);  // only now, because the product reads `p`
        if (begins_segment) {
            folded.fold_outputs(outputs);
        } else if (__builtin_expect(segment.shrinks, 0)) {
            segment.rescale(outputs);
        }
    }

    // Advances to the next piece's first tile. Returns false if there is no next piece.
    __device__ __forceinline__ bool next_piece(unsigned (&p)[kScores / 2]) {
        query_ring.advance();
        bool more = take_piece();
        if (more) {
            advance<false>(p, true);
        } else {
            folded.fold_sums(segment);
            mix(p, !begins);
            wait_for_outputs();
            folded.fold_outputs(outputs);
        }
        write(round - 1);
        folded.clear();
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
            while (tile < final_tile) {
                tile++;
                bool begins_segment = tile % kSegmentTiles == 0;
                if (tile >= plain_begin && tile < plain_end) {
                    advance<true>(p, begins_segment);
                } else {
                    advance<false>(p, begins_segment);
                }
            }
        } while (next_piece(p));
    }
};
