// Products of many rows in the canonical order, out = x W^T, for Hopper (sm_90a), with the bits of skinny_product.cu.
//
// W is multiplied in two halves of rows by the tiles of gated_tile.cuh, whatever becomes of the sums. Where the order cuts
// the columns into two parts, either a block multiplies one after the other and keeps the first's sums in `room` meanwhile
// (PARTS), or the parts are tiles of their own (SPLIT): the first's stores its sums in `room` and raises a flag, for which
// the second's waits. Tiles of the first part precede those of the second, so that no block waits for one behind it.
//
// Macros: those of gated_tile.cuh; CANONICAL, 1; ENDS, one of those below; OUT, float or SCALAR, for ENDS_STORE;
// ACTIVATION, for ENDS_GATED; PARTS, 1 or 2; BIAS, 1: biases are added to scale * sums.

#define ENDS_GATED 0     // out [rows, half] = activation(scale * gate) * (scale * up)
#define ENDS_STORE 1     // out [rows, outputs] = scale * sums
#define ENDS_RESIDUAL 2  // residual += scale * sums; out = residual * norm_weight; squares of the residual

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "canonical_ends.cuh"

static_assert(SPLIT == 1 || PARTS == 1, "parts are added once");

constexpr int kQuads = COLUMNS / 4;                       // of a thread's sums
constexpr bool kHolds = CONSUMERS == 2 && COLUMNS <= 96;  // whether registers have room for the sums of a first part
constexpr int kFirstBarrier = kHeadStartBarrier + 1;

// Sums of the first part of the columns: of a block, or of a tile.
struct Room {
    float4* sums;  // [blocks or tiles][CONSUMERS][kQuads][128]
    int* flags;    // [tiles][CONSUMERS], zero between launches

    __device__ __forceinline__ float4* of(int place, int index) const {
        return sums + (place * CONSUMERS + index) * (kQuads * 128) + (threadIdx.x & 127);
    }
};

struct Consumer : Ender {
    unsigned scales_parity;

    __device__ __forceinline__ float& own(int i) { return sums[i / kProductSums][i % kProductSums]; }

    // Stores the sums.
    __device__ __forceinline__ void keep(float4* room) {
#pragma unroll
        for (int i = 0; i < kQuads; i++) {
            room[i * 128] = make_float4(sum(4 * i), sum(4 * i + 1), sum(4 * i + 2), sum(4 * i + 3));
        }
    }

    // Adds the sums to those that were kept.
    __device__ __forceinline__ void add_kept(const float4* room) {
#pragma unroll
        for (int i = 0; i < kQuads; i++) {
            const float4 kept = __ldcg(room + i * 128);
            own(4 * i) = __fadd_rn(kept.x, sum(4 * i));
            own(4 * i + 1) = __fadd_rn(kept.y, sum(4 * i + 1));
            own(4 * i + 2) = __fadd_rn(kept.z, sum(4 * i + 2));
            own(4 * i + 3) = __fadd_rn(kept.w, sum(4 * i + 3));
        }
    }

    // Says to the tile of the next part that this warpgroup's sums are kept.
    __device__ __forceinline__ void raise(int* flag) const {
        __threadfence();
        meet();
        if (leads) atomicAdd(flag, 1);
    }

    // Waits for that, and lowers the flag for the next launch.
    __device__ __forceinline__ void await(int* flag) const {
        if (leads) {
            while (atomicAdd(flag, 0) == 0) {
            }
            atomicAdd(flag, -1);
        }
        meet();
        __threadfence();
    }

    // Takes the tile's scales.
    __device__ __forceinline__ void read_scales(const Scales& own, bool has_scales) {
        barrier_wait(own.full(), scales_parity);
        scales_parity ^= 1;
        const int row = index * 64 + (threadIdx.x & 127) / 32 * 16 + ((threadIdx.x & 31) >> 2);
#pragma unroll
        for (int half = 0; half < 2; half++) scales[half] = has_scales ? own.values()[row + half * 8] : 1.0f;
    }

private:
    __device__ __forceinline__ void meet() const {
        asm volatile("bar.sync %0, %1;" ::"r"(kFirstBarrier + index), "n"(128) : "memory");
    }
};

