// The gated half of an MLP for more than a hundred rows, for Hopper (sm_90a): out = activation(x G^T) * (x U^T).
//
// Blocks are persistent and process tiles: CONSUMERS times 64 rows of x by COLUMNS of G and the same COLUMNS of U. G's
// rows are above U's in one matrix in shared memory, so that a thread has the gate and up sums of the same outputs and
// the activation needs no exchange between threads. One thread copies pieces of 64 columns through a ring of stages;
// CONSUMERS warpgroups multiply 64 rows each. The copies of the next tile run while the last one's outputs are written.
// Warpgroup 0 is HEAD_START stages ahead, so that one warpgroup multiplies while another writes.
//
// A cluster has CLUSTER_ROWS by CLUSTER_COLUMNS adjacent tiles. Blocks that need the same rows of x, or the same
// weights, each copy a part for all of them. Rows of x beyond the end are copied as zeros and not written.
//
// With CANONICAL the sums are those of skinny_product.cu, bit for bit: rows are scaled by 1 / rms, and ENDS may be a
// product without gates, whose first half of columns stands for G and whose second for U.
//
// Macros: SCALAR; ACTIVATION, of activation.cuh; CONSUMERS, 2 or 3; COLUMNS, a multiple of 16 from 48 to 128, or 96 or
// 112 with three consumers; STAGES; CLUSTER_ROWS and CLUSTER_COLUMNS, 1 or 2; HEAD_START, below STAGES; CANONICAL, 1 for
// the kernel canonical_product, with ENDS, one of those below.

#include "activation.cuh"
#include "canonical_norm.cuh"
#include "hopper_cluster.cuh"
#include "vector.cuh"
#include "wgmma.cuh"

#ifndef CANONICAL
#define CANONICAL 0
#endif
#ifndef ENDS
#define ENDS 0
#endif
#define ENDS_GATED 0  // out [rows, columns] = activation(scale * gate) * (scale * up)
#define ENDS_STORE 1  // out [rows, 2 * columns] = scale * sums
#define ENDS_SUMS 2   // out [rows, 2 * columns], float32 = sums

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = SCALAR;
// With a third consumer the assembler accepts no instruction of more than 128 registers, so gate and up are multiplied
// separately.
constexpr int kProducts = CONSUMERS == 2 ? 1 : 2;
constexpr int kProductSums = COLUMNS / kProducts;
using Product = Wgmma<Scalar, kProductSums>;

constexpr int kRows = CONSUMERS * 64;
constexpr int kThreads = (CONSUMERS + 1) * 128;
constexpr int kInputBytes = kRows * 128;      // 64 columns of x
constexpr int kWeightBytes = COLUMNS * 128;  // of each half
constexpr int kStageBytes = kInputBytes + 2 * kWeightBytes;
constexpr int kCluster = CLUSTER_ROWS * CLUSTER_COLUMNS;
constexpr int kPartRows = kRows / CLUSTER_COLUMNS;  // rows of x that a block copies
constexpr int kProducerRegisters = CONSUMERS == 2 ? 40 : 32, kConsumerRegisters = CONSUMERS == 2 ? 232 : 160;
constexpr int kHeadStartBarrier = 1;
#if ENDS == ENDS_SUMS
using Out = float;
#else
using Out = Scalar;
#endif

// Shared memory: the ring, with x, gate and up in each stage; then a full and an empty barrier for each stage.
struct Shared {
    unsigned base;

    __device__ __forceinline__ unsigned inputs(int stage) const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned weights(int stage) const { return inputs(stage) + kInputBytes; }
    __device__ __forceinline__ unsigned full(int stage) const { return base + STAGES * kStageBytes + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
};

// A block's place in its cluster, which determines the parts that it copies and their target blocks.
struct Member {
    int row;
    int column;

    __device__ __forceinline__ static Member self() {
        const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
        return {rank / CLUSTER_COLUMNS, rank % CLUSTER_COLUMNS};
    }
    // Bit masks of the blocks that need the same rows of x, and of those that need the same weights.
    __device__ __forceinline__ unsigned same_inputs() const {
        return ((1u << CLUSTER_COLUMNS) - 1) << (row * CLUSTER_COLUMNS);
    }
    __device__ __forceinline__ unsigned same_weights() const {
        return (CLUSTER_ROWS == 1 ? 1u : 1u | 1u << CLUSTER_COLUMNS) << column;
    }
};

// Numbering of clusters' tiles: column by column within `group` adjacent rows of tiles.
struct Tiles {
    int rows;
    int columns;
    int group;

