// Decode attention over a paged KV cache: one query position a row, split over keys, in one launch.
//
// Work is counted in tiles: 16 positions of one row for one unit, a unit being a key-value head with up to COLUMNS of
// its query heads. All tiles of a step lie on one line (row, unit, tile), which the plan cuts into ranges of equal cost,
// one for each block of threads: load is balanced by work, whatever the lengths. The part of a range that belongs to one
// (row, unit) is a segment. A segment that covers its (row, unit) writes the output; others leave partial sums, and the
// last to arrive merges them, so that no second launch is needed. Everything that changes from step to step is in the
// plan (runner_svc/attention/decode_plan.py), which makes the launch replayable in a CUDA graph.
//
// Each warp takes every WARPS-th tile of the range through a ring of its own in shared memory, filled by cp.async: no
// barrier of the block stands in the loop. Keys are the matrix product's 16 rows and query heads its 8 columns
// (scores^T = K Q^T, output^T = V^T P^T), so that groups of up to 8 heads waste no accumulators. The running maximum
// is raised only when a score exceeds it by more than kSlack, so most tiles need neither shuffles nor rescaling.
//
// Keys and values of a layer: [block, BLOCK_SIZE, KV_HEADS, HEAD_DIM]. Positions outside a row's range are masked
// before the softmax, and their values are never read (0 * NaN would be NaN). A row of length 0 gives zeros.

#include "attention.cuh"
#include "vector.cuh"

using Scalar = SCALAR;
using Rows = SwizzledRows<HEAD_DIM>;

constexpr int kTile = 16;
constexpr int kColumnTiles = COLUMNS / 8;
constexpr int kUnitsPerHead = (GROUP_SIZE + COLUMNS - 1) / COLUMNS;
constexpr int kUnits = KV_HEADS * kUnitsPerHead;
// Query heads of a unit that are stored; the last unit of a key-value head can have fewer.
constexpr int kHeads = GROUP_SIZE < COLUMNS ? GROUP_SIZE : COLUMNS;
constexpr int kSteps = HEAD_DIM / 16;
constexpr int kHalfStageBytes = kTile * Rows::kRowBytes;
constexpr int kStageBytes = 2 * kHalfStageBytes;
constexpr int kMergePitch = HEAD_DIM + 4;
constexpr int kQuads = HEAD_DIM / 4;
// A score above the running maximum by less than this many powers of two is left there.
constexpr float kSlack = 8.0f;
constexpr int kMergeBatch = 8;

static_assert(BLOCK_SIZE % kTile == 0, "a tile lies in one block");
static_assert(COLUMNS % 8 == 0, "query heads come in columns of eight");

// One row of the step, as the plan holds it.
struct __align__(16) Row {
    int start;      // tiles of a unit before this row
    int tiles;      // of a unit, at least 1
    int length;     // positions
    int first;      // first visible position (0, or where the window begins)
    int table;      // row of the block tables
    int query;      // row of the queries and the output
    int index;      // among the step's rows
    int reserved;
};

// Over which blocks a (row, unit) is spread.
struct Split {
    int first_slot;  // of the partial results: twice the first block, and 1 more if its range begins before
    int last_block;

    __device__ __forceinline__ int first_block() const { return first_slot >> 1; }
    __device__ __forceinline__ bool is_whole() const { return first_block() == last_block; }
};

// A block's share of the line, as the plan holds it.
struct __align__(16) Range {
    Row row;  // in which it begins
    int begin;
    int end;
    Split head;  // of its first segment
    Split tail;  // of its last
    int reserved[2];
};

// Where a tile's keys and values are.
struct Tile {
    unsigned source;  // (position in the cache) * KV_HEADS + key-value head
    unsigned bounds;  // first valid position of the tile, and the number up to the last one << 8
};

struct Partial {
    float* sums;    // [2 * grid, kHeads, HEAD_DIM]
    float2* stats;  // [2 * grid, kHeads]: maximum, sum of exponentials
    int* arrivals;  // [rows, kUnits], zero between launches
};

