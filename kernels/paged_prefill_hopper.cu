// Causal attention of chunks of queries over a paged KV cache for Hopper (sm_90a): TMA, wgmma, heads of 64 or 128.
//
// A block of three warpgroups stays for the whole launch and works off its pieces, each of 128 queries of a row for one
// query head, from the last tile of 128 keys to the first. In warpgroup 0, one warp copies queries and keys and
// another copies values; warpgroups 1 and 2 have 64 queries each. A consumer runs ahead by one score product, across
// pieces too: it issues the scores of the next tile, the values of the present one, and does the next one's softmax
// while the values are multiplied.
//
// Keys and values of a layer: [block, BLOCK_SIZE, KV_HEADS, HEAD_DIM], copied in groups of 16 positions. Groups beyond
// the row's end are copied from outside of the tensor, which gives zeros; values of the group in which the row ends are
// copied by ordinary loads, zeros from there on, because 0 * NaN would be NaN. Keys need no such care: their scores are
// masked.
//
// Layouts in shared memory, rows of 128 bytes, swizzled: queries and keys [HEAD_DIM / 64][128 rows], values
// [8 groups][HEAD_DIM / 64][16 rows].

#include "hopper.cuh"
#include "prefill_tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = SCALAR;

constexpr int kKeys = 128;
constexpr int kGroup = 16;  // positions copied at once
constexpr int kGroups = kKeys / kGroup;
constexpr int kHalves = HEAD_DIM / 64;
constexpr int kHalfBytes = 128 * 128;
constexpr int kTileBytes = kHalves * kHalfBytes;
constexpr int kGroupBytes = kTileBytes / kGroups;
constexpr int kHeads = KV_HEADS * GROUP_SIZE;
constexpr int kConsumers = 2;
constexpr int kOutputs = HEAD_DIM / 2;  // accumulators of a thread's output
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "wgmma is used for heads of 64 and 128");
static_assert(BLOCK_SIZE % kGroup == 0, "a group lies in one block");

// Shared memory: stages of queries, keys and values, then a full and an empty barrier for each stage.
struct Shared {
    unsigned base;

    __device__ __forceinline__ unsigned queries(int stage) const { return base + stage * kTileBytes; }
    __device__ __forceinline__ unsigned keys(int stage) const { return queries(QUERY_STAGES + stage); }
    __device__ __forceinline__ unsigned values(int stage) const { return keys(KEY_STAGES + stage); }
    __device__ __forceinline__ unsigned barrier(int index) const { return values(VALUE_STAGES) + index * 8; }
    __device__ __forceinline__ unsigned queries_full(int stage) const { return barrier(stage); }
    __device__ __forceinline__ unsigned keys_full(int stage) const { return barrier(QUERY_STAGES + stage); }
    __device__ __forceinline__ unsigned values_full(int stage) const { return barrier(QUERY_STAGES + KEY_STAGES + stage); }
    // Each full barrier's empty one lies this many bytes further.
    static constexpr int kStages = QUERY_STAGES + KEY_STAGES + VALUE_STAGES;
    static constexpr int kToEmpty = kStages * 8;
};

// A tile of queries for one head, and the tiles of keys that it sees.
struct Piece {
    PrefillTile tile;
    int head;
    int first_keys;
    int last_keys;

    __device__ __forceinline__ static Piece load(const int* plan, int piece) {
        Piece loaded;
        loaded.tile = load_prefill_tile(plan, piece / kHeads);
        loaded.head = piece % kHeads;
        loaded.first_keys = loaded.tile.first / kKeys;
        loaded.last_keys = (loaded.tile.position + loaded.tile.rows - 1) / kKeys;
        return loaded;
    }
};

