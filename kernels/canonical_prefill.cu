// Prefill attention in the canonical order (canonical.cuh), with mma.sync: for every GPU from sm_80 on.
//
// Work, copies and arguments are those of paged_prefill.cu. A thread block's tiles of keys are the order's sub-tiles, and
// the outputs of a segment are folded when the next one begins.

#include "canonical_rows.cuh"
#include "prefill_rows.cuh"

static_assert(KEYS == kSubTile, "tiles of keys are sub-tiles");

// Stores a lane's part of a row; `sums` are its first two outputs, followed by those of the lane's other row and so on.
__device__ __forceinline__ void store_row(const float* sums, float keep, float inverse, Scalar* line, int lane) {
    auto pair = [&](int first, int second) {
        return stored_pair(scaled(sums[first], keep, inverse), scaled(sums[second], keep, inverse));
    };
#pragma unroll
    for (int j = 0; j < 8 * kSteps; j += 8, line += 16) {
#if FP8_CACHE
        *reinterpret_cast<uint2*>(line + (lane & 3) * 4) = make_uint2(pair(j, j + 4), pair(j + 1, j + 5));
#else
        unsigned* two = reinterpret_cast<unsigned*>(line + (lane & 3) * 2);
        two[0] = pair(j, j + 1);
        two[4] = pair(j + 4, j + 5);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) canonical_prefill(
    const Scalar* __restrict__ queries, long long query_stride, Scalar* __restrict__ output, long long output_stride,
    const char* __restrict__ keys, const char* __restrict__ values, const int* __restrict__ block_tables,
    int table_stride, const int* __restrict__ plan, int window, const float* __restrict__ cache_scales, float scale,
    float soft_cap, const float* __restrict__ sinks) {
    extern __shared__ __align__(128) char shared[];
    constexpr int kOutputs = 8 * kSteps;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int pieces = __ldg(plan) * kHeads;
    for (int round = 0, piece = blockIdx.x; piece < pieces; piece = dealt_piece(++round, blockIdx.x, gridDim.x)) {
        PrefillTile tile = load_prefill_tile(plan, piece / kHeads);
        int head = piece % kHeads, kv_head = head / GROUP_SIZE;
        int end = tile.position + tile.rows;
        long long head_bytes = static_cast<long long>(kv_head) * CachedRows::kRowBytes;
        const int* table = block_tables + static_cast<long long>(tile.table) * table_stride;
        KeyBuffer buffer{keys + head_bytes, values + head_bytes, table, tile.first, end, shared_address(shared)};
        int key = tile.first / kSubTile * kSubTile, stage = 0;
        buffer.issue(0, key);
        long long row = tile.query + warp * 16;
        int rows = tile.rows - warp * 16;
        QueryRows query_rows;
        query_rows.load(queries + row * query_stride + head * HEAD_DIM, query_stride, rows, lane);
        auto& outputs = reinterpret_cast<float(&)[kOutputs]>(query_rows.output);
        SegmentRows segment{ScoreUnit::of(scale, cached_unit(cache_scales, kv_head), soft_cap)};
        segment.reset();
        FoldedRows<kOutputs> folded;
        folded.clear();
        for (; key < end; key += kSubTile, stage ^= 1) {
            unsigned keys_stage = buffer.shared + stage * kStageBytes;
            float scores[kKeyTiles][4];
            wait_copies<1>();
            __syncthreads();
            buffer.issue(stage ^ 1, key + kSubTile);  // zeros beyond the end, so that the number of groups stays the same
            query_rows.score(scores, keys_stage, lane);
            auto& own = reinterpret_cast<float(&)[kLaneScores]>(scores);
            segment.exponentiate<false>(own, key, tile.position + warp * 16, window);
            if (segment.shrinks) segment.rescale(outputs);
            wait_copies<2>();
            __syncthreads();
            query_rows.add_values(scores, keys_stage + kHalfStageBytes, lane);
            if ((key + kSubTile) % kSegment == 0 || key + kSubTile >= end) {
                folded.fold_sums(segment);
                folded.fold_outputs(outputs);
                segment.reset();
#pragma unroll
                for (int i = 0; i < kOutputs; i++) outputs[i] = 0.0f;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float keep, inverse = folded.end(r, sinks, head, cached_unit(cache_scales, KV_HEADS + kv_head), keep);
            int line = (lane >> 2) + r * 8;
            if (line >= rows) continue;
            store_row(folded.output + 2 * r, keep, inverse, output + (row + line) * output_stride + head * HEAD_DIM, lane);
        }
        wait_copies<0>();
        __syncthreads();
    }
}
