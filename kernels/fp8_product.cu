// Products of a few rows with a matrix of e4m3, out = x W^T, for Hopper (sm_90a): as fast as the weights can be read.
//
// As skinny_product.cu, with these differences. A step is 128 columns, a tile 64 or 128 rows of W. A wgmma adds up fewer
// bits than float32 has, so a chain of them spans one step, and its sums are added in float32: in ascending steps, and in
// SPLIT parts, both given by the matrix alone. So a row's bits do not depend on the number of rows.
//
// fp8_rows.cu has rounded x to e4m3 before, and its codes are copied with the weights. With RESIDENT, each block rounds x
// itself, once, and keeps it, which saves that kernel; with more than a row or two, rounding takes longer than it saves.
//
// Macros: TOKENS, 8, 16, 32, 64 or 128; SPLIT, 1, 2, 4 or 8; GROUPS, 1 or 2, warpgroups with 64 rows of a tile each;
// STAGES; STEPS, most steps of a block; RESIDENT, which needs SPLIT 1; GROUPED, 1 for scales per 128 x 128 weights and 128 inputs of a row;
// STATIC, 1 for one given scale of inputs; BATCH, steps whose products are in flight; OUT, type of `out`; EPILOGUE, one of those below; ACTIVATION, for
// EPILOGUE_GATED.

#include "activation.cuh"
#include "fp8_rounding.cuh"
#include "hopper_cluster.cuh"
#include "wgmma.cuh"

#define EPILOGUE_STORE 0     // out = scale * product
#define EPILOGUE_GATED 1     // out = activation(scale * gate) * (scale * up); W has the rows of gate, then those of up
#define EPILOGUE_RESIDUAL 2  // residual += product; out = residual * norm_weight; squares of the residual

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = __nv_bfloat16;

constexpr int kColumns = 128;  // of W in a step: 128 bytes
constexpr int kRows = 64 * GROUPS;
constexpr int kConsumers = 128 * GROUPS;
constexpr int kWarps = kConsumers / 32;
constexpr int kThreads = kConsumers + 64;  // with a warp that copies and one that reads the rows' factors
constexpr int kWeightBytes = kRows * kColumns;
constexpr int kInputBytes = TOKENS * kColumns;
constexpr int kStageBytes = kWeightBytes + (RESIDENT ? 0 : kInputBytes);
constexpr int kAccumulators = TOKENS / 2;
constexpr int kPitch = kRows + 4;  // of a token's sums, such that lanes of a warp write to different banks
constexpr bool kGated = EPILOGUE == EPILOGUE_GATED;
constexpr int kOutputs = kGated ? kRows / 2 : kRows;  // per token
constexpr int kQuads = kOutputs / 4;
constexpr int kSlice = TOKENS / SPLIT;  // tokens that a block of a cluster writes
constexpr int kSquaresPitch = 128;
constexpr int kSegment = 512;  // columns of a row that a warp rounds at once
constexpr int kBatch = 8;      // segments in flight per warp
static_assert(!RESIDENT || SPLIT == 1, "a block that rounds x sees whole rows");
static_assert(SPLIT <= TOKENS && TOKENS % SPLIT == 0, "each block of a cluster writes some tokens");

#define WGMMA(SHAPE, REGISTERS, A, B, P, ...)                                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE               \
                 ".f32.e4m3.e4m3 {" REGISTERS "}, " A ", " B ", p, 1, 1;\n}"                                     \
                 : __VA_ARGS__                                                                                   \
                 : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate))

// d [64, TOKENS] (+)= a [64, 32] * b [TOKENS, 32]^T
__device__ __forceinline__ void multiply(float (&d)[kAccumulators], unsigned a, unsigned b, int accumulate) {
#if TOKENS == 8
    WGMMA("m64n8k32", REGISTERS_WIDE_4, "%4", "%5", "%6", ACCUMULATORS_WIDE_4(d));
#elif TOKENS == 16
    WGMMA("m64n16k32", REGISTERS_WIDE_8, "%8", "%9", "%10", ACCUMULATORS_WIDE_8(d));
#elif TOKENS == 32
    WGMMA("m64n32k32", REGISTERS_WIDE_16, "%16", "%17", "%18", ACCUMULATORS_WIDE_16(d));
#elif TOKENS == 64
    WGMMA("m64n64k32", REGISTERS_WIDE_32, "%32", "%33", "%34", ACCUMULATORS_WIDE_32(d));
#elif TOKENS == 128
    WGMMA("m64n128k32", REGISTERS_WIDE_64, "%64", "%65", "%66", ACCUMULATORS_WIDE_64(d));
#else
#error "TOKENS is 8, 16, 32, 64 or 128"
#endif
}