__device__ __forceinline__ Row load_row(const Row* row) {
    const int4* words = reinterpret_cast<const int4*>(row);
    int4 a = __ldg(words), b = __ldg(words + 1);
    return Row{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

__device__ __forceinline__ Range load_range(const Range* range) {
    const int4* words = reinterpret_cast<const int4*>(range) + 2;
    int4 a = __ldg(words), b = __ldg(words + 1);
    return Range{load_row(&range->row), a.x, a.y, {a.z, a.w}, {b.x, b.y}, {b.z, b.w}};
}

__device__ __forceinline__ int first_head(int unit) {
    return unit / kUnitsPerHead * GROUP_SIZE + unit % kUnitsPerHead * COLUMNS;
}

__device__ __forceinline__ int head_count(int unit) {
    return min(kHeads, GROUP_SIZE - unit % kUnitsPerHead * COLUMNS);
}

// Finds tile `flat` of the line, at or after `row`, and leaves its row in `row`.
__device__ __forceinline__ Tile locate(
    int flat, Row& row, const Row* rows, const int* __restrict__ block_tables, int table_stride) {
    while (flat >= (row.start + row.tiles) * kUnits) row = load_row(rows + row.index + 1);
    int offset = flat - row.start * kUnits;
    int unit = offset / row.tiles;
    int position = row.first / kTile * kTile + (offset - unit * row.tiles) * kTile;
    int block = __ldg(block_tables + static_cast<long long>(row.table) * table_stride + position / BLOCK_SIZE);
    Tile tile;
    tile.source = (static_cast<unsigned>(block) * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + unit / kUnitsPerHead;
    tile.bounds = max(row.first - position, 0) | min(row.length - position, kTile) << 8;
    return tile;
}

// A warp's tiles, copied ahead of their use.
struct TileRing {
    const char* keys;
    const char* values;
    unsigned ring;  // shared memory
    int lane;
    unsigned long long policy;

    // Copies one half of a stage; rows outside [begin, end) become zero.
    __device__ __forceinline__ void copy(const char* source, unsigned target, int begin, int end) const {
#pragma unroll
        for (int i = 0; i < kTile * Rows::kChunks / 32; i++) {
            int index = i * 32 + lane, row = index / Rows::kChunks, chunk = index % Rows::kChunks;
            const char* from = source + static_cast<long long>(row) * (KV_HEADS * Rows::kRowBytes) + chunk * 16;
            copy_async(target + Rows::offset(row, chunk), from, row >= begin && row < end ? 16 : 0, policy);
        }
    }
    // Keys outside a row's range are masked by their position, so whatever they hold may be read.
    __device__ __forceinline__ void copy_keys(int stage, unsigned source) const {
        copy(keys + static_cast<long long>(source) * Rows::kRowBytes, ring + stage * kStageBytes, 0, kTile);
    }
    __device__ __forceinline__ void copy_values(int stage, unsigned source, unsigned bounds) const {
        copy(values + static_cast<long long>(source) * Rows::kRowBytes, ring + stage * kStageBytes + kHalfStageBytes,
             bounds & 0xff, bounds >> 8);
    }
};

// A warp's share of a segment: the softmax's state of COLUMNS query heads, transposed as the file's head says.
struct Accumulator {
    float output[kSteps][kColumnTiles][4];
    float maximum[kColumnTiles][2];
    float sum[kColumnTiles][2];  // of this lane's keys alone, until `finish`

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            maximum[n][0] = maximum[n][1] = kLowest;
            sum[n][0] = sum[n][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < kSteps; j++) {
                output[j][n][0] = output[j][n][1] = output[j][n][2] = output[j][n][3] = 0.0f;
            }
        }
    }

    // Raises the maxima to the tile's, where any score of the warp is far above them.
    __device__ __forceinline__ void raise(const float (&scores)[kColumnTiles][4]) {
        bool above = false;
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            above |= fmaxf(scores[n][0], scores[n][2]) > maximum[n][0] + kSlack;
            above |= fmaxf(scores[n][1], scores[n][3]) > maximum[n][1] + kSlack;
        }
        if (!__any_sync(kFullWarp, above)) return;
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float highest = fmaxf(scores[n][c], scores[n][c + 2]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, lanes));
                }
                highest = fmaxf(highest, maximum[n][c]);
                float factor = exp2_approx(maximum[n][c] - highest);
                maximum[n][c] = highest;
                sum[n][c] *= factor;
