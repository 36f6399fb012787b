// Products of tens or hundreds of rows with a matrix of 4-bit numbers, out = x W^T, for Hopper (sm_90a): each weight
// becomes a 16-bit number once for TOKENS rows of x, code times scale rounded once, as in kernels/int4_dequantize.cu.
//
// W's rows are the product's 64-row operand, in registers, and x's rows its columns (out^T = W x^T). A block has TOKENS
// rows of x and STRIPS times 16 rows of W (where gated, half of them gate's and half up's). One warp copies x and codes
// through rings of stages. A warpgroup for each 64 rows of W turns the codes of some columns into numbers while it
// multiplies those before.
//
// With SPLIT > 1, adjacent blocks have parts of W's columns. Each leaves its sums in `room`, waits for the others, and
// ends some of the tokens: blocks of a launch start in order, so none waits for one that cannot start. With SHARES, each
// block has the same number of steps, of several tiles one after another; sums of a tile that others have begun are left
// in `room` too. A part's sums are added ascending from a column on that depends on the tile, and the parts in order.
//
// The kernel is launched while its predecessor runs (programmatic dependent launch): codes are copied before x is there.
//
// Macros: those of int4_tile.cuh and product_ends.cuh, of which TILE_ROWS is 16 * STRIPS, PARTS and PARTS_IN_MEMORY 1, and
// with SHARES SLICE 64; TOKENS, 64, 128, 192 or 256; STRIPS, 4, 8, 12 or 16; SPLIT, 1 to 8; SHARES, 1, for which SPLIT is
// 1, or 0; CHUNK, columns whose numbers are in registers at a time, 32 or 64; INPUT_STAGES, of 64 columns; CODE_STAGES,
// of 128.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "int4_wide.cuh"

// Called by the threads that multiply.
__device__ __forceinline__ void meet() { asm volatile("bar.sync %0, %1;" ::"r"(2), "r"(kConsumers) : "memory"); }

// The rows from a token on.
__device__ __forceinline__ Ends rows_of(Ends ends, int token) {
    ends.out += token * static_cast<long long>(ends.pitch);
    ends.tokens = min(TOKENS, ends.tokens - token);
    if (EPILOGUE == EPILOGUE_RESIDUAL) {
        ends.residual += token * static_cast<long long>(ends.outputs);
        ends.new_squares += token;
    }
    return ends;
}

#if SHARES
// Sums that blocks leave for others, [blocks][TOKENS / 8][kConsumers], and flags [blocks], zero between launches.
struct Room {
    float4* sums;
    int* flags;

    __device__ __forceinline__ float4* of(int block) const { return sums + block * (TOKENS / 8) * kConsumers + threadIdx.x; }

    __device__ __forceinline__ void keep(const float (&sums)[TOKENS / 2], int block) const {
        float4* place = of(block);
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) {
            place[i * kConsumers] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
        }
        meet();
        if (threadIdx.x == 0) {
            __threadfence();  // of the whole block's sums: those before the barrier
            atomicAdd(flags + block, 1);
        }
    }

    // Waits for what a block keeps, and adds it.
    __device__ __forceinline__ void add(float (&sums)[TOKENS / 2], int block) const {
        if (threadIdx.x == 0) {
            while (atomicAdd(flags + block, 0) == 0) {
            }
            atomicAdd(flags + block, -1);
            __threadfence();
        }
        meet();
        const float4* place = of(block);
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) {
            const float4 kept = __ldcg(place + i * kConsumers);
            sums[4 * i] += kept.x, sums[4 * i + 1] += kept.y, sums[4 * i + 2] += kept.z, sums[4 * i + 3] += kept.w;
        }
    }
};

