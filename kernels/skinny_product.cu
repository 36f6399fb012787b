// Products of a few rows with a weight matrix, out = x W^T, for Hopper (sm_90a): as fast as the weights can be read,
// with the operations before and after them fused.
//
// W's rows are the product's 64-row operand and x's rows, up to TOKENS, its columns (out^T = W x^T), so that few rows
// waste no tensor core. The SPLIT blocks of a cluster split the columns of a tile of 64 rows of W and add their sums
// through each other's shared memory, in a fixed order: the result does not depend on timing. One thread copies pieces
// of 64 columns through a ring of stages.
//
// The kernel is launched while its predecessor runs (programmatic dependent launch). Weights do not depend on the
// predecessor, so the ring is filled with them at once: only x waits.
//
// RMSNorm is split between the products around it. A product that ends a block of the model (EPILOGUE_RESIDUAL) adds to
// the residual stream, stores the sum times the next norm's weight, and the sums of squares of the residual's rows. The
// next product multiplies each of its rows by 1 / rms, which commutes with a product.
//
// Before experts, a product with a lone row may have the router's as well: a block multiplies the 64 columns of `out` that
// it has by the router's. The experts' products add up these parts of the logits (lone_row.cuh). That saves a launch.
//
// Macros: TOKENS, 8, 16, 32, 64 or 128; SPLIT, 1, 2, 4 or 8; STAGES; OUT, type of `out`; EPILOGUE, one of those below;
// ACTIVATION, for EPILOGUE_GATED; EXPERTS, of a router, up to 256, with EPILOGUE_RESIDUAL; CANONICAL, 1 for the order of
// canonical_norm.cuh, which does not depend on TOKENS; PARTS, of the columns, which a block without SPLIT multiplies and adds
// up one after another, with the bits of as many blocks; BIAS, 1, with CANONICAL: biases are added to scale * product.

#include "activation.cuh"
#include "canonical_norm.cuh"
#include "hopper_cluster.cuh"
#include "residual_quad.cuh"
#include "wgmma.cuh"
#include "vector.cuh"

#define EPILOGUE_STORE 0     // out = scale * product
#define EPILOGUE_GATED 1     // out = activation(scale * gate) * (scale * up); W has the rows of gate, then those of up
#define EPILOGUE_RESIDUAL 2  // residual += product; out = residual * norm_weight; squares of the residual

#ifndef CANONICAL
#define CANONICAL 0
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef BIAS
#define BIAS 0
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = __nv_bfloat16;

constexpr int kStep = 64;  // columns of W in a stage: 128 bytes
constexpr int kRows = 64;
constexpr int kConsumers = 128;
constexpr int kThreads = kConsumers + 64;  // with a warp that copies and one that reads the scales
constexpr int kWeightBytes = kRows * 128;
constexpr int kInputBytes = TOKENS * 128;
constexpr int kStageBytes = kWeightBytes + kInputBytes;
constexpr int kAccumulators = TOKENS / 2;
constexpr int kPitch = kRows + 4;  // of a token's sums, such that lanes of a warp write to different banks
constexpr bool kGated = EPILOGUE == EPILOGUE_GATED;
constexpr int kOutputs = kGated ? kRows / 2 : kRows;  // per token
constexpr int kQuads = kOutputs / 4;
constexpr int kSlice = TOKENS / SPLIT;  // tokens that a block of a cluster writes
constexpr int kSquaresPitch = 128;
static_assert(SPLIT <= TOKENS && TOKENS % SPLIT == 0, "each block of a cluster writes some tokens");
static_assert(SPLIT == 1 || PARTS == 1, "sums of parts are added in one order");

#define REGISTERS_4 "%0, %1, %2, %3"
#define REGISTERS_8 REGISTERS_4 ", %4, %5, %6, %7"
#define REGISTERS_16 REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ACCUMULATORS_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA(SHAPE, REGISTERS, A, B, P, ...)                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE               \
                 ".f32.bf16.bf16 {" REGISTERS "}, " A ", " B ", p, 1, 1, 0, 0;\n}"                               \
                 : __VA_ARGS__                                                                                   \
                 : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate))