__device__ __forceinline__ void pin_all(float (&d)[kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kAccumulators; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Loads four floats from the shared memory of block `rank` of this cluster.
__device__ __forceinline__ float4 load_shared(unsigned address, int rank) {
    float4 value;
#if SPLIT > 1
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
#else
    const uint4 words = load_shared(address);
    value = make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                        __uint_as_float(words.w));
#endif
    return value;
}

// Shared memory: the ring; resident inputs [STEPS][TOKENS][128] e4m3; sums [TOKENS][kPitch]; of tokens, largest
// magnitudes, scales, 1 / scale and factors; scales of groups [STEPS][TOKENS]; two barriers for each stage.
struct Shared {
    unsigned base;

    static constexpr int kInputs = STAGES * kStageBytes;
    static constexpr int kSums = kInputs + (RESIDENT ? STEPS * kInputBytes : 0);
    static constexpr int kLargest = kSums + TOKENS * kPitch * 4;
    static constexpr int kScales = kLargest + TOKENS * 4;
    static constexpr int kInverses = kScales + TOKENS * 4;
    static constexpr int kFactors = kInverses + TOKENS * 4;
    static constexpr int kGroups = kFactors + TOKENS * 4;
    static constexpr int kBarriers = kGroups + (GROUPED ? STEPS * TOKENS * 4 : 0);

    __device__ __forceinline__ unsigned weights(int stage) const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned inputs(int place) const {  // of a stage, or of a step if RESIDENT
        return RESIDENT ? base + kInputs + place * kInputBytes : weights(place) + kWeightBytes;
    }
    __device__ __forceinline__ unsigned full(int stage) const { return base + kBarriers + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
};

struct Problem {
    int width;    // columns of W
    int tiles;    // of kRows rows of W
    int outputs;  // columns of `out`
    int tokens;   // rows of `out`
    int begin;    // columns of W that this block multiplies, in steps
    int steps;
};

struct Inputs {
    const Scalar* rows;      // [tokens, width], if RESIDENT
    const float* factors;    // [tokens], else
    const float* scales;     // [steps of W, kSquaresPitch]: scales of groups, else
    const float* squares;    // [num_squares, kSquaresPitch]: sums of squares of x's rows, or null if x has no factor
    int num_squares;
    float inverse_width;     // 1 / (number of elements of a row of x)
    float eps;
    float bound;             // see fp8_rows.cu
};

struct Ends {
    const float* weight_scales;  // [rows of W], or [rows / 128, columns / 128] if GROUPED
    OUT* out;                    // [tokens, outputs]
    int out_stride;              // elements between its rows
    Scalar* residual;            // [tokens, outputs]
    const Scalar* norm_weight;   // [outputs]
    float* new_squares;          // [outputs / 64, kSquaresPitch]
};

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(1), "n"(kConsumers) : "memory");
}

// Waits for the factors of tokens.
__device__ __forceinline__ void factors_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(2), "n"(kConsumers + 32) : "memory");
}

__device__ __forceinline__ void copy_weights(Shared shared, const TensorMap* weights, const Problem& problem, int tile,
    int step, int stage) {
    const int column = (problem.begin + step) * kColumns;
    if (kGated) {
        copy_tensor(shared.weights(stage), weights, column, tile * kOutputs, 0, shared.full(stage));
        copy_tensor(shared.weights(stage) + kWeightBytes / 2, weights, column, problem.outputs + tile * kOutputs, 0,
                    shared.full(stage));
    } else {
        copy_tensor(shared.weights(stage), weights, column, tile * kRows, 0, shared.full(stage));
    }
}

// Brings weights to L2.
__device__ __forceinline__ void prefetch_weights(const TensorMap* weights, const Problem& problem, int tile, int step) {
    const int column = (problem.begin + step) * kColumns;
    prefetch_tensor(weights, column, tile * kOutputs, 0);
    if (kGated) prefetch_tensor(weights, column, problem.outputs + tile * kOutputs, 0);
}

__device__ __forceinline__ void copy_inputs(
    Shared shared, const TensorMap* inputs, const Problem& problem, int step, int stage) {
    if (!RESIDENT) {
        const int column = (problem.begin + step) * kColumns;
        copy_tensor(shared.inputs(stage), inputs, column, 0, 0, shared.full(stage));
    }
}

