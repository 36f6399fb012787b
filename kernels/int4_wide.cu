// Products of tens or hundreds of rows with a matrix of 4-bit numbers, out = x W^T, for Hopper (sm_90a): each weight
// becomes a 16-bit number once for TOKENS rows of x, code times scale rounded once, as in kernels/int4_dequantize.cu.
//
// W's rows are the product's 64-row operand, in registers, and x's rows its columns (out^T = W x^T). A block has TOKENS
// rows of x and STRIPS times 16 rows of W (where gated, half of them gate's and half up's). One warp copies x and codes
// through rings of stages. A warpgroup for each 64 rows of W turns the codes of some columns into numbers while it
// multiplies those before.
//
// SHARERS blocks, a cluster, have adjacent tiles and the same rows of x, which they copy for each other. With SPLIT > 1,
// adjacent ones have parts of W's columns. Each leaves its sums in `room`, waits for the others, and
// ends some of the tokens: blocks of a launch start in order, so none waits for one that cannot start. A part's sums are
// added ascending from a column on that depends on the tile, and the parts in order.
//
// The kernel is launched while its predecessor runs (programmatic dependent launch): codes are copied before x is there.
//
// Macros: those of int4_tile.cuh and product_ends.cuh, of which TILE_ROWS is 16 * STRIPS, PARTS and PARTS_IN_MEMORY 1;
// TOKENS, 64, 128, 192 or 256; STRIPS, 4, 8, 12 or 16; SPLIT, 1 to 8; SHARERS, 1 or 2; CHUNK, columns whose numbers are
// in registers at a time, 32 or 64; INPUT_STAGES, of 64 columns; CODE_STAGES, of 128.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "int4_wide.cuh"

#if SPLIT > 1
// Called by the threads that multiply: says that this block's sums are in memory, and waits for those of the others.
// `flag` has those that have come, and those that have gone in its upper half; it is zero between launches.
__device__ __forceinline__ void meet_others(unsigned* flag) {
    asm volatile("bar.sync %0, %1;" ::"r"(2), "r"(kConsumers) : "memory");
    if (threadIdx.x == 0) {
        __threadfence();  // of the whole block's sums: those before the barrier
        atomicAdd(flag, 1u);
        while ((atomicAdd(flag, 0u) & 0xffff) < SPLIT) {
        }
        if (atomicAdd(flag, 0x10000u) >> 16 == SPLIT - 1) atomicExch(flag, 0u);
        __threadfence();
    }
    asm volatile("bar.sync %0, %1;" ::"r"(2), "r"(kConsumers) : "memory");
}
#endif

// Arguments: those of int4_product, for any number of tokens where the epilogue is not that of the residual stream; room,
// [tiles and tokens][SPLIT][TOKENS][kPitch]; flags, one for each tile and TOKENS tokens. The grid has SPLIT blocks for
// each, and of adjacent tiles SHARERS.
extern "C" __global__ void __cluster_dims__(SHARERS, 1, 1) __launch_bounds__(kThreads, 1) int4_wide(
    const __grid_constant__ TensorMap inputs, const char* matrix, const float* squares, int num_squares,
    float inverse_width, float eps, OUT* out, const SCALAR* bias, SCALAR* residual,
    const SCALAR* norm_weight, float* new_squares, int steps, int tiles, int outputs, int pitch, int tokens, char* room,
    unsigned* flags) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared(shared_bytes);
    if (threadIdx.x == kConsumers) shared.init_barriers();
#if SHARERS > 1
    cluster_sync();  // others may copy into this block, and arrive at its barriers
#else
    __syncthreads();
#endif
    release_successors();
    const int passes = (tokens + TOKENS - 1) / TOKENS, sharer = static_cast<int>(blockIdx.x) % SHARERS;
    const int group = static_cast<int>(blockIdx.x) / (SHARERS * SPLIT), index = group * SHARERS + sharer;
    const Problem problem{steps, tiles * kTileStrips / kHalves, group / passes * SHARERS + sharer,
                          group % passes * TOKENS, split_rank(), sharer};
    const Ends ends{squares,     num_squares, inverse_width, eps,   out + problem.token * static_cast<long long>(pitch),
                    bias,     residual, norm_weight, new_squares,   outputs, pitch,
                    min(TOKENS, tokens - problem.token)};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp >= kConsumers / 32) {
        if (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
        if (warp == kConsumers / 32) Producer(shared, matrix, &inputs, problem).produce();
        if (warp == kConsumers / 32 + 1) {
            read_scales(shared.scales(), ends);
            __syncwarp();
            asm volatile("bar.arrive %0, %1;" ::"r"(1), "r"(kConsumers + 32) : "memory");
        }
    } else {
        if (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        Consumer consumer{shared, problem, warp / 4};
        float sums[TOKENS / 2];
        consumer.consume(sums);
        wait_for_predecessors();  // of what is read and written from here on
        asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(kConsumers + 32) : "memory");  // scales; all have read the rings
        char* own = SPLIT > 1 ? room + index * (SPLIT * static_cast<long long>(kSumBytes)) : shared.bytes;
        consumer.store(sums, reinterpret_cast<float*>(own + problem.rank * kSumBytes));
#if SPLIT > 1
        meet_others(flags + index);
#else
        asm volatile("bar.sync %0, %1;" ::"r"(2), "r"(kConsumers) : "memory");
#endif
        end_tile(TileSums{own}, shared.scales(), ends, problem.tile, threadIdx.x, kConsumers);
    }
#if SHARERS > 1
    __syncwarp();
    cluster_sync();  // others may still copy into this block, or arrive at its barriers
#endif
}

#endif
