// Products of up to eight rows with a matrix of 4-bit numbers, out = x W^T, for Hopper (sm_90a), whose warps read W as
// streams that wait for nothing but memory; with the operations before and after the product fused.
//
// W's strips of 16 rows are the product's 16-row operand and x's rows its columns (mma.sync). A block has adjacent units
// of STRIPS strips, one block for each multiprocessor if possible. Each of its warps has its own columns, the same for
// all units: it copies their codes and x through a ring of its own (cp.async), turns codes into whole numbers, and
// multiplies. A group's sums are multiplied by its scale in float32: weights are not rounded. One more warp adds up the
// others' sums of a unit, in the order of columns, and does what follows the product. So none of the others waits.
//
// The columns are divided among WARPS warps, and W's rows among blocks, by the matrix and the number of multiprocessors:
// the bits of a row's result depend neither on the number of rows nor on the rows beside it.
//
// The kernel is launched while its predecessor runs (programmatic dependent launch). Weights do not depend on the
// predecessor, so the rings are filled with them at once: only x waits.
//
// Macros: those of int4_tile.cuh; SCALAR, type of x and of the residual stream; OUT, type of `out`; EPILOGUE; ACTIVATION;
// STRIPS of a unit; UNITS, most of a block; WARPS; STAGES of a ring; RESIDENT_STEPS, most steps of a warp if x
// stays in shared memory, 0: x passes through the ring; SLOTS, units whose sums have a place.

#define EPILOGUE_STORE 0     // out = scale * product + bias
#define EPILOGUE_GATED 1     // out = activation(gate) * up of scale * product + bias; W: the rows of gate, then of up
#define EPILOGUE_RESIDUAL 2  // residual += product + bias; out = residual * norm_weight; squares of the residual
#define GATED (EPILOGUE == EPILOGUE_GATED)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "int4_stream.cuh"
#include "stream_ends.cuh"

constexpr int kThreads = (WARPS + 1) * 32;  // with the warp that ends units

// x [tokens, width] has rows `x_stride` elements apart.
extern "C" __global__ void __launch_bounds__(kThreads, 1) int4_stream(
    const SCALAR* x, int x_stride, int width, const char* matrix, const float* squares, int num_squares,
    float inverse_width, float eps, OUT* out, const SCALAR* bias, SCALAR* residual, const SCALAR* norm_weight,
    float* new_squares, int steps, int tiles, int outputs, int pitch, int tokens) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared(shared_bytes);
    release_successors();
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(shared.full(i), WARPS);
            barrier_init(shared.empty(i), 1);
        }
    }
    __syncthreads();
    const Units units(tiles);
    const StreamEnds ends{shared, units, squares, num_squares, inverse_width, eps, out, bias, residual, norm_weight,
                          new_squares, outputs, pitch, tokens};
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    if (warp < WARPS) {
        Stream stream{shared, units, matrix, x, x_stride, width, tokens, steps, warp};
        stream.multiply([&](int unit) { ends.give(stream.total, unit, warp); });
    } else {
        ends.end_units();
    }
}

#endif