// d [64, TOKENS] (+)= a [64, 16] * b [TOKENS, 16]^T
__device__ __forceinline__ void multiply(float (&d)[kAccumulators], unsigned a, unsigned b, int accumulate) {
#if TOKENS == 8
    WGMMA("m64n8k16", REGISTERS_4, "%4", "%5", "%6", ACCUMULATORS_4(d));
#elif TOKENS == 16
    WGMMA("m64n16k16", REGISTERS_8, "%8", "%9", "%10", ACCUMULATORS_8(d, 0));
#elif TOKENS == 32
    WGMMA("m64n32k16", REGISTERS_16, "%16", "%17", "%18", ACCUMULATORS_8(d, 0), ACCUMULATORS_8(d, 8));
#elif TOKENS == 64
    WGMMA("m64n64k16", REGISTERS_WIDE_32, "%32", "%33", "%34", ACCUMULATORS_WIDE_32(d));
#elif TOKENS == 128
    WGMMA("m64n128k16", REGISTERS_WIDE_64, "%64", "%65", "%66", ACCUMULATORS_WIDE_64(d));
#else
#error "TOKENS is 8, 16, 32, 64 or 128"
#endif
}

__device__ __forceinline__ void pin_all(float (&d)[kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kAccumulators; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#if PARTS > 1
// Adds a part's sums to those of the parts before it.
__device__ __forceinline__ void add_part(float (&total)[kAccumulators], const float (&d)[kAccumulators], bool first) {
#pragma unroll
    for (int i = 0; i < kAccumulators; i++) total[i] = (first ? 0.0f : total[i]) + d[i];
}
#endif

// Loads four floats from the shared memory of block `rank` of this cluster.
__device__ __forceinline__ float4 load_shared(unsigned address, int rank) {
    float4 value;
    if (SPLIT > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// Shared memory: the ring, sums [TOKENS][kPitch], scales [TOKENS], a full and an empty barrier for each stage.
struct Shared {
    unsigned base;

    __device__ __forceinline__ unsigned weights(int stage) const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned inputs(int stage) const { return weights(stage) + kWeightBytes; }
    __device__ __forceinline__ unsigned sums() const { return base + STAGES * kStageBytes; }
    __device__ __forceinline__ unsigned scales() const { return sums() + TOKENS * kPitch * 4; }
    __device__ __forceinline__ unsigned full(int stage) const { return scales() + TOKENS * 4 + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
};

struct Problem {
    int first_tile;  // of this block, and from one of its tiles to its next
    int tile_step;
    int first_row;   // of x, of this block
    int tiles;    // of kRows rows of W
    int outputs;  // columns of `out`
    int pitch;    // elements between rows of `out`
    int tokens;   // rows of `out`
    int begin;    // columns of W that this block multiplies, in steps
    int end;

    __device__ __forceinline__ int part_end(int part) const { return end * (part + 1) / PARTS; }
};

struct Ends {
    const float* squares;     // [num_squares, kSquaresPitch]: sums of squares of x's rows, or null if x has no scale
    int num_squares;
    float inverse_width;      // 1 / (number of elements of a row of x)
    float eps;
    OUT* out;                 // [tokens, outputs], its rows apart by `pitch`
    Scalar* residual;         // [tokens, outputs]
    const Scalar* norm_weight;  // [outputs]
    float* new_squares;       // [tiles, kSquaresPitch]
    const Scalar* router;     // [EXPERTS, outputs]
    float* logits;            // [tiles, EXPERTS]: parts
    const Scalar* bias;       // [rows of W], if BIAS
};

#if EXPERTS
constexpr int kRouted = (EXPERTS + kConsumers - 1) / kConsumers;  // experts of a thread

// The router's weights for a tile's columns of `out`, which are loaded before the predecessors are waited for.
struct RouterPart {
    Vector<Scalar, 8> weights[kRouted][kRows / 8];

    __device__ __forceinline__ void load(const Scalar* router, int tile, int outputs) {
#pragma unroll
        for (int i = 0; i < kRouted; i++) {
            const int expert = i * kConsumers + threadIdx.x;
#pragma unroll
            for (int j = 0; j < kRows / 8; j++) {
                const int column = tile * kRows + j * 8;
                if (expert >= EXPERTS || column >= outputs) weights[i][j] = {};
                else weights[i][j] = load_vector<Scalar, 8>(router + static_cast<long long>(expert) * outputs + column);
            }
        }
    }
    // `row` [kRows] is in shared memory.
    __device__ __forceinline__ void multiply(const float* row, float* logits) const {
#pragma unroll
        for (int i = 0; i < kRouted; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kRows; j += 4) {
                const auto values = load_vector<float, 4>(row + j);
#pragma unroll
                for (int k = 0; k < 4; k++) sum += to_float(weights[i][j / 8].values[j % 8 + k]) * values.values[k];
            }
            const int expert = i * kConsumers + threadIdx.x;
            if (expert < EXPERTS) logits[expert] = sum;
        }
    }
};
#endif

__device__ __forceinline__ void copy_weights(Shared shared, const TensorMap* weights, const Problem& problem, int tile,
    int step, int stage) {
    if (kGated) {
        copy_tensor(shared.weights(stage), weights, 0, tile * kOutputs, step, shared.full(stage));
        copy_tensor(shared.weights(stage) + kWeightBytes / 2, weights, 0, problem.outputs + tile * kOutputs, step,
                    shared.full(stage));
    } else {
        copy_tensor(shared.weights(stage), weights, 0, tile * kRows, step, shared.full(stage));
    }
}

// Called by one thread. The first stages get their weights before the wait for predecessors.
__device__ __forceinline__ void produce(
    Shared shared, const TensorMap* weights, const TensorMap* inputs, const Problem& problem) {
    const int steps = problem.end - problem.begin, first_tile = problem.first_tile;
    const int ahead = min(STAGES, steps);
    for (int i = 0; i < ahead; i++) {
        barrier_expect(shared.full(i), kStageBytes);
        copy_weights(shared, weights, problem, first_tile, problem.begin + i, i);
    }
    wait_for_predecessors();
    for (int i = 0; i < ahead; i++) {
        copy_tensor(shared.inputs(i), inputs, 0, problem.first_row, problem.begin + i, shared.full(i));
    }
    Ring<STAGES> ring(1);
    for (int i = 0; i < ahead; i++) ring.advance();
    int done = ahead;
    for (int tile = first_tile; tile < problem.tiles; tile += problem.tile_step, done = 0) {
        for (int i = done; i < steps; i++, ring.advance()) {
            barrier_wait(shared.empty(ring.stage), ring.parity);
            barrier_expect(shared.full(ring.stage), kStageBytes);
            copy_weights(shared, weights, problem, tile, problem.begin + i, ring.stage);
            copy_tensor(
                shared.inputs(ring.stage), inputs, 0, problem.first_row, problem.begin + i, shared.full(ring.stage));
        }
    }
}

// Called by one warp: computes 1 / rms of each token. With few tokens, several lanes share a token, which shortens the
// chains of loads.
__device__ __forceinline__ void read_scales(float* scales, const Ends& ends) {
    constexpr int kLanes = CANONICAL ? kScaleLanes : TOKENS < 32 ? 32 / TOKENS : 1;
    const int lane = threadIdx.x % 32;
    wait_for_predecessors();
    for (int token = lane / kLanes; token < TOKENS; token += 32 / kLanes) {
#if CANONICAL
        const float* squares = ends.squares ? ends.squares + token : nullptr;
        const float sum = row_squares(squares, ends.num_squares, lane % kLanes);
        scales[token] = squares ? inverse_rms(sum, ends.inverse_width, ends.eps) : 1.0f;
#else
        float sum = 0.0f;
#pragma unroll 16
        for (int i = lane % kLanes; i < ends.num_squares; i += kLanes) {
            sum += __ldcg(ends.squares + i * kSquaresPitch + token);
        }
        sum = lane_sum(sum, kLanes);
        scales[token] = ends.squares ? rsqrtf(sum * ends.inverse_width + ends.eps) : 1.0f;
#endif
    }
}

// Stores the sums of this warpgroup's rows in shared memory, [token][row].
__device__ __forceinline__ void store_sums(float* sums, const float (&d)[kAccumulators]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[(j * 8 + token + i % 2) * kPitch + row + i / 2 * 8] = d[4 * j + i];
    }
}

// Adds up four adjacent sums of a token over the cluster.
__device__ __forceinline__ float4 add_up(Shared shared, int token, int row) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 parts[SPLIT];
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
        parts[rank] = load_shared(shared.sums() + (token * kPitch + row) * 4, rank);
    }
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
        total.x += parts[rank].x, total.y += parts[rank].y, total.z += parts[rank].z, total.w += parts[rank].w;
    }
    return total;
}