    __device__ __forceinline__ int count() const { return rows * columns; }
    __device__ __forceinline__ int first() const { return blockIdx.x / kCluster; }
    __device__ __forceinline__ int step() const { return gridDim.x / kCluster; }
};

// The first row of x and the first output of a block's tile.
struct Place {
    int row;
    int column;

    __device__ __forceinline__ Place(const Tiles& tiles, int tile, Member member) {
        const int first = tile / (tiles.group * tiles.columns) * tiles.group;
        const int height = min(tiles.group, tiles.rows - first), index = tile - first * tiles.columns;
        row = ((first + index % height) * CLUSTER_ROWS + member.row) * kRows;
        column = (index / height * CLUSTER_COLUMNS + member.column) * COLUMNS;
    }
};

// Fills the ring for all of a block's tiles. Used by one thread.
struct Producer {
    Shared shared;
    const TensorMap* inputs;
    const TensorMap* weights;
    int num_columns;
    Member member;
    int first_step;  // pieces of 64 columns of x before those that are multiplied

    __device__ __forceinline__ void copy_inputs(int stage, const Place& place, int step) const {
        const unsigned target = shared.inputs(stage) + member.column * kPartRows * 128;
        const int row = place.row + member.column * kPartRows;
        if (CLUSTER_COLUMNS == 1) {
            copy_tensor(target, inputs, 0, row, first_step + step, shared.full(stage));
        } else {
            copy_tensor_to(member.same_inputs(), target, inputs, 0, row, first_step + step, shared.full(stage));
        }
    }

    __device__ __forceinline__ void copy_weights(int stage, const Place& place, int step) const {
        const unsigned gate = shared.weights(stage), full = shared.full(stage);
        if (CLUSTER_ROWS == 1) {
            copy_tensor(gate, weights, 0, place.column, first_step + step, full);
            copy_tensor(gate + kWeightBytes, weights, 0, num_columns + place.column, first_step + step, full);
        } else {  // one block copies the gate's rows, the other those of up
            copy_tensor_to(member.same_weights(), gate + member.row * kWeightBytes, weights, 0,
                           member.row * num_columns + place.column, first_step + step, full);
        }
    }

    __device__ __forceinline__ void produce(const Tiles& tiles, int steps) const {
        Ring<STAGES> ring(1);
        for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
            const Place place(tiles, tile, member);
            int step = 0;
            if (tile == tiles.first()) {  // the copies of weights need not wait for predecessors
                const int ahead = min(STAGES, steps);
                for (int i = 0; i < ahead; i++) {
                    barrier_expect(shared.full(i), kStageBytes);
                    copy_weights(i, place, i);
                }
                wait_for_predecessors();
                for (; step < ahead; step++, ring.advance()) copy_inputs(step, place, step);
            }
            for (; step < steps; step++, ring.advance()) {
                barrier_wait(shared.empty(ring.stage), ring.parity);
                barrier_expect(shared.full(ring.stage), kStageBytes);
                copy_inputs(ring.stage, place, step);
                copy_weights(ring.stage, place, step);
            }
        }
    }
};

// One of the multiplying warpgroups: rows index * 64 to index * 64 + 63 of each tile.
struct Consumer {
    Shared shared;
    Member member;
    int index;
    bool leads;  // this thread arrives for the warpgroup
    unsigned input_matrix, weight_matrix;
    Ring<STAGES> ring;
    float sums[kProducts][kProductSums];  // of gate, then of up
#if CANONICAL
    float scales[2];  // of the rows lane / 4 and lane / 4 + 8
#endif

    // Releases a stage to all blocks that copy into it.
    __device__ __forceinline__ void release(int stage) const {
        if (!leads) return;
        if (kCluster == 1) {
            barrier_arrive(shared.empty(stage));
            return;
        }
        const unsigned senders = member.same_inputs() | member.same_weights();
#pragma unroll
        for (int rank = 0; rank < kCluster; rank++) {
            if (senders >> rank & 1) barrier_arrive_at(shared.empty(stage), rank);
        }
    }