// Called by one thread. The first stages get their weights before the wait for predecessors; weights alone never wait.
__device__ __forceinline__ void produce(
    Shared shared, const TensorMap* weights, const TensorMap* inputs, const Problem& problem) {
    const int first_tile = blockIdx.x / SPLIT, ahead = min(STAGES, problem.steps);
    for (int i = 0; i < ahead; i++) {
        barrier_expect(shared.full(i), kStageBytes);
        copy_weights(shared, weights, problem, first_tile, i, i);
    }
    for (int i = ahead; i < min(ahead + PREFETCH, problem.steps); i++) prefetch_weights(weights, problem, first_tile, i);
    if (!RESIDENT) wait_for_predecessors();
    Ring<STAGES> ring(1);
    for (int i = 0; i < ahead; i++, ring.advance()) copy_inputs(shared, inputs, problem, i, i);
    int done = ahead;
    for (int tile = first_tile; tile < problem.tiles; tile += gridDim.x / SPLIT, done = 0) {
        for (int i = done; i < problem.steps; i++, ring.advance()) {
            barrier_wait(shared.empty(ring.stage), ring.parity);
            barrier_expect(shared.full(ring.stage), kStageBytes);
            copy_weights(shared, weights, problem, tile, i, ring.stage);
            copy_inputs(shared, inputs, problem, i, ring.stage);
        }
    }
    if (RELEASE > 0) release_successors();
}

// Called by one warp: reads or computes the factor of each token.
__device__ __forceinline__ void read_factors(float* factors, const Inputs& inputs, int tokens) {
    const int lane = threadIdx.x % 32;
    wait_for_predecessors();
#if RESIDENT
    for (int token = lane / 4; token < TOKENS; token += 8) {
        factors[token] = inverse_rms(
            inputs.squares, inputs.num_squares, kSquaresPitch, token, inputs.inverse_width, inputs.eps);
    }
#else
    for (int token = lane; token < tokens; token += 32) factors[token] = __ldcg(inputs.factors + token);
#endif
}

// Calls use(row, chunk, numbers) for each 16 numbers of this block's columns of x that this lane has, chunks counted from
// the block's first. All lanes of a warp call it for the same row. `batch` keeps what was loaded last.
template <typename Use>
__device__ __forceinline__ void for_each_chunk(
    Chunk (&batch)[kBatch], bool is_loaded, const Inputs& inputs, const Problem& problem, Use use) {
    const int lane = threadIdx.x % 32, segments = (problem.steps * kColumns + kSegment - 1) / kSegment;
    const int items = problem.tokens * segments;
    const Scalar* first = inputs.rows + problem.begin * kColumns;
    for (int base = threadIdx.x / 32; base < items; base += kWarps * kBatch) {
        if (!is_loaded) {
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                const int item = base + i * kWarps, row = item / segments;
                const int chunk = (item - row * segments) * 32 + lane, column = chunk * 16;
                const bool present = item < items && column < problem.steps * kColumns &&
                                     problem.begin * kColumns + column < problem.width;
                batch[i] = load_chunk(first + row * static_cast<long long>(problem.width) + column, present);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            const int item = base + i * kWarps, row = item / segments;
            if (item < items) use(row, (item - row * segments) * 32 + lane, batch[i]);
        }
    }
}

__device__ __forceinline__ void keep_codes(
    Shared shared, const Problem& problem, int row, int chunk, const Chunk& numbers, float factor, float scale,
    float inverse) {
    if (chunk / 8 >= problem.steps) return;
    const unsigned place = shared.inputs(chunk / 8) + row * kColumns + ((chunk % 8 ^ row % 8) << 4);
    store_shared(place, codes_of(numbers, factor, scale, inverse));
}

// The consumers' tables in shared memory.
struct Tables {
    unsigned* largest;  // [TOKENS] bits of bf16
    float* scales;      // [TOKENS]
    float* inverses;    // [TOKENS]
    float* factors;     // [TOKENS]
    float* groups;      // [STEPS][TOKENS]
};

// Computes the scale of each row from its largest magnitude.
__device__ __forceinline__ void make_scales(const Tables& tables, const Inputs& inputs, int tokens) {
    __syncwarp();
    consumers_sync();
    for (int token = threadIdx.x; token < tokens; token += kConsumers) {
        tables.scales[token] = scale_of(tables.largest[token], inputs.bound);
        tables.inverses[token] = 1.0f / tables.scales[token];
    }
    consumers_sync();
}

