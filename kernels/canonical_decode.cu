// Decode and verify attention over a paged KV cache in the canonical order (canonical.cuh), in one launch.
//
// The unit of work is a segment of one row for one unit, which is a key-value head with up to COLUMNS of its queries.
// The plan cuts the line of all segments (row, unit, segment) into ranges of about equal cost, one per thread block
// (runner_svc/attention/canonical_gpu/decode_plan.py). A block folds the segments of a (row, unit) that it has alone in
// registers. Segments of a (row, unit) that several blocks share are stored one by one, and the last block to arrive
// folds them: a fold of folds would have other bits.
//
// The four warps of a block work on one sub-tile at a time. Keys of the sub-tile STAGES ahead are copied once the
// sub-tile's scores are done, values once its outputs are: two barriers a sub-tile.
//
// Keys and values, rows, POSITIONS, strides and arguments are those of paged_decode.cu.

#include "canonical_fold.cuh"

static_assert(SHARERS == 1, "a block's warps share all queries of a unit");

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM) canonical_decode(
    const Scalar* __restrict__ queries, long long query_stride, Scalar* __restrict__ output, long long output_stride,
    const char* __restrict__ keys, const char* __restrict__ values, const int* __restrict__ block_tables,
    int table_stride, const int* __restrict__ plan, int batch, const float* __restrict__ cache_scales, float scale,
    float soft_cap, const float* __restrict__ sinks, float* partial_sums, float2* partial_stats, int* arrivals
#if POSITIONS
    ,
    const int* __restrict__ known, const int* __restrict__ drafted, int window) {
    const Counters counters{known, drafted, window};
#else
) {
    const Counters counters;
#endif
    extern __shared__ __align__(128) char shared[];
    Exchange& exchange = *reinterpret_cast<Exchange*>(shared + STAGES * kSubTileBytes);
    const Row* rows = reinterpret_cast<const Row*>(plan);
    const Range range = load_range(reinterpret_cast<const Range*>(rows + batch) + blockIdx.x);
    release_successors();
    if (range.begin >= range.end) {  // kernels that wait for this one rely on its predecessors' end
        wait_for_predecessors();
        return;
    }
    const SubTiles tiles{keys, values, shared_address(shared), evict_first_policy()};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    // Sub-tiles are copied in the order in which the loops below use them. The first ones' blocks are looked up at once.
    Walk walk{rows, block_tables, table_stride, counters};
    walk.begin(range);
    Source first[STAGES];
    bool waits_first = false;
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        first[i] = Source::of(walk);
        if (walk.has_more()) waits_first |= walk.is_written(), walk.advance();
    }
    // The step's own kernels write only a row's newest positions; all others can be read before they end.
    if (waits_first) wait_for_predecessors();
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        tiles.copy_keys(i, first[i]);
        if (i > 0) tiles.copy_values(i - 1, first[i - 1]);
        commit_copies();
    }
    if (!waits_first) wait_for_predecessors();
    Source source = first[STAGES - 1];
    // Copies the values of the sub-tile copied last to the stage before, and the next sub-tile's keys to `stage`.
    auto copy_next = [&](int stage) {
        tiles.copy_values((stage == 0 ? STAGES : stage) - 1, source);
        source = Source::of(walk);
        tiles.copy_keys(stage, source);
        if (walk.has_more()) walk.advance();
        commit_copies();
    };
    wait_copies<STAGES - 1>();
    __syncthreads();

    const Partial partial{partial_sums, partial_stats, arrivals};
    Row row = range.row;
    int offset = range.begin - row.start * kUnits;
    int unit = offset / row.tiles, index = offset - unit * row.tiles;
    int stage = 0;
    Segment segment{exchange, warp, lane};
    for (int flat = range.begin; flat < range.end; index = 0) {
        int first_index = index, last_index = min(row.tiles, index + range.end - flat);
        int slot = flat == range.begin ? range.head.first_slot
                   : last_index < row.tiles ? range.tail.first_slot : -1;
        int kv_head = unit / kUnitsPerHead;
        const Sight sight = Sight::of(row, counters);
        const ScoreUnit score_unit = ScoreUnit::of(scale, cached_unit(cache_scales, kv_head), soft_cap);
        Queries unit_queries;
        unit_queries.load(queries, query_stride, row.query, unit, 0, lane);
        Sums total;
        total.clear();
        for (; index < last_index; index++) {
            segment.clear();
            Extent extent = Extent::of(row, seen_keys(sight), index);
            bool is_empty = extent.position >= extent.end;
            for (; extent.position < extent.end; extent.position += kSubTile) {
                float scores[kColumnTiles][4];
                score_keys(scores, tiles.keys_at(stage) + warp * (kTile * CachedRows::kRowBytes), unit_queries, lane);
                segment.mask(scores, score_unit, sight, first_query(unit), extent.position + warp * kTile);
                __syncthreads();
                copy_next(stage);
                segment.exponentiate(scores, score_unit);
                wait_copies<STAGES - 1>();
                __syncthreads();
                segment.add_probabilities();
                segment.add_values(tiles.values_at(stage));
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            if (!is_empty) segment.end();
            if (slot >= 0) {
                partial.store(slot + index, segment.sums, warp, lane);
            } else {
                total.fold(segment.sums);
            }
        }
        const Target target{output + row.query * output_stride + first_head(unit) * HEAD_DIM, output_stride, unit,
                            cached_unit(cache_scales, KV_HEADS + kv_head), sinks + first_head(unit)};
        int count = last_index - first_index;
        if (slot < 0) {
            write_whole(total, target, warp, lane);
        } else if (partial.arrive(row.index * kUnits + unit, count, row.tiles, &exchange.is_last)) {
            partial.fold(slot, row.tiles, target);
        }
        flat += count;
        if (++unit == kUnits && flat < range.end) unit = 0, row = load_row(rows + row.index + 1);
    }
    wait_copies<0>();
}