    // Computes the sums of a tile.
    __device__ __forceinline__ void multiply(int steps, bool first_tile) {
        int last_stage = 0;
        for (int step = 0; step < steps; step++) {
            barrier_wait(shared.full(ring.stage), ring.parity);
            wgmma_fence();
            // Equal in all lanes; the shuffle shows that to the compiler, which then uses uniform registers.
            const unsigned place = __shfl_sync(kFullWarp, ring.stage * (kStageBytes >> 4), 0);
#pragma unroll
            for (int k = 0; k < 4; k++) {
#pragma unroll
                for (int i = 0; i < kProducts; i++) {
                    Product::multiply(sums[i], input_matrix + place + 2 * k,
                                      weight_matrix + place + 2 * k + i * (kWeightBytes >> 4), step > 0 || k > 0);
                }
            }
            wgmma_commit();
            if (step > 0) {
                wgmma_wait<1>();
                release(last_stage);
            }
            if (HEAD_START > 0 && first_tile && index == 0 && step + 1 == min(HEAD_START, steps)) {
                asm volatile("bar.arrive %0, %1;" ::"n"(kHeadStartBarrier), "n"(CONSUMERS * 128) : "memory");
            }
            last_stage = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        release(last_stage);
#pragma unroll
        for (int i = 0; i < kProducts; i++) Product::pin(sums[i]);
    }

    __device__ __forceinline__ void await_head_start() const {
        if (HEAD_START > 0 && index > 0) {
            asm volatile("bar.sync %0, %1;" ::"n"(kHeadStartBarrier), "n"(CONSUMERS * 128) : "memory");
        }
    }

    // Two outputs of the row lane / 4 + half * 8, in the columns block * 8 + lane % 4 * 2. Part 1: of U alone.
    __device__ __forceinline__ unsigned outputs(int block, int half, int part) const {
        const int first = 4 * block + 2 * half + part * (COLUMNS / 2);
        return Tensor16<Scalar>::pack(ended(first, half), ended(first + 1, half));
    }

    // Writes a tile's outputs; quads exchange columns, so that a lane stores 16 bytes at a time.
    __device__ __forceinline__ void write(
        const Place& place, Scalar* out, int num_rows, int num_columns, long long pitch, int part) const {
        const int lane = threadIdx.x & 31, quad = lane & 3;
        const bool odd = quad & 1, upper = quad & 2;
        const int first_row = place.row + index * 64, row = first_row + (threadIdx.x & 127) / 32 * 16 + (lane >> 2);
        if (first_row >= num_rows) return;  // also keeps the activation after the last stage's release
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 32; i++) {
                unsigned words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) words[j] = outputs(4 * i + j, half, part);
                exchange_in_quad(words, odd, upper);
                const int column = place.column + i * 32 + quad * 8;
                if (row + half * 8 < num_rows && column < num_columns) store(words, out + (row + half * 8) * pitch + column);
            }
        }
        if (COLUMNS % 32) {  // 16 columns of both rows at a time
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) words[j] = outputs(COLUMNS / 8 - 2 + (j & 1), j >> 1, part);
            exchange_in_quad(words, odd, upper);
            const int own_row = row + (quad >> 1) * 8, column = place.column + COLUMNS - 16 + (quad & 1) * 8;
            if (own_row < num_rows && column < num_columns) store(words, out + own_row * pitch + column);
        }
    }

#if CANONICAL
    // Four lanes share a row, as row_squares needs.
    __device__ __forceinline__ void read_scales(
        const Place& place, const float* squares, int tiles, float inverse_width, float eps, int num_rows) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = place.row + index * 64 + (threadIdx.x & 127) / 32 * 16 + (lane >> 2) + half * 8;
            const bool reads = squares != nullptr && row < num_rows;
            const float sum = row_squares(reads ? squares + squares_place(row, tiles) : nullptr, tiles, lane & 3);
            scales[half] = squares != nullptr ? inverse_rms(sum, inverse_width, eps) : 1.0f;
        }
    }

    // Adds the sums of the parts before, float32 [num_rows, 2 * num_columns].
    __device__ __forceinline__ void add_earlier(
        const Place& place, const float* earlier, int num_rows, int num_columns) {
        const int lane = threadIdx.x & 31, quad = lane & 3;
        const int row = place.row + index * 64 + (threadIdx.x & 127) / 32 * 16 + (lane >> 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + half * 8 >= num_rows) continue;
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; block++) {
                const int column = place.column + block * 8 + quad * 2;
                if (column >= num_columns) continue;
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const float* from = earlier + (row + half * 8) * 2LL * num_columns + part * num_columns + column;
                    const auto pair = load_vector<float, 2>(from);
                    const int first = 4 * block + 2 * half + part * (COLUMNS / 2);
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float& own = sums[(first + j) / kProductSums][(first + j) % kProductSums];
                        own = __fadd_rn(pair[j], own);
                    }
                }
            }
        }
    }

