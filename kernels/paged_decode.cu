// Decode attention over a paged KV cache: one query position per row, or a few adjacent ones, split over keys, in one
// launch.
//
// The unit of work is a tile: 16 positions of one row for one unit, which is a key-value head with up to
// SHARERS * COLUMNS of its queries (a query is a query head at a position). The tiles of a step form one line (row,
// unit, tile), which the plan cuts into ranges of equal cost, one per thread block: the load is balanced for any
// lengths. The part of a range that belongs to one (row, unit) is a segment. A segment that covers its whole (row, unit)
// writes the output. Other segments store partial sums, and the last block to arrive merges them, so that no second
// launch is needed. Everything that changes between steps is in the plan (runner_svc/attention/decode_plan.py), so that
// the launch can be replayed in a CUDA graph.
//
// Each warp processes every WARPS-th tile of the range through its own ring in shared memory, filled by cp.async: the
// loop has no block-wide barrier. Keys are the matrix product's 16 rows and queries its 8 columns (scores^T = K Q^T,
// output^T = V^T P^T), so that groups of up to 8 queries waste no accumulators. The running maximum is raised only when
// a score exceeds it by more than kSlack, so most tiles need neither shuffles nor rescaling. If a unit has more queries
// than a warp has registers for, a team of SHARERS warps shares a ring: all of them see each tile, each for its own
// queries, and meet once per tile.
//
// Keys and values of a layer are [block, BLOCK_SIZE, KV_HEADS, HEAD_DIM], of SCALAR or e4m3 (cached.cuh). Positions
// outside a row's range are masked before the softmax, and their values are never read (0 * NaN would be NaN). A row of
// length 0 gives zeros.
//
// With POSITIONS (verify steps), a row's queries are at up to that many adjacent positions, of which only the device
// knows the first and the number: `known` and `drafted` (decode_sight.cuh). The plan covers the keys of all cases, and
// a tile without a visible key reads nothing and adds nothing. Queries that are absent see what the last one that is
// present sees; their outputs have no meaning. 0 is decode: one position, whose keys are in the plan.
//
// The line is in decode_line.cuh, copies in decode_ring.cuh, products in decode_products.cuh, the softmax in
// decode_softmax.cuh, merging in decode_merge.cuh.

#include "decode_merge.cuh"
#include "decode_products.cuh"
#include "decode_ring.cuh"

// plan: Row [batch], Range [gridDim.x]. Strides are in elements. `scale` multiplies the scores; `soft_cap` is used if
// SOFT_CAP is set; `sinks`, by query head and in log2 units, if SINKS is set; `cache_scales` [2, KV_HEADS] are the units
// of an FP8 cache's keys and values. With POSITIONS, a row has that many adjacent rows of queries and of output; for
// `known`, `drafted` and `window` see Counters.
//
// With BESIDE_PREFILL the next kernel is a paged_prefill_hopper that runs on the multiprocessors without work in the
// plan. It is released once everything it reads is written. Blocks come in pairs then, so that the remaining
// multiprocessors are pairs too.
extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(WARPS * 32, BLOCKS_PER_SM) paged_decode(
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
    float* merge_sums = reinterpret_cast<float*>(shared + kTeams * STAGES * kStageBytes);
    float2* merge_stats = reinterpret_cast<float2*>(merge_sums + kTeams * kUnitQueries * kMergePitch);
    int* is_last = reinterpret_cast<int*>(merge_stats + kTeams * kUnitQueries);

    const Row* rows = reinterpret_cast<const Row*>(plan);
    const Range range = load_range(reinterpret_cast<const Range*>(rows + batch) + blockIdx.x);
    const int begin = range.begin, end = range.end;
#if BESIDE_PREFILL
    wait_for_predecessors();
    release_successors();
    if (begin >= end) return;
#else
    release_successors();
    if (begin >= end) {  // kernels that wait for this one rely on its predecessors' end
        wait_for_predecessors();
        return;
    }
#endif
    Row row = range.row;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int team = warp / SHARERS, sharer = warp % SHARERS;
    int tiles = (end - begin - team + kTeams - 1) / kTeams;  // this team's

    TileRing ring{keys, values, shared_address(shared) + team * STAGES * kStageBytes, lane, sharer, evict_first_policy()};
    Row located_row = row;
    Tile located{0, 0};  // in lane l: the team's tile 32 * i + l
    unsigned bounds = 0, source = 0;
    auto locate_from = [&](int i) {
        if (i + lane < tiles) {
            located = locate(begin + team + kTeams * (i + lane), located_row, rows, block_tables, table_stride, counters);
        }
    };
    auto issue_keys = [&](int i, int stage) {
        if (i < tiles) {
            if (i % 32 == 0 && i > 0) locate_from(i);
            source = __shfl_sync(kFullWarp, located.source, i & 31);
            bounds = __shfl_sync(kFullWarp, located.bounds, i & 31);
            ring.copy_keys(stage, source, bounds);
        }
        commit_copies();
    };
    auto issue_values = [&](int i, int stage) {  // for the tile whose keys were issued last
        if (i < tiles) ring.copy_values(stage, source, bounds);
        commit_copies();
    };
    // Tiles whose copies are issued before the loop. A team refills a stage one tile later, when all have left it.
    constexpr int kAhead = SHARERS == 1 ? STAGES : STAGES - 1;
    locate_from(0);
#if !BESIDE_PREFILL
    // The step's own kernels write only a row's newest positions, in its last tiles; all others can be read before they end.
    const bool waits_first = __any_sync(kFullWarp, lane < kAhead && lane < tiles && located.bounds >> 16);
    if (waits_first) wait_for_predecessors();
#endif
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
        issue_keys(i, i);
        issue_values(i, i);
    }