#pragma unroll
                for (int j = 0; j < kSteps; j++) {
                    output[j][n][c] *= factor;
                    output[j][n][c + 2] *= factor;
                }
            }
        }
    }

    // Scores to probabilities, as the B fragments of the second product.
    __device__ __forceinline__ void exponentiate(
        const float (&scores)[kColumnTiles][4], unsigned (&probabilities)[kColumnTiles][2]) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; i++) p[i] = exp2_approx(scores[n][i] - maximum[n][i & 1]);
            sum[n][0] += p[0] + p[2];
            sum[n][1] += p[1] + p[3];
            probabilities[n][0] = transpose_matrix(Tensor16<Scalar>::pack(p[0], p[1]));
            probabilities[n][1] = transpose_matrix(Tensor16<Scalar>::pack(p[2], p[3]));
        }
    }

    // Leaves sums [kHeads, kMergePitch] and stats [kHeads] of this warp in shared memory.
    __device__ __forceinline__ void store(float* sums, float2* stats, int lane) {
        int group = lane >> 2, pair = lane & 3;
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float total = sum[n][c];
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) total += __shfl_xor_sync(kFullWarp, total, lanes);
                int head = n * 8 + pair * 2 + c;
                if (head >= kHeads) continue;
#pragma unroll
                for (int j = 0; j < kSteps; j++) {
                    sums[head * kMergePitch + j * 16 + group] = output[j][n][c];
                    sums[head * kMergePitch + j * 16 + group + 8] = output[j][n][c + 2];
                }
                if (group == 0) stats[head] = make_float2(maximum[n][c], total);
            }
        }
    }
};

// Four neighbouring elements of one head's output, being merged.
struct Merged {
    float maximum = kLowest;
    float sum = 0.0f;
    float4 output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    template <int Count>
    __device__ __forceinline__ void add(const float2 (&stats)[Count], const float4 (&sums)[Count]) {
        float highest = maximum;
#pragma unroll
        for (int i = 0; i < Count; i++) highest = fmaxf(highest, stats[i].x);
        float factor = exp2_approx(maximum - highest);
        maximum = highest;
        sum *= factor;
        output.x *= factor, output.y *= factor, output.z *= factor, output.w *= factor;
#pragma unroll
        for (int i = 0; i < Count; i++) {
            factor = exp2_approx(stats[i].x - highest);
            sum += factor * stats[i].y;
            output.x += factor * sums[i].x, output.y += factor * sums[i].y;
            output.z += factor * sums[i].z, output.w += factor * sums[i].w;
        }
    }

    __device__ __forceinline__ void write(Scalar* target) const {
        float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        *reinterpret_cast<uint2*>(target) = make_uint2(
            Tensor16<Scalar>::pack(output.x * inverse, output.y * inverse),
            Tensor16<Scalar>::pack(output.z * inverse, output.w * inverse));
    }
};

// Merges the warps of this block; `quad` is one of kHeads * kQuads.
__device__ __forceinline__ Merged merge_warps(const float* sums, const float2* stats, int quad) {
    float2 all_stats[WARPS];
    float4 all_sums[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        int head = w * kHeads + quad / kQuads;
        all_stats[w] = stats[head];
        all_sums[w] = *reinterpret_cast<const float4*>(sums + head * kMergePitch + quad % kQuads * 4);
    }
    Merged merged;
    merged.add(all_stats, all_sums);
    return merged;
}

// Merges what the blocks of a split left.
__device__ __forceinline__ Merged merge_blocks(const Partial& partial, Split split, int quad) {
    Merged merged;
    for (int block = split.first_block(); block <= split.last_block; block += kMergeBatch) {
        float2 stats[kMergeBatch];
        float4 sums[kMergeBatch];
#pragma unroll
        for (int i = 0; i < kMergeBatch; i++) {
            int source = min(block + i, split.last_block);
            int slot = source == split.first_block() ? split.first_slot : 2 * source;
            long long head = static_cast<long long>(slot) * kHeads + quad / kQuads;
            stats[i] = __ldcg(partial.stats + head);
            sums[i] = __ldcg(reinterpret_cast<const float4*>(partial.sums + head * HEAD_DIM) + quad % kQuads);
            if (block + i > split.last_block) stats[i] = make_float2(kLowest, 0.0f), sums[i] = make_float4(0, 0, 0, 0);
        }
        merged.add(stats, sums);
    }
    return merged;
}

// B fragments of a unit's queries: COLUMNS heads, of which those beyond the unit's are zero.
struct Queries {
    unsigned fragments[kSteps][kColumnTiles][2];

