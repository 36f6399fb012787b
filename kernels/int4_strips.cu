// Products of few rows with a matrix of 4-bit numbers, out = x W^T, for Hopper (sm_90a), by one block on each
// multiprocessor: its share of W's rows is one tile, so that all blocks end together.
//
// A tile has STRIPS strips of 16 rows of W (where gated, half of them gate's and half up's). A warp multiplies a strip
// by x's rows with mma.sync. Codes are added to 128, which is exact in 16 bits and takes no arithmetic; a group's sums of
// x, by a product with ones, are multiplied by 128 + zero and taken from its sums, which are then multiplied by its
// scales, all in float32. AT_ONCE warps of a strip have different columns at the same time.
//
// Columns are added in PARTS parts that are given by the matrix alone, each ascending; parts are added in order. So bits
// do not depend on the number of rows.
//
// The kernel is launched while its predecessor runs (programmatic dependent launch), and takes less than half of a
// multiprocessor's shared memory: so its ring is filled with weights while the predecessor still multiplies.
//
// Macros: those of int4_tile.cuh and product_ends.cuh, of which TILE_ROWS is 16 * STRIPS, and SPLIT 1; TOKENS, 8, 16 or
// 32; STRIPS; AT_ONCE, a divisor of PARTS; STAGES; BLOCKS, for which a multiprocessor has registers.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "int4_strip.cuh"

// Arguments: those of int4_product. The grid has a block for each tile.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) int4_strips(
    const __grid_constant__ TensorMap inputs, const char* matrix, const float* squares, int num_squares,
    float inverse_width, float eps, OUT* out, const SCALAR* bias, SCALAR* residual,
    const SCALAR* norm_weight, float* new_squares, int steps, int tiles, int outputs, int pitch, int tokens) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared(shared_bytes);
    if (threadIdx.x == kConsumers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), kConsumers / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release_successors();
    const Problem problem{steps, tiles * kTileStrips / kHalves, static_cast<int>(blockIdx.x)};
    const Ends ends{squares,     num_squares, inverse_width, eps,   out,   bias,
                    residual, norm_weight, new_squares,   outputs, pitch, tokens};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp < kConsumers / 32) {
        wait_for_predecessors();  // the residual stream is read at the end
        Consumer{shared, problem, Ring<STAGES>(0), warp}.consume();
        meet();
        end_tile(TileSums{shared.sums(0)}, shared.scales(), ends, problem.tile, threadIdx.x, kConsumers);
    } else if (warp == kConsumers / 32) {
        Producer(shared, matrix, &inputs, problem).produce();
    } else {
        read_scales(shared.scales(), ends);
        __syncwarp();
        asm volatile("bar.arrive %0, %1;" ::"r"(1), "r"(kConsumers + 32) : "memory");
    }
}

#endif