#if !BESIDE_PREFILL
    if (!waits_first) wait_for_predecessors();
#endif

    Partial partial{partial_sums, partial_stats, arrivals};
    int offset = begin - row.start * kUnits;
    int unit = offset / row.tiles, skipped = offset - unit * row.tiles;  // tiles of the segment before this range
    int done = 0, stage = 0;
    Sight sight = Sight::of(row, counters);
    Queries next_queries;
    next_queries.load(queries, query_stride, row.query, unit, sharer * COLUMNS, lane);
    for (int flat = begin; flat < end;) {
        int segment_end = min(end, flat + row.tiles - skipped);
        Row next_row = row;
        int next_unit = unit + 1;
        if (next_unit == kUnits && segment_end < end) next_row = load_row(rows + row.index + 1), next_unit = 0;
        Queries segment_queries = next_queries;
        if (segment_end < end) {
            next_queries.load(queries, query_stride, next_row.query, next_unit, sharer * COLUMNS, lane);
        }
        int kv_head = unit / kUnitsPerHead;
        float key_scale = scale * cached_unit(cache_scales, kv_head);
        float value_unit = cached_unit(cache_scales, KV_HEADS + kv_head);
        Accumulator accumulator;
        accumulator.clear();
        int position = row.first / kTile * kTile + (begin + team + kTeams * done - flat + skipped) * kTile;
        for (; done < tiles && begin + team + kTeams * done < segment_end; done++, position += kTeams * kTile) {
            unsigned keys_stage = ring.ring + stage * kStageBytes;
            float scores[kColumnTiles][4];
            unsigned probabilities[kColumnTiles][2];
#if SHARERS == 1
            wait_copies<2 * STAGES - 1>();
            __syncwarp();
#else
            wait_copies<2 * STAGES - 4>();
            meet_team(team);
            issue_keys(done + kAhead, (stage == 0 ? STAGES : stage) - 1);
            issue_values(done + kAhead, (stage == 0 ? STAGES : stage) - 1);
#endif
            score_keys(scores, keys_stage, segment_queries, lane);
#if SHARERS == 1
            __syncwarp();
            issue_keys(done + STAGES, stage);
#endif
            int query = first_query(unit) + sharer * COLUMNS;
            scale_and_mask(scores, key_scale, soft_cap, sight, position, query, lane);
            accumulator.raise(scores);
            accumulator.exponentiate(scores, probabilities);
#if SHARERS == 1
            wait_copies<2 * STAGES - 1>();
            __syncwarp();
#endif
            add_values(accumulator, keys_stage + kHalfStageBytes, probabilities, lane);
#if SHARERS == 1
            __syncwarp();
            issue_values(done + STAGES, stage);
#endif
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        float* team_sums = merge_sums + team * kUnitQueries * kMergePitch;
        accumulator.store(team_sums, merge_stats + team * kUnitQueries, sharer * COLUMNS, lane);
        int slot = 2 * blockIdx.x + (flat == begin ? 0 : 1);
        Split split = flat == begin ? range.head : segment_end == end ? range.tail : Split{slot, slot >> 1};
        finish_segment(merge_sums, merge_stats, is_last, partial, row, unit, split, slot, output, output_stride,
                       value_unit, sinks);
        flat = segment_end;
        if (POSITIONS == 0 || next_unit == 0) sight = Sight::of(next_row, counters);
        row = next_row;
        unit = next_unit;
        skipped = 0;
    }
    wait_copies<0>();
}