// Row of the cache, counted in positions, at which a group of positions lies; a negative one beyond the row's end.
__device__ __forceinline__ int group_row(const int* table, int position, int length) {
    if (position >= length) return -kGroup;
    return __ldg(table + position / BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE;
}

__device__ __forceinline__ void produce_queries_and_keys(
    Shared shared, const TensorMap* query_map, const TensorMap* key_map, const int* block_tables, int table_stride,
    const int* plan, int pieces) {
    int lane = threadIdx.x & 31, group = lane / kHalves, half = lane % kHalves;
    Ring<QUERY_STAGES> query_ring(1);
    Ring<KEY_STAGES> key_ring(1);
    for (int round = 0, index = dealt_piece(0); index < pieces; index = dealt_piece(++round)) {
        Piece piece = Piece::load(plan, index);
        const int* table = block_tables + static_cast<long long>(piece.tile.table) * table_stride;
        int row = group_row(table, piece.last_keys * kKeys + group % kGroups * kGroup, piece.tile.length);
        unsigned query_full = shared.queries_full(query_ring.stage);
        barrier_wait(query_full + Shared::kToEmpty, query_ring.parity);
        if (lane == 0) {
            barrier_expect(query_full, kTileBytes);
            copy_tensor(shared.queries(query_ring.stage), query_map, 0, piece.tile.query, piece.head * kHalves, query_full);
        }
        query_ring.advance();
        for (int tile = piece.last_keys; tile >= piece.first_keys; tile--) {
            int copied_row = row;
            if (tile > piece.first_keys) {  // looked up a tile ahead
                row = group_row(table, (tile - 1) * kKeys + group % kGroups * kGroup, piece.tile.length);
            }
            unsigned full = shared.keys_full(key_ring.stage);
            barrier_wait(full + Shared::kToEmpty, key_ring.parity);
            if (lane == 0) barrier_expect(full, kTileBytes);
            __syncwarp();
            if (group < kGroups) {
                unsigned target = shared.keys(key_ring.stage) + half * kHalfBytes + group * (kGroup * 128);
                copy_tensor(target, key_map, 0, copied_row, piece.head / GROUP_SIZE * kHalves + half, full);
            }
            key_ring.advance();
        }
    }
}

// Copies a group of values of which only `valid` rows count, the rest becoming zeros; by a whole warp.
__device__ __forceinline__ void copy_partial_values(unsigned target, const Scalar* values, int row, int kv_head, int valid) {
    const uint4* source = reinterpret_cast<const uint4*>(
        values + (static_cast<long long>(row) * KV_HEADS + kv_head) * HEAD_DIM);
#pragma unroll 2
    for (int i = threadIdx.x & 31; i < kGroup * HEAD_DIM / 8; i += 32) {
        int line = i / (HEAD_DIM / 8), chunk = i % (HEAD_DIM / 8);
        uint4 data = make_uint4(0, 0, 0, 0);
        if (line < valid) data = __ldg(source + static_cast<long long>(line) * (KV_HEADS * HEAD_DIM / 8) + chunk);
        unsigned address = target + chunk / 8 * (kGroup * 128) + line * 128 + ((chunk % 8 ^ line % 8) << 4);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(data.x), "r"(data.y), "r"(data.z),
                     "r"(data.w)
                     : "memory");
    }
    fence_async_proxy();
    __syncwarp();
}