__device__ __forceinline__ Vector<float, 4> scaled(float4 v, float scale) {
    return Vector<float, 4>{{v.x * scale, v.y * scale, v.z * scale, v.w * scale}};
}

// Applies the epilogue to four adjacent outputs; returns the sum of the new residual's squares.
__device__ __forceinline__ float end_quad(Shared shared, const Ends& ends, const Problem& problem, int token, int row,
    long long column, float scale, float* written) {
    Vector<float, 4> values = scaled(add_up(shared, token, row), scale);
    Vector<OUT, 4> result;
    float squares = 0.0f;
#if BIAS
    add_biases(values, ends.bias + column);
#endif
#if EPILOGUE == EPILOGUE_GATED
    auto up = scaled(add_up(shared, token, row + kOutputs), scale);
#if BIAS
    add_biases(up, ends.bias + problem.outputs + column);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) values[j] = ACTIVATION(values[j]) * up[j];
#elif EPILOGUE == EPILOGUE_RESIDUAL
    const long long place = token * static_cast<long long>(problem.outputs) + column;
    squares = add_to_residual(values, ends.residual + place, ends.norm_weight + column);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) result[j] = from_float<OUT>(values[j]);
    store_vector(ends.out + token * static_cast<long long>(problem.pitch) + column, result);