// Called by the consumers: rounds this block's columns of x into shared memory, with their scales.
__device__ __forceinline__ void round_inputs(
    Shared shared, const Tables& tables, const Inputs& inputs, const Problem& problem) {
    Chunk batch[kBatch];
#if STATIC
    for_each_chunk(batch, false, inputs, problem, [&](int row, int chunk, const Chunk& numbers) {
        keep_codes(shared, problem, row, chunk, numbers, tables.factors[row], inputs.bound, 1.0f / inputs.bound);
    });
#elif GROUPED
    for_each_chunk(batch, false, inputs, problem, [&](int row, int chunk, const Chunk& numbers) {
        unsigned most = largest_bits(numbers);
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) most = max(most, __shfl_xor_sync(~0u, most, distance));
        const float scale = scale_of(most, inputs.bound);
        if (chunk % 8 == 0 && chunk / 8 < problem.steps) tables.groups[chunk / 8 * TOKENS + row] = scale;
        keep_codes(shared, problem, row, chunk, numbers, 1.0f, scale, 1.0f / scale);
    });
#else
    for_each_chunk(batch, false, inputs, problem, [&](int row, int chunk, const Chunk& numbers) {
        const unsigned most = __reduce_max_sync(~0u, largest_bits(numbers));
        if (threadIdx.x % 32 == 0) atomicMax(tables.largest + row, most);
    });
    make_scales(tables, inputs, problem.tokens);
    const bool is_loaded = problem.tokens * ((problem.steps * kColumns + kSegment - 1) / kSegment) <= kWarps * kBatch;
    for_each_chunk(batch, is_loaded, inputs, problem, [&](int row, int chunk, const Chunk& numbers) {
        keep_codes(shared, problem, row, chunk, numbers, 1.0f, tables.scales[row], tables.inverses[row]);
    });
#endif
    fence_async_proxy();
    consumers_sync();
}

// Copies the groups' scales of inputs that were rounded before.
__device__ __forceinline__ void copy_scales(const Tables& tables, const Inputs& inputs, const Problem& problem) {
    for (int i = threadIdx.x; i < problem.steps * TOKENS; i += kConsumers) {
        const int step = i / TOKENS, token = i % TOKENS;
        const bool present = token < problem.tokens;
        tables.groups[i] = present ? __ldcg(inputs.scales + (problem.begin + step) * kSquaresPitch + token) : 0.0f;
    }
    consumers_sync();
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
        parts[rank] = load_shared(shared.base + Shared::kSums + (token * kPitch + row) * 4, rank);
    }
#pragma unroll
    for (int rank = 0; rank < SPLIT; rank++) {
        total.x += parts[rank].x, total.y += parts[rank].y, total.z += parts[rank].z, total.w += parts[rank].w;
    }
    return total;
}

// Scales of the rows of W whose sums this thread ends.
struct RowScales {
    float4 gate;  // or of the only matrix
    float4 up;
};

__device__ __forceinline__ RowScales load_row_scales(const Ends& ends, const Problem& problem, int column) {
    const float4 ones = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    if (GROUPED || column >= problem.outputs) return {ones, ones};
    const float* scales = ends.weight_scales + column;
    return {__ldg(reinterpret_cast<const float4*>(scales)),
            kGated ? __ldg(reinterpret_cast<const float4*>(scales + problem.outputs)) : ones};
}

__device__ __forceinline__ Vector<float, 4> scaled(float4 v, float factor, const float4& scales) {
    return Vector<float, 4>{
        {v.x * factor * scales.x, v.y * factor * scales.y, v.z * factor * scales.z, v.w * factor * scales.w}};
}

// Applies the epilogue to four adjacent outputs; returns the sum of the new residual's squares.
__device__ __forceinline__ float end_quad(Shared shared, const Ends& ends, const Problem& problem, int token, int row,
    long long column, float factor, const RowScales& row_scales) {
    Vector<float, 4> values = scaled(add_up(shared, token, row), factor, row_scales.gate);
    Vector<OUT, 4> result;
    float squares = 0.0f;
#if EPILOGUE == EPILOGUE_GATED
    const auto up = scaled(add_up(shared, token, row + kOutputs), factor, row_scales.up);
#pragma unroll
    for (int j = 0; j < 4; j++) values[j] = ACTIVATION(values[j]) * up[j];
#elif EPILOGUE == EPILOGUE_RESIDUAL
    const long long place = token * static_cast<long long>(problem.outputs) + column;
    auto residual = load_vector<Scalar, 4>(ends.residual + place);
    const auto weight = load_vector<Scalar, 4>(ends.norm_weight + column);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        residual[j] = from_float<Scalar>(to_float(residual[j]) + values[j]);
        const float rounded = to_float(residual[j]);
        squares += rounded * rounded;
        values[j] = rounded * to_float(weight[j]);
    }
    store_vector(ends.residual + place, residual);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) result[j] = from_float<OUT>(values[j]);
    store_vector(ends.out + token * static_cast<long long>(ends.out_stride) + column, result);
    return squares;
}