    __device__ __forceinline__ void load(const Scalar* queries, long long stride, int row, int unit, int lane) {
        int group = lane >> 2, pair = lane & 3, heads = head_count(unit);
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            int head = n * 8 + group;
            const Scalar* source = queries + row * stride + (first_head(unit) + head) * HEAD_DIM + pair * 2;
#pragma unroll
            for (int k = 0; k < kSteps; k++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    fragments[k][n][half] =
                        head < heads ? *reinterpret_cast<const unsigned*>(source + k * 16 + half * 8) : 0u;
                }
            }
        }
    }
};

__device__ __forceinline__ void score_keys(
    float (&scores)[kColumnTiles][4], unsigned keys, const Queries& queries, int lane) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
    int row = lane & 15, chunk = lane >> 4;
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
        unsigned a[4];
        load_matrices(a, keys + Rows::offset(row, 2 * k + chunk));
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            Tensor16<Scalar>::mma(scores[n], a, queries.fragments[k][n][0], queries.fragments[k][n][1]);
        }
    }
}

// Scales the scores and masks those of positions outside [begin, end) of the tile.
__device__ __forceinline__ void scale_and_mask(
    float (&scores)[kColumnTiles][4], float scale, float soft_cap, int begin, int end, int lane) {
    int key = lane >> 2;
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[n][i] = SOFT_CAP ? soft_capped(scores[n][i], scale, soft_cap) : scores[n][i] * (scale * kLog2E);
        }
    }
    if (begin <= 0 && end >= kTile) return;
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int position = key + (i >> 1) * 8;
            if (position < begin || position >= end) scores[n][i] = minus_infinity();
        }
    }
}

__device__ __forceinline__ void add_values(
    Accumulator& accumulator, unsigned values, const unsigned (&probabilities)[kColumnTiles][2], int lane) {
    int row = (lane >> 4) * 8 + (lane & 7), chunk = (lane >> 3) & 1;
#pragma unroll
    for (int j = 0; j < kSteps; j++) {
        unsigned a[4];
        load_matrices_transposed(a, values + Rows::offset(row, 2 * j + chunk));
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            Tensor16<Scalar>::mma(accumulator.output[j][n], a, probabilities[n][0], probabilities[n][1]);
        }
    }
}

// The end of a segment: merges the block's warps, then writes the output or leaves a partial result. The last block to
// arrive at a (row, unit) writes it.
__device__ __forceinline__ void finish_segment(
    const float* sums, const float2* stats, int* is_last, const Partial& partial, const Row& row, int unit, Split split,
    int slot, Scalar* output, long long output_stride) {
    bool whole = split.is_whole();
    Scalar* target = output + row.query * output_stride + first_head(unit) * HEAD_DIM;
    int quads = head_count(unit) * kQuads;
    __syncthreads();
    for (int quad = threadIdx.x; quad < quads; quad += WARPS * 32) {
        Merged merged = merge_warps(sums, stats, quad);
        if (whole) {
            merged.write(target + quad * 4);
            continue;
        }
        long long head = static_cast<long long>(slot) * kHeads + quad / kQuads;
        reinterpret_cast<float4*>(partial.sums + head * HEAD_DIM)[quad % kQuads] = merged.output;
        if (quad % kQuads == 0) partial.stats[head] = make_float2(merged.maximum, merged.sum);
    }
    if (!whole) __threadfence();
    __syncthreads();
    if (whole) return;
    if (threadIdx.x == 0) {
        int* arrivals = partial.arrivals + row.index * kUnits + unit;
        bool last = atomicAdd(arrivals, 1) == split.last_block - split.first_block();
        if (last) *arrivals = 0;
        *is_last = last;
    }
    __syncthreads();
    if (!*is_last) return;
    __threadfence();
    for (int quad = threadIdx.x; quad < quads; quad += WARPS * 32) {
        merge_blocks(partial, split, quad).write(target + quad * 4);
    }
}