// Multiplies both parts of a tile.
__device__ __forceinline__ void multiply_parts(Consumer& consumer, const Room& room, int steps, bool is_first) {
    consumer.multiply(steps / 2, is_first);
    if constexpr (kHolds) {
        float held[COLUMNS];
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) held[i] = consumer.sum(i);
        consumer.multiply(steps - steps / 2, false);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) consumer.own(i) = __fadd_rn(held[i], consumer.sum(i));
    } else {
        float4* own = room.of(blockIdx.x, consumer.index);
        consumer.keep(own);
        consumer.multiply(steps - steps / 2, false);
        consumer.add_kept(own);
    }
}

// Multiplies all tiles of a block.
__device__ __forceinline__ void consume(
    Consumer& consumer, const Tiles& tiles, const Ends& ends, const Scales& scales, const Room& room, int steps) {
    wait_for_predecessors();  // the room and the outputs are written
    consumer.await_head_start();
    for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
        const bool is_first = tile == tiles.first();
        const Place at(tiles, tile, consumer.member);
        Carried carried;
        if (kLoadsAhead && has_end(tiles, tile)) consumer.load_ahead(at, ends, carried);
#if SPLIT > 1
        const Part part = Part::of(tiles, tile, steps);
        const int place = tile % tiles.places() * kCluster + blockIdx.x % kCluster;
        int* flag = room.flags + place * CONSUMERS + consumer.index;
        consumer.multiply(part.end - part.begin, is_first);
        if (!has_end(tiles, tile)) {
            consumer.keep(room.of(place, consumer.index));
            consumer.raise(flag);
            continue;
        }
        consumer.await(flag);
        consumer.add_kept(room.of(place, consumer.index));
#elif PARTS > 1
        multiply_parts(consumer, room, steps, is_first);
#else
        consumer.multiply(steps, is_first);
#endif
        consumer.read_scales(scales, ends.scales);
        consumer.end(at, ends, carried);
        scales.arrive(scales.empty());  // only now, when all that was loaded is used
    }
}

// inputs: planes of 64 columns of x in boxes of kPartRows rows; weights: the same of W in boxes of COLUMNS rows. steps: pieces
// of 64 columns of x. half: rows of W in its first half, a multiple of 8, or of 64 with ENDS_RESIDUAL; outputs: all, a
// multiple of 8, at most twice as many. tile_rows and tile_columns count clusters. squares, tiles_of_x, inverse_width, eps:
// see Ahead. The rest: see Ends and Room.
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) canonical_product(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap weights, OUT* out, int steps,
    int num_rows, int half, int outputs, int tile_rows, int tile_columns, int group, const float* squares, int tiles_of_x,
    float inverse_width, float eps, Scalar* residual, const Scalar* norm_weight, float* new_squares, float4* room,
    int* flags, const Scalar* bias) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    const Member member = Member::self();
    const Tiles tiles{tile_rows, tile_columns, group};
    const Scales scales(shared_bytes, shared.base);
    const Ends ends{out, squares != nullptr, num_rows, half, outputs, residual, norm_weight, new_squares, bias};
    if (threadIdx.x == 0) scales.init();
    init_barriers(shared);
    release_successors();
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x >> 7, 0);
    if (warpgroup == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (threadIdx.x == CONSUMERS * 128) {
            Producer{shared, &inputs, &weights, half, member}.produce(tiles, steps);
        } else if (threadIdx.x >= CONSUMERS * 128 + 32) {
            const Ahead ahead{scales, squares, tiles_of_x, inverse_width, eps, num_rows, member};
            ahead.run(tiles, AskResidual{ends});
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        Consumer consumer{{shared, member, warpgroup, (threadIdx.x & 127) == 0,
                           matrix_descriptor(shared.inputs(0) + warpgroup * (64 * 128), 16),
                           matrix_descriptor(shared.weights(0), 16), Ring<STAGES>(0)}};
        consumer.scales_parity = 0;
        consume(consumer, tiles, ends, scales, Room{room, flags}, steps);
    }
    if (kCluster > 1) cluster_sync();  // others may still copy into this block, and arrive at its barriers
}

#endif
