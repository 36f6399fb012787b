// Products of tens or hundreds of rows with a matrix of 4-bit numbers, out = x W^T, for Hopper (sm_90a): each weight
// becomes a 16-bit number once for TOKENS rows of x, code times scale rounded once, as in kernels/int4_dequantize.cu.
//
// A block has TOKENS rows of x and STRIPS times 16 rows of W (where gated, half of them gate's and half up's). One warp
// copies x and codes through rings of stages, converting warps write numbers into a third ring, and a warpgroup for
// each 64 rows of x multiplies: x is the 64-row operand, so that x is read once for many rows of W. With SPLIT > 1, the
// blocks of a cluster have parts of W's columns. A part's sums are added ascending from a column on that depends on the
// tile, and the parts in order.
//
// The kernel is launched while its predecessor runs (programmatic dependent launch): weights are converted before x is
// there, as many as the rings have room for.
//
// Macros: those of int4_tile.cuh and product_ends.cuh, of which TILE_ROWS is 16 * STRIPS, and PARTS 1; TOKENS, 64 or
// 128; STRIPS, 1 to 10, 12 or 14; SPLIT, 1, 2, 4 or 8; CONVERTERS, warps; INPUT_STAGES and NUMBER_STAGES, of 64 columns;
// CODE_STAGES, of 128.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "int4_wide.cuh"

// Arguments: those of int4_product, for any number of tokens where the epilogue is not that of the residual stream. The
// grid has a cluster of SPLIT blocks for each tile and TOKENS tokens.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(kThreads, 1) int4_wide(
    const __grid_constant__ TensorMap inputs, const char* matrix, const float* squares, int num_squares,
    float inverse_width, float eps, OUT* out, const SCALAR* bias, SCALAR* residual,
    const SCALAR* norm_weight, float* new_squares, int steps, int tiles, int outputs, int pitch, int tokens) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared(shared_bytes);
    if (threadIdx.x == kConsumers) shared.init_barriers();
    __syncthreads();
    release_successors();
    const int passes = (tokens + TOKENS - 1) / TOKENS, index = static_cast<int>(blockIdx.x) / SPLIT;
    const Problem problem{steps, tiles * kTileStrips / kHalves, index / passes, index % passes * TOKENS, split_rank()};
    const Ends ends{squares,     num_squares, inverse_width, eps,   out + problem.token * static_cast<long long>(pitch),
                    bias,     residual, norm_weight, new_squares,   outputs, pitch, tokens - problem.token};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp < kConsumers / 32) {
        if (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        wait_for_predecessors();  // the residual stream is read at the end
        read_pair_scales(shared.scales(), ends);
        Consumer{shared, problem, warp / 4}.consume();
        meet_all();
        end_tile(TileSums{shared.bytes}, shared.scales(), ends, problem.tile, threadIdx.x, kConsumers);
    } else {
        if (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
        if (warp < kConsumers / 32 + CONVERTERS) {
            Converter{shared, problem, warp - kConsumers / 32}.convert();
        } else {
            Producer(shared, matrix, &inputs, problem).produce();
        }
        __syncwarp();
        meet_all();
    }
#if SPLIT > 1
    cluster_sync();  // others may still read this block's sums
#endif
}

#endif