// What a token's sums are multiplied by, beside the scales of W and of groups.
__device__ __forceinline__ float token_factor(const Tables& tables, int token, float bound) {
    if (!RESIDENT || GROUPED) return tables.factors[token];
    return STATIC ? bound : tables.scales[token] * tables.factors[token];
}

// Writes this block's tokens of a tile. All lanes of a warp take part, for the sum over a token's lanes.
__device__ __forceinline__ void end_tile(Shared shared, const Tables& tables, const Ends& ends, const Problem& problem,
    int tile, const RowScales& row_scales, float bound) {
    const int first_token = (SPLIT > 1 ? cluster_rank() : 0) * kSlice;
    for (int base = 0; base < kSlice * kQuads; base += kConsumers) {
        const int index = base + threadIdx.x, token = first_token + index / kQuads, row = index % kQuads * 4;
        const long long column = static_cast<long long>(tile) * kOutputs + row;
        float squares = 0.0f;
        const bool present = index < kSlice * kQuads && token < problem.tokens && column < problem.outputs;
        if (present) {
            const float factor = token_factor(tables, token, bound);
            squares = end_quad(shared, ends, problem, token, row, column, factor, row_scales);
        }
        if (EPILOGUE == EPILOGUE_RESIDUAL) {
            squares = lane_sum(squares, 16);  // of 64 rows
            if (present && row % 64 == 0) ends.new_squares[column / 64 * kSquaresPitch + token] = squares;
        }
    }
}

// Adds a step's sums. `groups` has the scales of the step's inputs; `weight_scale` is that of the warp's rows.
__device__ __forceinline__ void promote(
    float (&totals)[kAccumulators], const float (&part)[kAccumulators], const float* groups, float weight_scale) {
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
#if GROUPED
        const auto scales = load_vector<float, 2>(groups + j * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            totals[4 * j + i] = fmaf(part[4 * j + i], scales[i % 2] * weight_scale, totals[4 * j + i]);
        }
#else
#pragma unroll
        for (int i = 0; i < 4; i++) totals[4 * j + i] += part[4 * j + i];
#endif
    }
}

// The scales of blocks of W along the rows of this warp, of this block's steps; null if not GROUPED.
__device__ __forceinline__ const float* block_scales(const Ends& ends, const Problem& problem, int tile) {
    if (!GROUPED) return nullptr;
    const int local = threadIdx.x / 32 * 16;
    const int row = kGated && local >= kOutputs ? problem.outputs + tile * kOutputs + local - kOutputs
                                                : tile * kOutputs + local;
    const int last = (kGated ? 2 : 1) * problem.outputs - 1, columns = (problem.width + kColumns - 1) / kColumns;
    return ends.weight_scales + min(row, last) / 128 * static_cast<long long>(columns) + problem.begin;
}

template <int Value>
struct Count {
    static constexpr int value = Value;
};

