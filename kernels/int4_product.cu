// Products of a few rows with a matrix of 4-bit numbers, out = x W^T, for Hopper (sm_90a): each byte of the weights is
// read once, with the operations before and after the product fused.
//
// W's rows are the product's 64-row operand and x's rows, up to TOKENS, its columns (out^T = W x^T). A warpgroup turns
// its codes into whole numbers, code - zero, exact in 16 bits, in the registers of the product's A operand. The sums of
// a group of columns are multiplied by its scales in float32 when they are added to the total: weights are not rounded.
//
// The columns of a tile of 64 rows are divided into S = SPLIT * PARTS parts, the same for any number of tokens: PARTS
// warpgroups of each of the SPLIT blocks of a cluster. Each part's sums are added ascending from a column on that depends
// on the tile, and the parts in order: the bits of a row's result depend on the matrix alone, not on the rows beside it. A block has ROW_GROUPS tiles at a time,
// which share x; SHARERS blocks with the same columns copy x for each other. One thread copies pieces of 128 columns
// through a ring of stages.
//
// The kernel is launched while its predecessor runs (programmatic dependent launch). Weights do not depend on the
// predecessor, so the ring is filled with them at once: only x waits.
//
// Macros: those of int4_tile.cuh and product_ends.cuh; TOKENS, 8, 16, 32, 64 or 128; ROW_GROUPS; PARTS; SPLIT, 1, 2, 4
// or 8; SHARERS, 1 or 2; BY_WARPS, 1: with mma.sync, 0: with wgmma, whose sums have the same bits; STAGES; BLOCKS of a
// multiprocessor; PREFETCHED, stages behind those of the ring that are brought into L2 at once.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "int4_consumer.cuh"

// matrix: tiles of W; inputs: planes of 64 columns of x in boxes of TOKENS rows, of which the first `tokens` are used, and
// of two planes, or of one with two sharers. With SPLIT > 1 the grid has a cluster for every ROW_GROUPS * SHARERS tiles.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, BLOCKS) int4_product(
    const __grid_constant__ TensorMap inputs, const char* matrix, const float* squares, int num_squares,
    float inverse_width, float eps, OUT* out, const SCALAR* bias, SCALAR* residual,
    const SCALAR* norm_weight, float* new_squares, int steps, int tiles, int outputs, int pitch, int tokens) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared(shared_bytes);
    if (threadIdx.x == kConsumers) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), SHARERS * kConsumers / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#if SHARERS > 1
    cluster_sync();  // others may copy into this block, and arrive at its barriers
#else
    __syncthreads();
#endif
    release_successors();
    int sharer = 0;
#if SHARERS > 1
    sharer = cluster_rank() / SPLIT;
#endif
    const Problem problem{steps, tiles, outputs / (kRows / 2), split_rank(), sharer};
    const Ends ends{squares,     num_squares, inverse_width, eps,   out,   bias,
                    residual, norm_weight, new_squares,   outputs, pitch, tokens};
    const Producer producer{shared, matrix, &inputs, problem};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp < kConsumers / 32) {
        wait_for_predecessors();  // the residual stream is read at the end
        Consumer{shared, problem, ends, Ring<STAGES>(0), warp / 4}.consume();
    } else if (warp == kConsumers / 32) {
        if (threadIdx.x % 32 == 0) producer.produce();
        __syncwarp();
#if SPLIT > 1
        cluster_sync();
#endif
    } else {
        if (PREFETCHED > 0 && threadIdx.x % 32 == 0) producer.prefetch();
        __syncwarp();
        read_scales(shared.scales(), ends);
        __syncwarp();
#if SPLIT > 1
        cluster_sync();
#else
        asm volatile("bar.arrive %0, %1;" ::"r"(1), "r"(kConsumers + 32) : "memory");
#endif
    }
#if CLUSTER > 1
    cluster_sync();  // others may still read this block's sums, copy into it or arrive at its barriers
#endif
}

#endif
