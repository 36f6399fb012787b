// The gated half of an MLP for more than a hundred rows, for Hopper (sm_90a): out = activation(x G^T) * (x U^T).
//
// A thread has the gate and up sums of the same outputs (gated_tile.cuh), so the activation needs no exchange between
// threads. Rows of x beyond the end are not written.
//
// Macros: those of gated_tile.cuh; ACTIVATION, of activation.cuh.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "activation.cuh"
#include "gated_tile.cuh"

struct Consumer : Multiplier {
    // Two outputs of the row lane / 4 + half * 8, in the columns block * 8 + lane % 4 * 2.
    __device__ __forceinline__ unsigned outputs(int block, int half) const {
        const int first = 4 * block + 2 * half;
        return Tensor16<Scalar>::pack(activated(first), activated(first + 1));
    }

    // Writes a tile's outputs; quads exchange columns, so that a lane stores 16 bytes at a time.
    __device__ __forceinline__ void write(const Place& place, Scalar* out, int num_rows, int num_columns) const {
        const int quad = threadIdx.x & 3, row = first_row(place);
        const bool odd = quad & 1, upper = quad & 2;
        if (place.row + index * 64 >= num_rows) return;  // also keeps the activation after the last stage's release
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 32; i++) {
                unsigned words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) words[j] = outputs(4 * i + j, half);
                exchange_in_quad(words, odd, upper);
                const int column = place.column + i * 32 + quad * 8;
                if (row + half * 8 < num_rows && column < num_columns) {
                    store(words, out + (row + half * 8) * static_cast<long long>(num_columns) + column);
                }
            }
        }
        if (COLUMNS % 32) {  // 16 columns of both rows at a time
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) words[j] = outputs(COLUMNS / 8 - 2 + (j & 1), j >> 1);
            exchange_in_quad(words, odd, upper);
            const int own_row = row + (quad >> 1) * 8, column = place.column + COLUMNS - 16 + (quad & 1) * 8;
            if (own_row < num_rows && column < num_columns) {
                store(words, out + own_row * static_cast<long long>(num_columns) + column);
            }
        }
    }

private:
    __device__ __forceinline__ float activated(int i) const { return ACTIVATION(sum(i)) * sum(i + COLUMNS / 2); }

    static __device__ __forceinline__ void store(const unsigned (&words)[4], Scalar* place) {
        *reinterpret_cast<uint4*>(place) = make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// inputs: planes of 64 columns of x in boxes of kPartRows rows; weights: the same of G above U in boxes of COLUMNS
// rows. `out` is [num_rows, num_columns], num_columns a multiple of 8. tile_rows and tile_columns count clusters.
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) gated_product(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap weights, Scalar* out, int steps,
    int num_rows, int num_columns, int tile_rows, int tile_columns, int group) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    const Member member = Member::self();
    const Tiles tiles{tile_rows, tile_columns, group};
    init_barriers(shared);
    release_successors();
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x >> 7, 0);
    if (warpgroup == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (threadIdx.x == CONSUMERS * 128) {
            Producer{shared, &inputs, &weights, num_columns, member}.produce(tiles, steps);
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        Consumer consumer{{shared, member, warpgroup, (threadIdx.x & 127) == 0,
                           matrix_descriptor(shared.inputs(0) + warpgroup * (64 * 128), 16),
                           matrix_descriptor(shared.weights(0), 16), Ring<STAGES>(0)}};
        consumer.await_head_start();
        for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
            consumer.multiply(steps, tile == tiles.first());
            consumer.write(Place(tiles, tile, member), out, num_rows, num_columns);
        }
    }
    if (kCluster > 1) cluster_sync();  // others may still copy into this block, and arrive at its barriers
}

#endif