#if EXPERTS
#pragma unroll
    for (int j = 0; j < 4; j++) written[row + j] = to_float(result[j]);
#endif
    return squares;
}

// Writes this block's tokens of a tile, of a lone row also to `written` [kRows]. All lanes of a warp take part, for the sum
// over a token's lanes.
__device__ __forceinline__ void end_tile(Shared shared, const float* scales, const Ends& ends, const Problem& problem,
    int tile, float* written) {
    const int first_token = (SPLIT > 1 ? cluster_rank() : 0) * kSlice;
    for (int base = 0; base < kSlice * kQuads; base += kConsumers) {
        const int index = base + threadIdx.x, token = first_token + index / kQuads, row = index % kQuads * 4;
        const long long column = static_cast<long long>(tile) * kOutputs + row;
        float squares = 0.0f;
        const bool present = index < kSlice * kQuads && token < problem.tokens;
        if (present && column < problem.outputs) {
            squares = end_quad(shared, ends, problem, token, row, column, scales[token], written);
        }
        if (EPILOGUE == EPILOGUE_RESIDUAL) {
            squares = lane_sum(squares, kQuads);
            if (present && row == 0) ends.new_squares[tile * kSquaresPitch + token] = squares;
        }
    }
}

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

__device__ __forceinline__ void consume(Shared shared, float* sums, const float* scales, const Ends& ends,
    const Problem& problem) {
    const bool leads = threadIdx.x == 0;
    const unsigned a = matrix_descriptor(shared.weights(0), 16);
    const unsigned b = matrix_descriptor(shared.inputs(0), 16);
    Ring<STAGES> ring(0);
    float* written = nullptr;
#if EXPERTS
    __shared__ float lone_row[kRows];
    written = lone_row;
    RouterPart router;
    const bool routes = SPLIT == 1 || cluster_rank() == 0;  // this block writes the row
    if (routes) router.load(ends.router, problem.first_tile, problem.outputs);
    if (threadIdx.x < kRows) lone_row[threadIdx.x] = 0.0f;  // columns that a last tile lacks
#endif
    wait_for_predecessors();  // the residual stream is read at the end
    for (int tile = problem.first_tile; tile < problem.tiles; tile += problem.tile_step) {
        float d[kAccumulators];
#if PARTS > 1
        float total[kAccumulators];
        int part = 0, part_begin = problem.begin, part_end = problem.part_end(0);
#else
        const int part_begin = problem.begin;
#endif
        int last_stage = 0;
        for (int step = problem.begin; step < problem.end; step++) {
#if PARTS > 1
            if (step == part_end) {
                wgmma_wait<0>();
                pin_all(d);
                add_part(total, d, part == 0);
                part_begin = part_end;
                part_end = problem.part_end(++part);
            }
#endif
            barrier_wait(shared.full(ring.stage), ring.parity);
            wgmma_fence();
            const unsigned place = ring.stage * (kStageBytes >> 4);
#pragma unroll
            for (int k = 0; k < kStep / 16; k++) {
                multiply(d, a + place + 2 * k, b + place + 2 * k, step > part_begin || k > 0);
            }
            wgmma_commit();
            if (step > problem.begin) {
                wgmma_wait<1>();
                if (leads) barrier_arrive(shared.empty(last_stage));
            }
            last_stage = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        pin_all(d);
        if (leads) barrier_arrive(shared.empty(last_stage));
#if PARTS > 1
        add_part(total, d, false);
        store_sums(sums, total);
#else
        store_sums(sums, d);
#endif
        if (SPLIT > 1) cluster_sync();
        else if (tile == problem.first_tile) asm volatile("bar.sync 2, %0;" ::"n"(kConsumers + 32) : "memory");  // scales
        else consumers_sync();
        end_tile(shared, scales, ends, problem, tile, written);
#if EXPERTS
        consumers_sync();
        if (routes) {
            if (tile != problem.first_tile) router.load(ends.router, tile, problem.outputs);
            router.multiply(lone_row, ends.logits + static_cast<long long>(tile) * EXPERTS);
        }
#endif
        if (SPLIT == 1) consumers_sync();
    }
}

// weights: planes of 64 columns of W in boxes of 64 rows (32 if gated); inputs: the same of x in boxes of TOKENS rows,
// of which the first `tokens` are used. With SPLIT > 1 the grid has a cluster for every tile. With CANONICAL there may be
// more rows than TOKENS, in `row_tiles` tiles of as many, by which the grid is divisible: blocks that need the same
// weights are neighbours.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(kThreads, 1) skinny_product(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, const float* squares,
    int num_squares, float inverse_width, float eps, OUT* out, Scalar* residual, const Scalar* norm_weight,
    float* new_squares, const Scalar* router, float* logits, int steps, int tiles, int outputs, int pitch, int tokens
#if CANONICAL
    , int row_tiles, const Scalar* bias
#endif
) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    if (threadIdx.x == kConsumers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release_successors();
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
#if CANONICAL
    const int cluster = blockIdx.x / SPLIT, first_row = cluster % row_tiles * TOKENS, first_tile = cluster / row_tiles;
    const int tile_step = gridDim.x / SPLIT / row_tiles;
    if (squares) squares += squares_place(first_row, num_squares);
    if (new_squares) new_squares += squares_place(first_row, tiles);
    if (residual) residual += static_cast<long long>(first_row) * outputs;
    out += static_cast<long long>(first_row) * pitch;
    tokens = min(TOKENS, tokens - first_row);
#else
    const int first_row = 0, first_tile = blockIdx.x / SPLIT, tile_step = gridDim.x / SPLIT;
    const Scalar* bias = nullptr;
#endif
    const Problem problem{first_tile, tile_step, first_row, tiles, outputs, pitch, tokens, steps * rank / SPLIT,
                          steps * (rank + 1) / SPLIT};
    const Ends ends{squares, num_squares, inverse_width, eps, out, residual, norm_weight, new_squares, router, logits, bias};
    float* sums = reinterpret_cast<float*>(shared_bytes + STAGES * kStageBytes);
    float* scales = sums + TOKENS * kPitch;
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp < kConsumers / 32) {
        consume(shared, sums, scales, ends, problem);
    } else if (warp == kConsumers / 32) {
        if (threadIdx.x % 32 == 0) produce(shared, &weights, &inputs, problem);
        __syncwarp();
        if (SPLIT > 1) cluster_sync();
    } else {
        read_scales(scales, ends);
        __syncwarp();
        if (SPLIT > 1) cluster_sync();
        else asm volatile("bar.arrive 2, %0;" ::"n"(kConsumers + 32) : "memory");
    }
    if (SPLIT > 1) cluster_sync();  // others may still read this block's sums
}

#endif