__device__ __forceinline__ void consume(
    Shared shared, float* sums, const Tables& tables, const Inputs& inputs, const Ends& ends, const Problem& problem) {
    const bool leads = threadIdx.x % 128 == 0;
    const unsigned a = matrix_descriptor(shared.weights(0) + threadIdx.x / 128 * 64 * kColumns, 16);
    const unsigned b = matrix_descriptor(shared.inputs(0), 16);
    Ring<STAGES> ring(0);
    int freed = 0;
    float totals[kAccumulators], parts[BATCH][kAccumulators];
    const auto start = [&](float (&part)[kAccumulators], int step) {
        barrier_wait(shared.full(ring.stage), ring.parity);
        wgmma_fence();
        const unsigned stage = ring.stage * (kStageBytes >> 4);
        const unsigned input = RESIDENT ? step * (kInputBytes >> 4) : stage;
#pragma unroll
        for (int k = 0; k < kColumns / 32; k++) multiply(part, a + stage + 2 * k, b + input + 2 * k, k > 0);
        wgmma_commit();
        ring.advance();
    };
    for (int tile = blockIdx.x / SPLIT; tile < problem.tiles; tile += gridDim.x / SPLIT) {
        const float* scales = block_scales(ends, problem, tile);
        const RowScales row_scales = load_row_scales(ends, problem, tile * kOutputs + threadIdx.x % kQuads * 4);
#pragma unroll
        for (int i = 0; i < kAccumulators; i++) totals[i] = 0.0f;
        // `parts` of consecutive steps, whose products are in flight together.
        const auto multiply_steps = [&](int first, auto count) {
            float block[BATCH];
#pragma unroll
            for (int i = 0; i < count.value; i++) block[i] = GROUPED ? __ldg(scales + first + i) : 1.0f;
#pragma unroll
            for (int i = 0; i < count.value; i++) start(parts[i], first + i);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < count.value; i++) {
                pin_all(parts[i]);
                if (leads) barrier_arrive(shared.empty(freed));
                if (++freed == STAGES) freed = 0;
            }
#pragma unroll
            for (int i = 0; i < count.value; i++) {
                promote(totals, parts[i], tables.groups + (first + i) * TOKENS, block[i]);
            }
        };
        int step = 0;
        for (; step + BATCH <= problem.steps; step += BATCH) multiply_steps(step, Count<BATCH>());
        if (BATCH > 1) {
            for (; step < problem.steps; step++) multiply_steps(step, Count<1>());
        }
        store_sums(sums, totals);
        if (SPLIT > 1) cluster_sync();
        else consumers_sync();
        end_tile(shared, tables, ends, problem, tile, row_scales, inputs.bound);
        if (SPLIT == 1) consumers_sync();
    }
}

// weights: W's bytes in boxes of 128 columns and kRows rows (half of them if gated); inputs, unless RESIDENT: codes of x
// in boxes of 128 columns and TOKENS rows. With SPLIT > 1 the grid has a cluster for every tile.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(kThreads, 1) fp8_product(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap input_codes, const Scalar* rows,
    const float* input_factors, const float* input_scales, const float* weight_scales, const float* squares,
    int num_squares, float inverse_width, float eps, float bound, OUT* out, Scalar* residual,
    const Scalar* norm_weight, float* new_squares, int width, int tiles, int outputs, int out_stride, int tokens) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    const Tables tables{
        reinterpret_cast<unsigned*>(shared_bytes + Shared::kLargest),
        reinterpret_cast<float*>(shared_bytes + Shared::kScales),
        reinterpret_cast<float*>(shared_bytes + Shared::kInverses),
        reinterpret_cast<float*>(shared_bytes + Shared::kFactors),
        reinterpret_cast<float*>(shared_bytes + Shared::kGroups)};
    if (threadIdx.x == kConsumers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < TOKENS) tables.largest[threadIdx.x] = 0;
    __syncthreads();
    if (RELEASE == 0 || (RELEASE == 2 && threadIdx.x / 32 != kWarps)) release_successors();
    const int rank = SPLIT > 1 ? cluster_rank() : 0, steps = (width + kColumns - 1) / kColumns;
    const int begin = steps * rank / SPLIT, end = steps * (rank + 1) / SPLIT;
    const Problem problem{width, tiles, outputs, tokens, begin, end - begin};
    const Inputs inputs{rows, input_factors, input_scales, squares, num_squares, inverse_width, eps, bound};
    const Ends ends{weight_scales, out, out_stride, residual, norm_weight, new_squares};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp < kWarps) {
        wait_for_predecessors();  // the residual stream is read at the end
        if (STATIC && RESIDENT) factors_sync();
        if (RESIDENT) round_inputs(shared, tables, inputs, problem);
        else if (GROUPED) copy_scales(tables, inputs, problem);
        if (!(STATIC && RESIDENT)) factors_sync();
        consume(shared, reinterpret_cast<float*>(shared_bytes + Shared::kSums), tables, inputs, ends, problem);
    } else if (warp == kWarps) {
        if (threadIdx.x % 32 == 0) produce(shared, &weights, &input_codes, problem);
        __syncwarp();
        if (SPLIT > 1) cluster_sync();
    } else {
        read_factors(tables.factors, inputs, tokens);
        __syncwarp();
        asm volatile("bar.arrive %0, %1;" ::"n"(2), "n"(kConsumers + 32) : "memory");
        if (SPLIT > 1) cluster_sync();
    }
    if (SPLIT > 1) cluster_sync();  // others may still read this block's sums
}

#endif
