// Causal attention of chunks of queries over a paged KV cache, with mma.sync: for every GPU from sm_80 on.
//
// A thread block processes 64 queries of one row for one query head, 16 per warp. It iterates over the visible keys in
// tiles of KEYS, through a double buffer in shared memory (cp.async). Queries stay in registers. Pieces of work are
// from a plan (prefill_tile.cuh), so that one launch serves many sequences, prefix hits and chunks.
//
// Keys and values of a layer are [block, BLOCK_SIZE, KV_HEADS, HEAD_DIM], of SCALAR or e4m3 (cached.cuh). Positions
// that no query of the tile sees are read as zeros, so the cache's contents there do not matter.

#include "prefill_rows.cuh"

// Scales the scores of keys from `key` on and masks those that the queries from `query` on do not see.
__device__ __forceinline__ void scale_and_mask(
    float (&scores)[kKeyTiles][4], float scale, float soft_cap, int key, int query, int window, int lane) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[n][i] = SOFT_CAP ? soft_capped(scores[n][i], scale, soft_cap) : scores[n][i] * (scale * kLog2E);
        }
    }
    if (key + KEYS - 1 <= query && key > query + 15 - window) return;
#pragma unroll
    for (int n = 0; n < kKeyTiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int distance = query + (lane >> 2) + (i >> 1) * 8 - (key + n * 8 + (lane & 3) * 2 + (i & 1));
            if (distance < 0 || distance >= window) scores[n][i] = minus_infinity();
        }
    }
}

// plan: int32 {number of tiles, 7 unused}, PrefillTile [tiles]. Strides are in elements; `window` is the number of
// positions that a query sees (a huge number for all). `scale` multiplies the scores; `soft_cap` is used if SOFT_CAP is
// set; `sinks`, by query head and in log2 units, if SINKS is set; `cache_scales` [2, KV_HEADS] are the units of an FP8
// cache's keys and values.
extern "C" __global__ void __launch_bounds__(kThreads, 2) paged_prefill(
    const Scalar* __restrict__ queries, long long query_stride, Scalar* __restrict__ output, long long output_stride,
    const char* __restrict__ keys, const char* __restrict__ values, const int* __restrict__ block_tables,
    int table_stride, const int* __restrict__ plan, int window, const float* __restrict__ cache_scales, float scale,
    float soft_cap, const float* __restrict__ sinks) {
    extern __shared__ __align__(128) char shared[];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int pieces = __ldg(plan) * kHeads;
    for (int round = 0, piece = blockIdx.x; piece < pieces; piece = dealt_piece(++round, blockIdx.x, gridDim.x)) {
        PrefillTile tile = load_prefill_tile(plan, piece / kHeads);
        int head = piece % kHeads, kv_head = head / GROUP_SIZE;
        int end = tile.position + tile.rows;
        long long head_bytes = static_cast<long long>(kv_head) * CachedRows::kRowBytes;
        const int* table = block_tables + static_cast<long long>(tile.table) * table_stride;
        KeyBuffer buffer{keys + head_bytes, values + head_bytes, table, tile.first, end, shared_address(shared)};
        float key_scale = scale * cached_unit(cache_scales, kv_head);
        int key = tile.first / KEYS * KEYS, stage = 0;
        buffer.issue(0, key);
        long long row = tile.query + warp * 16;
        int rows = tile.rows - warp * 16;
        QueryRows query_rows;
        query_rows.load(queries + row * query_stride + head * HEAD_DIM, query_stride, rows, lane);
        for (; key < end; key += KEYS, stage ^= 1) {
            unsigned keys_stage = buffer.shared + stage * kStageBytes;
            float scores[kKeyTiles][4];
            wait_copies<1>();
            __syncthreads();
            buffer.issue(stage ^ 1, key + KEYS);  // zeros beyond the end, so that the number of groups stays the same
            query_rows.score(scores, keys_stage, lane);
            scale_and_mask(scores, key_scale, soft_cap, key, tile.position + warp * 16, window, lane);
            query_rows.exponentiate(scores);
            wait_copies<2>();
            __syncthreads();
            query_rows.add_values(scores, keys_stage + kHalfStageBytes, lane);
        }
        query_rows.write(output + row * output_stride + head * HEAD_DIM, output_stride, rows,
                         cached_unit(cache_scales, KV_HEADS + kv_head), sinks, head, lane);
        wait_copies<0>();
        __syncthreads();
    }
}