// plan: Row [batch], Range [gridDim.x]. Strides are in elements. `scale` multiplies the scores, `soft_cap` counts where
// SOFT_CAP is set.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) paged_decode(
    const Scalar* __restrict__ queries, long long query_stride, Scalar* __restrict__ output, long long output_stride,
    const Scalar* __restrict__ keys, const Scalar* __restrict__ values, const int* __restrict__ block_tables,
    int table_stride, const int* __restrict__ plan, int batch, float scale, float soft_cap, float* partial_sums,
    float2* partial_stats, int* arrivals) {
    extern __shared__ __align__(128) char shared[];
    float* merge_sums = reinterpret_cast<float*>(shared + WARPS * STAGES * kStageBytes);
    float2* merge_stats = reinterpret_cast<float2*>(merge_sums + WARPS * kHeads * kMergePitch);
    int* is_last = reinterpret_cast<int*>(merge_stats + WARPS * kHeads);

    const Row* rows = reinterpret_cast<const Row*>(plan);
    const Range range = load_range(reinterpret_cast<const Range*>(rows + batch) + blockIdx.x);
    const int begin = range.begin, end = range.end;
    release_successors();
    wait_for_predecessors();  // also without work: who waits for this kernel counts on its predecessors' end
    if (begin >= end) return;
    Row row = range.row;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int tiles = (end - begin - warp + WARPS - 1) / WARPS;  // of this warp

    TileRing ring{reinterpret_cast<const char*>(keys), reinterpret_cast<const char*>(values),
                  shared_address(shared) + warp * STAGES * kStageBytes, lane, evict_first_policy()};
    Row located_row = row;
    Tile located{0, 0};  // lane l: the warp's tile 32 * i + l
    unsigned bounds = 0, source = 0;
    auto issue_keys = [&](int i, int stage) {
        if (i < tiles) {
            if (i % 32 == 0 && i + lane < tiles) {
                located = locate(begin + warp + WARPS * (i + lane), located_row, rows, block_tables, table_stride);
            }
            source = __shfl_sync(kFullWarp, located.source, i & 31);
            bounds = __shfl_sync(kFullWarp, located.bounds, i & 31);
            ring.copy_keys(stage, source);
        }
        commit_copies();
    };
    auto issue_values = [&](int i, int stage) {  // of the tile whose keys were issued last
        if (i < tiles) ring.copy_values(stage, source, bounds);
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        issue_keys(i, i);
        issue_values(i, i);
    }

    Partial partial{partial_sums, partial_stats, arrivals};
    int offset = begin - row.start * kUnits;
    int unit = offset / row.tiles, skipped = offset - unit * row.tiles;  // tiles of the segment before this range
    int done = 0, stage = 0;
    Queries next_queries;
    next_queries.load(queries, query_stride, row.query, unit, lane);
    for (int flat = begin; flat < end;) {
        int segment_end = min(end, flat + row.tiles - skipped);
        Row next_row = row;
        int next_unit = unit + 1;
        if (next_unit == kUnits && segment_end < end) next_row = load_row(rows + row.index + 1), next_unit = 0;
        Queries segment_queries = next_queries;
        if (segment_end < end) next_queries.load(queries, query_stride, next_row.query, next_unit, lane);
        Accumulator accumulator;
        accumulator.clear();
        int position = row.first / kTile * kTile + (begin + warp + WARPS * done - flat + skipped) * kTile;
        for (; done < tiles && begin + warp + WARPS * done < segment_end; done++, position += WARPS * kTile) {
            unsigned keys_stage = ring.ring + stage * kStageBytes;
            float scores[kColumnTiles][4];
            unsigned probabilities[kColumnTiles][2];
            wait_copies<2 * STAGES - 1>();
            __syncwarp();
            score_keys(scores, keys_stage, segment_queries, lane);
            __syncwarp();
            issue_keys(done + STAGES, stage);
            scale_and_mask(scores, scale, soft_cap, row.first - position, row.length - position, lane);
            accumulator.raise(scores);
            accumulator.exponentiate(scores, probabilities);
            wait_copies<2 * STAGES - 1>();
            __syncwarp();
            add_values(accumulator, keys_stage + kHalfStageBytes, probabilities, lane);
            __syncwarp();
            issue_values(done + STAGES, stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        accumulator.store(merge_sums + warp * kHeads * kMergePitch, merge_stats + warp * kHeads, lane);
        int slot = 2 * blockIdx.x + (flat == begin ? 0 : 1);
        Split split = flat == begin ? range.head : segment_end == end ? range.tail : Split{slot, slot >> 1};
        finish_segment(merge_sums, merge_stats, is_last, partial, row, unit, split, slot, output, output_stride);
        flat = segment_end;
        row = next_row;
        unit = next_unit;
        skipped = 0;
    }
    wait_copies<0>();
}