__device__ __forceinline__ void produce_values(
    Shared shared, const TensorMap* value_map, const Scalar* values, const int* block_tables, int table_stride,
    const int* plan, int pieces) {
    int lane = threadIdx.x & 31, group = lane % kGroups;
    Ring<VALUE_STAGES> ring(1);
    for (int round = 0, index = dealt_piece(0); index < pieces; index = dealt_piece(++round)) {
        Piece piece = Piece::load(plan, index);
        int kv_head = piece.head / GROUP_SIZE;
        const int* table = block_tables + static_cast<long long>(piece.tile.table) * table_stride;
        int row = group_row(table, piece.last_keys * kKeys + group * kGroup, piece.tile.length);
        for (int tile = piece.last_keys; tile >= piece.first_keys; tile--) {
            int copied_row = row;
            if (tile > piece.first_keys) {
                row = group_row(table, (tile - 1) * kKeys + group * kGroup, piece.tile.length);
            }
            unsigned full = shared.values_full(ring.stage), target = shared.values(ring.stage);
            int end = piece.tile.length - tile * kKeys;  // of the row, within this tile
            int partial = end < kKeys && end % kGroup ? end / kGroup : kGroups;
            barrier_wait(full + Shared::kToEmpty, ring.parity);
            if (partial < kGroups) {
                int partial_row = __shfl_sync(kFullWarp, copied_row, partial);
                copy_partial_values(target + partial * kGroupBytes, values, partial_row, kv_head, end % kGroup);
            }
            if (lane == 0) barrier_expect(full, partial < kGroups ? kTileBytes - kGroupBytes : kTileBytes);
            __syncwarp();
            if (lane < kGroups && group != partial) {
                copy_tensor(target + group * kGroupBytes, value_map, 0, copied_row, kv_head * kHalves, full);
            }
            ring.advance();
        }
    }
}

// A thread's part of the softmax of 64 queries, of which it has parts of two rows: lane / 4 and lane / 4 + 8.
struct Softmax {
    float scale;  // to log2 units
    float maximum[2];
    float sum[2];     // of this lane's keys alone
    float factor[2];  // by which the last tile shrank what came before

    __device__ __forceinline__ void reset() {
        maximum[0] = maximum[1] = kLowest;
        sum[0] = sum[1] = 0.0f;
    }

    // Turns scores into probabilities; `key` is the first key's position and `query` that of the warp's first query.
    __device__ __forceinline__ void exponentiate(float (&s)[64], int key, int query, int window, float soft_cap) {
        int lane = threadIdx.x & 31;
        if (SOFT_CAP) {
#pragma unroll
            for (int i = 0; i < 64; i++) s[i] = soft_capped(s[i], scale * (1.0f / kLog2E), soft_cap);
        }
        if (key + kKeys - 1 > query || key <= query + 15 - window) mask(s, query + (lane >> 2) - key - (lane & 3) * 2, window);
        float factor_of_scores = SOFT_CAP ? 1.0f : scale;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float highest[4] = {maximum[r], maximum[r], maximum[r], maximum[r]};
#pragma unroll
            for (int j = 0; j < 16; j++) {
                highest[j & 3] = fmaxf(highest[j & 3], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            }
            float top = fmaxf(fmaxf(highest[0], highest[1]), fmaxf(highest[2], highest[3]));
            top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
            float offset = top * factor_of_scores;
            // The difference first: fused into one operation with `offset`, the rounding error of kLowest would be huge.
            factor[r] = exp2_approx((maximum[r] - top) * factor_of_scores);
            maximum[r] = top;
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < 16; j++) {
                float& low = s[4 * j + 2 * r];
                float& high = s[4 * j + 2 * r + 1];
                low = exp2_approx(fmaf(low, factor_of_scores, -offset));
                high = exp2_approx(fmaf(high, factor_of_scores, -offset));
                sums[j & 3] += low + high;
            }
            sum[r] = sum[r] * factor[r] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }

    // `distance` from this lane's first key back from its first query.
    static __device__ __forceinline__ void mask(float (&s)[64], int distance, int window) {
#pragma unroll
        for (int j = 0; j < 16; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int own = distance + (i >> 1) * 8 - (j * 8 + (i & 1));
                if (own < 0 || own >= window) s[4 * j + i] = minus_infinity();
            }
        }
    }
};

// Probabilities as A fragments of the second product.
__device__ __forceinline__ void pack(const float (&s)[64], unsigned (&p)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = Tensor16<Scalar>::pack(s[2 * i], s[2 * i + 1]);
}

// Without a use before the wait for the values' product the compiler moves the softmax behind it, and nothing overlaps.
// The store never happens: sums are not negative.
__device__ __forceinline__ void keep_before_wait(const unsigned (&p)[32], float sum, unsigned shared) {
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) all |= p[i];
    if (sum < 0.0f) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(all) : "memory");
}