#if ENDS == ENDS_SUMS
    __device__ __forceinline__ void write_sums(
        const Place& place, float* out, int num_rows, int num_columns, long long pitch, int part) const {
        const int lane = threadIdx.x & 31, quad = lane & 3;
        const int first_row = place.row + index * 64, row = first_row + (threadIdx.x & 127) / 32 * 16 + (lane >> 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + half * 8 >= num_rows) continue;
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; block++) {
                const int first = 4 * block + 2 * half + part * (COLUMNS / 2), column = place.column + block * 8 + quad * 2;
                if (column >= num_columns) continue;
                const Vector<float, 2> pair{{added(first), added(first + 1)}};
                store_vector(out + (row + half * 8) * pitch + column, pair);
            }
        }
    }
#endif
#endif

private:
#if CANONICAL
    // -0 becomes +0, as where parts are added to zero.
    __device__ __forceinline__ float added(int i) const { return __fadd_rn(sum(i), 0.0f); }
    __device__ __forceinline__ float scaled(int i, int half) const { return __fmul_rn(added(i), scales[half]); }
#else
    __device__ __forceinline__ float scaled(int i, int half) const { return sum(i); }
#endif
    // What becomes of a sum of G, or without gates of any sum.
    __device__ __forceinline__ float ended(int i, int half) const {
        return ENDS == ENDS_GATED ? ACTIVATION(scaled(i, half)) * scaled(i + COLUMNS / 2, half) : scaled(i, half);
    }
    __device__ __forceinline__ float sum(int i) const { return sums[i / kProductSums][i % kProductSums]; }

    static __device__ __forceinline__ void store(const unsigned (&words)[4], Scalar* place) {
        *reinterpret_cast<uint4*>(place) = make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// inputs: planes of 64 columns of x in boxes of kPartRows rows; weights: the same of G above U in boxes of COLUMNS
// rows. `out` is [num_rows, num_columns], num_columns a multiple of 8. tile_rows and tile_columns count clusters.
#if CANONICAL
// squares: of x's rows (canonical_norm.cuh), in `tiles_of_x` tiles, or null if x has no scale; inverse_width: 1 / (elements of
// a row of x); first_step: pieces of 64 columns of x before the `steps` that are multiplied; earlier: their sums, float32
// [num_rows, 2 * num_columns], or null; may be `out`.
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) canonical_product(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap weights, Out* out, int steps,
    int num_rows, int num_columns, int tile_rows, int tile_columns, int group, const float* squares, int tiles_of_x,
    float inverse_width, float eps, int first_step, const float* earlier) {
#else
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) gated_product(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap weights, Scalar* out, int steps,
    int num_rows, int num_columns, int tile_rows, int tile_columns, int group) {
    constexpr int first_step = 0;
#endif
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    const Member member = Member::self();
    const Tiles tiles{tile_rows, tile_columns, group};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), (CLUSTER_ROWS + CLUSTER_COLUMNS - 1) * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (kCluster > 1) cluster_sync();
    else __syncthreads();
    release_successors();
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x >> 7, 0);
    if (warpgroup == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (threadIdx.x == CONSUMERS * 128) {
            Producer{shared, &inputs, &weights, num_columns, member, first_step}.produce(tiles, steps);
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        Consumer consumer{shared, member, warpgroup, (threadIdx.x & 127) == 0,
                          matrix_descriptor(shared.inputs(0) + warpgroup * (64 * 128), 16),
                          matrix_descriptor(shared.weights(0), 16), Ring<STAGES>(0)};
#if CANONICAL
        wait_for_predecessors();  // the squares are read
#endif
        consumer.await_head_start();
        for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
            consumer.multiply(steps, tile == tiles.first());
#if CANONICAL
            const Place place(tiles, tile, member);
            if (earlier != nullptr) consumer.add_earlier(place, earlier, num_rows, num_columns);
            consumer.read_scales(place, squares, tiles_of_x, inverse_width, eps, num_rows);
            constexpr int kParts = ENDS == ENDS_GATED ? 1 : 2;  // of the columns
#pragma unroll
            for (int part = 0; part < kParts; part++) {
#if ENDS == ENDS_SUMS
                consumer.write_sums(place, out + part * num_columns, num_rows, num_columns, 2LL * num_columns, part);
#else
                consumer.write(
                    place, out + part * num_columns, num_rows, num_columns, static_cast<long long>(kParts) * num_columns, part);
#endif
            }
#else
            consumer.write(Place(tiles, tile, member), out, num_rows, num_columns, num_columns, 0);
#endif
        }
    }
    if (kCluster > 1) cluster_sync();  // others may still copy into this block, and arrive at its barriers
}

#endif