// Ends a tile, some tokens after others.
template <int First>
__device__ __forceinline__ void end_slices(
    const Consumer& consumer, const float (&sums)[TOKENS / 2], const Ends& ends, const Piece& piece) {
    consumer.store<First, SLICE>(sums, reinterpret_cast<float*>(consumer.shared.sums()));
    meet();
    end_tile(TileSums{consumer.shared.sums()}, consumer.shared.scales() + First, rows_of(ends, piece.token + First), piece.tile,
             threadIdx.x, kConsumers);
    meet();
    if constexpr (First + SLICE < TOKENS) end_slices<First + SLICE>(consumer, sums, ends, piece);
}
#elif SPLIT > 1
// Says that this block's sums are in memory, and waits for those of the others. `flag` has those that have come, and those
// that have gone in its upper half; it is zero between launches.
__device__ __forceinline__ void meet_others(int* flag) {
    meet();
    if (threadIdx.x == 0) {
        __threadfence();  // of the whole block's sums: those before the barrier
        atomicAdd(flag, 1);
        while ((atomicAdd(flag, 0) & 0xffff) < SPLIT) {
        }
        if (atomicAdd(flag, 0x10000) >> 16 == SPLIT - 1) atomicAdd(flag, -SPLIT * 0x10001);
        __threadfence();
    }
    meet();
}
#endif

// Called by the threads that multiply.
__device__ __forceinline__ void multiply(
    Shared shared, int group, const Problem& problem, Pieces pieces, int tiles, const Ends& ends, char* room, int* flags) {
    Consumer consumer{shared, group};
    float sums[TOKENS / 2];
    for (bool is_first = true; pieces.more(); is_first = false) {
        const Piece piece = pieces.take();
        consumer.consume(sums, piece.length);
        if (is_first) {
            wait_for_predecessors();  // of what is read and written from here on
            asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(kConsumers + 32) : "memory");  // scales; all have read the rings
        }
#if SHARES
        const Room kept{reinterpret_cast<float4*>(room), flags};
        const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
        if (piece.first > 0) {
            kept.keep(sums, block);
            continue;
        }
        const int last = pieces.next + problem.steps - piece.length;  // of the tile
        for (int other = block + 1; pieces.begin(other, tiles) < last; other++) kept.add(sums, other);
        end_slices<0>(consumer, sums, ends, piece);
#else
        const int index = static_cast<int>(blockIdx.x) / SPLIT;
        char* own = SPLIT > 1 ? room + index * (SPLIT * static_cast<long long>(kSumBytes)) : shared.sums();
        consumer.store<0, TOKENS>(sums, reinterpret_cast<float*>(own + split_rank() * kSumBytes));
#if SPLIT > 1
        meet_others(flags + index);
#else
        meet();
#endif
        end_tile(TileSums{own}, shared.scales(), rows_of(ends, piece.token), piece.tile, threadIdx.x, kConsumers);
#endif
    }
}

// Arguments: those of int4_product, for any number of tokens where the epilogue is not that of the residual stream; room,
// with SPLIT > 1 [tiles and tokens][SPLIT][TOKENS][kPitch]; flags, one for each tile and TOKENS tokens. The grid has SPLIT
// blocks for each, or with SHARES no more than there are steps.
extern "C" __global__ void __launch_bounds__(kThreads, 1) int4_wide(
    const __grid_constant__ TensorMap inputs, const char* matrix, const float* squares, int num_squares,
    float inverse_width, float eps, OUT* out, const SCALAR* bias, SCALAR* residual,
    const SCALAR* norm_weight, float* new_squares, int steps, int tiles, int outputs, int pitch, int tokens, char* room,
    int* flags) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared(shared_bytes);
    if (threadIdx.x == kConsumers) shared.init_barriers();
    __syncthreads();
    release_successors();
    const Problem problem{steps, tiles * kTileStrips / kHalves, (tokens + TOKENS - 1) / TOKENS};
    const int own_tiles = (problem.strips + kOwnStrips - 1) / kOwnStrips;
    const Pieces pieces(problem, own_tiles);
    const Ends ends{squares,     num_squares, inverse_width, eps,   out,    bias,
                    residual, norm_weight, new_squares,   outputs, pitch, tokens};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp >= kConsumers / 32) {
        if (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
        Producer producer(shared, matrix, &inputs, problem, pieces);
        if (warp == kConsumers / 32) producer.produce_inputs();
        if (warp == kConsumers / 32 + 1) {
            producer.produce_codes([&] {
                read_scales(shared.scales(), ends);
                __syncwarp();
                asm volatile("bar.arrive %0, %1;" ::"r"(1), "r"(kConsumers + 32) : "memory");
            });
        }
    } else {
        if (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        multiply(shared, warp / 4, problem, pieces, own_tiles, ends, room, flags);
    }
}

#endif