// Divides by the sums and stores a thread's rows; quads exchange columns so that each lane stores 16 bytes at a time.
__device__ __forceinline__ void write_output(
    const float (&o)[kOutputs], const float (&sums)[2], Scalar* output, long long stride, int rows) {
    int lane = threadIdx.x & 31, quad = lane & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = sums[r];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        float inverse = 1.0f / sum;
        int row = (lane >> 2) + r * 8;
        Scalar* line = output + row * stride + quad * 8;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            unsigned c[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float* pair = o + (4 * i + j) * 4 + r * 2;
                c[j] = Tensor16<Scalar>::pack(pair[0] * inverse, pair[1] * inverse);
            }
            unsigned other = __shfl_xor_sync(kFullWarp, quad & 1 ? c[0] : c[1], 1);
            if (quad & 1) c[0] = other; else c[1] = other;
            other = __shfl_xor_sync(kFullWarp, quad & 1 ? c[2] : c[3], 1);
            if (quad & 1) c[2] = other; else c[3] = other;
            other = __shfl_xor_sync(kFullWarp, quad & 2 ? c[0] : c[2], 2);
            if (quad & 2) c[0] = other; else c[2] = other;
            other = __shfl_xor_sync(kFullWarp, quad & 2 ? c[1] : c[3], 2);
            if (quad & 2) c[1] = other; else c[3] = other;
            if (row < rows) *reinterpret_cast<uint4*>(line + i * 32) = make_uint4(c[0], c[1], c[2], c[3]);
        }
    }
}

// One of the two warpgroups that multiply.
struct Consumer {
    Shared shared;
    const int* plan;
    int pieces;
    int window;
    float soft_cap;
    Scalar* output;
    long long output_stride;

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
            Wgmma<Scalar>::score(scores, a + step, b + step, k > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void mix(const unsigned (&p)[32], bool accumulate) {
        unsigned b = value_matrix + value_ring.stage * (kTileBytes >> 4);
        Wgmma<Scalar>::mix(outputs, p, b, accumulate);
#pragma unroll
        for (int k = 1; k < kGroups; k++) Wgmma<Scalar>::mix(outputs, p + 4 * k, b + k * (kGroupBytes >> 4), 1);
        wgmma_commit();
    }

    __device__ __forceinline__ void write(const float (&sums)[2]) {
        long long row = piece.tile.query + warp_row;
        write_output(outputs, sums, output + row * output_stride + piece.head * HEAD_DIM, output_stride,
                     piece.tile.rows - warp_row);
    }

    __device__ __forceinline__ void release_keys(bool queries_too) {
        if (leads) {
            barrier_arrive(shared.keys_full(key_ring.stage) + Shared::kToEmpty);
            if (queries_too) barrier_arrive(shared.queries_full(query_ring.stage) + Shared::kToEmpty);
        }
        key_ring.advance();
    }

    __device__ __forceinline__ void exponentiate(const Piece& of, int keys) {
        softmax.exponentiate(scores, keys * kKeys, of.tile.position + warp_row, window, soft_cap);
    }

    // Scores and probabilities of the first piece's first tile.
    __device__ __forceinline__ void begin(unsigned (&p)[32]) {
        piece = Piece::load(plan, dealt_piece(0));
        round = 0;
        tile = piece.last_keys;
        softmax.reset();
#pragma unroll
        for (int i = 0; i < kOutputs; i++) outputs[i] = 0.0f;
        barrier_wait(shared.queries_full(0), 0);
        barrier_wait(shared.keys_full(0), 0);
        wgmma_fence();
        score();
        wgmma_wait<0>();
        pin(scores);
        release_keys(tile == piece.first_keys);
        exponentiate(piece, tile);
        pack(scores, p);
    }

    // Adds the present tile's values, by its probabilities `present`, and makes those of the next tile, which may be of
    // the next piece. False when there is no next.
    __device__ __forceinline__ bool advance(unsigned (&present)[32], unsigned (&next)[32]) {
        bool ends_piece = tile == piece.first_keys, begins_piece = tile == piece.last_keys;
        Piece next_piece = piece;
        int next_tile = tile - 1;
        if (ends_piece) {
            int next_index = dealt_piece(++round);
            if (next_index >= pieces) {
                barrier_wait(shared.values_full(value_ring.stage), value_ring.parity);
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
            barrier_wait(shared.queries_full(query_ring.stage), query_ring.parity);
        }
        barrier_wait(shared.keys_full(key_ring.stage), key_ring.parity);
        take_turn();
        wgmma_fence();
        score();
        barrier_wait(shared.values_full(value_ring.stage), value_ring.parity);
        wgmma_fence();  // the compiler would put one into the wait's loop, and serialize all products
        mix(present, !begins_piece);
        pass_turn();
        wgmma_wait<1>();
        pin(scores);
        release_keys(next_tile == next_piece.first_keys);
        float sums[2] = {softmax.sum[0], softmax.sum[1]};
        if (ends_piece) softmax.reset();
        exponentiate(next_piece, next_tile);
        pack(scores, next);
        keep_before_wait(next, softmax.sum[0] + softmax.sum[1], shared.base);
        wgmma_wait<0>();
        pin(outputs);
        if (leads) barrier_arrive(shared.values_full(value_ring.stage) + Shared::kToEmpty);
        value_ring.advance();
        if (ends_piece) {
            write(sums);
        } else {
#pragma unroll
            for (int i = 0; i < kOutputs; i++) outputs[i] *= softmax.factor[i >> 1 & 1];
        }
        piece = next_piece;
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

// plan: int32 {number of tiles, 7 unused}, PrefillTile [tiles]. Tensor maps have 64 elements a row and planes of
// 64-element parts of heads: queries in boxes of 128 rows and all parts of a head, keys of 16 rows and one part, values
// of 16 rows and all parts. `values` is what value_map describes. Strides are in elements; `window` is the number of
// positions that a query sees (a huge one for all); `scale` multiplies the scores, `soft_cap` counts where SOFT_CAP is
// set.
extern "C" __global__ void __launch_bounds__(384, 1) paged_prefill_hopper(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const Scalar* __restrict__ values, Scalar* __restrict__ output,
    long long output_stride, const int* __restrict__ block_tables, int table_stride, const int* __restrict__ plan,
    int window, float scale, float soft_cap) {
    extern __shared__ __align__(1024) char shared_bytes[];
    Shared shared{shared_address(shared_bytes)};
    int pieces = __ldg(plan) * kHeads;
    if (dealt_piece(0) >= pieces) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Shared::kStages; i++) {
            barrier_init(shared.barrier(i), 1);
            barrier_init(shared.barrier(i) + Shared::kToEmpty, kConsumers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int warpgroup = __shfl_sync(kFullWarp, threadIdx.x >> 7, 0);
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        int warp = threadIdx.x >> 5;
        if (warp == 0) {
            produce_queries_and_keys(shared, &query_map, &key_map, block_tables, table_stride, plan, pieces);
        } else if (warp == 1) {
            produce_values(shared, &value_map, values, block_tables, table_stride, plan, pieces);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        int index = warpgroup - 1, thread = threadIdx.x & 127;
        Consumer consumer{
            shared, plan, pieces, window, soft_cap, output, output_stride, index, thread == 0,
            index * 64 + thread / 32 * 16,
            matrix_descriptor(shared.queries(0) + index * (64 * 128), 16),
            matrix_descriptor(shared.keys(0), 16),
            matrix_descriptor(shared.values(0), kGroup * 128),
            Ring<QUERY_STAGES>(0), Ring<KEY_STAGES>(0), Ring<VALUE_STAGES>(0), Softmax{scale * kLog2E}};
        if (index == 1) consumer.pass_turn();
        unsigned even[32], odd[32];
        consumer.begin(even);
        while (consumer.advance(even, odd) && consumer.advance(odd, even)) {
        }
    }
}

#endif
