// Products of one to four hundred rows with a matrix of some thousand outputs, for Hopper (sm_90a): out = x W^T. Such a
// product is short, and what it takes is to bring x and W from L2 to the multiprocessors: a tile of 64 x 64 reads a
// megabyte for 4,096 columns. Shared memory limits it too: what is copied into it, and what its tensor cores read, which
// is less for a product with large tiles.
//
// A tile is CONSUMERS times 64 rows of x by COLUMNS outputs, and a cluster of SPLIT blocks shares one: each has a part of
// the columns of x, and they exchange their sums at the end. So tiles can be large though the product is small. One warp
// copies pieces of 64 columns through a ring of stages, those of W before the predecessor has ended; CONSUMERS warpgroups
// multiply 64 rows each. Blocks add up the parts of a sum in the order of the columns: what a row gets depends on it alone.
//
// Macros: SCALAR; CONSUMERS, 2 or 3; COLUMNS, a multiple of 32 up to 256, or up to 192 with three consumers; SPLIT, 1, 2 or
// 4; STAGES; ADDING, 1 for out += x W^T.

#include "hopper_cluster.cuh"
#include "vector.cuh"
#include "wgmma.cuh"

#ifndef ADDING
#define ADDING 0
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = SCALAR;
using Product = Wgmma<Scalar, COLUMNS / 2>;

constexpr int kConsumers = CONSUMERS;
constexpr int kMultiplying = kConsumers * 128;  // threads
constexpr int kThreads = kMultiplying + 32;
constexpr int kRows = kConsumers * 64;  // of a tile
constexpr int kInputBytes = kRows * 128;  // 64 columns
constexpr int kWeightBytes = COLUMNS * 128;
constexpr int kStageBytes = kInputBytes + kWeightBytes;
constexpr int kPitch = COLUMNS + 8;      // of a row of sums in shared memory
constexpr int kOwnRows = kRows / SPLIT;  // that a block adds up and stores
static_assert(STAGES * kStageBytes >= kRows * kPitch * 4, "the sums lie where the stages were");

// The ring, with x and W in each stage; then a full and an empty barrier for each stage.
struct Shared {
    unsigned base;

    __device__ __forceinline__ unsigned inputs(int stage) const { return base + stage * kStageBytes; }
    __device__ __forceinline__ unsigned weights(int stage) const { return inputs(stage) + kInputBytes; }
    __device__ __forceinline__ unsigned full(int stage) const { return base + STAGES * kStageBytes + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
};

// A block's part of a tile: `steps` pieces of 64 columns, from `first_step` on.
struct Part {
    int row, column, first_step, steps;
};

// By one thread.
__device__ __forceinline__ void fill_ring(
    const Shared& shared, const TensorMap* inputs, const TensorMap* weights, const Part& part) {
    const int ahead = min(STAGES, part.steps);
    const auto copy_weights = [&](int step, int stage) {
        copy_tensor(shared.weights(stage), weights, 0, part.column, part.first_step + step, shared.full(stage));
    };
    for (int i = 0; i < ahead; i++) {
        barrier_expect(shared.full(i), kStageBytes);
        copy_weights(i, i);
    }
    wait_for_predecessors();
    for (int i = 0; i < ahead; i++) {
        copy_tensor(shared.inputs(i), inputs, 0, part.row, part.first_step + i, shared.full(i));
    }
    Ring<STAGES> ring(0);
    for (int step = ahead; step < part.steps; step++, ring.advance()) {
        barrier_wait(shared.empty(ring.stage), ring.parity);
        barrier_expect(shared.full(ring.stage), kStageBytes);
        copy_tensor(shared.inputs(ring.stage), inputs, 0, part.row, part.first_step + step, shared.full(ring.stage));
        copy_weights(step, ring.stage);
    }
}

// By a warpgroup: the sums of 64 rows over the block's columns.
__device__ __forceinline__ void multiply(const Shared& shared, int steps, int warpgroup, float (&sums)[COLUMNS / 2]) {
    const unsigned input_matrix = matrix_descriptor(shared.inputs(0) + warpgroup * (64 * 128), 16);
    const unsigned weight_matrix = matrix_descriptor(shared.weights(0), 16);
    const bool leads = (threadIdx.x & 127) == 0;
    Ring<STAGES> ring(0);
    int last_stage = 0;
    for (int step = 0; step < steps; step++) {
        barrier_wait(shared.full(ring.stage), ring.parity);
        wgmma_fence();
        // Equal in all lanes; the shuffle shows that to the compiler, which then uses uniform registers.
        const unsigned place = __shfl_sync(kFullWarp, ring.stage * (kStageBytes >> 4), 0);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            Product::multiply(sums, input_matrix + place + 2 * k, weight_matrix + place + 2 * k, step > 0 || k > 0);
        }
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            if (leads) barrier_arrive(shared.empty(last_stage));
        }
        last_stage = ring.stage;
        ring.advance();
    }
    wgmma_wait<0>();
    Product::pin(sums);
}

// Leaves a warpgroup's sums in shared memory. A thread's are of the rows lane / 4 and lane / 4 + 8 of its warp's 16, and of
// two neighbouring columns in 8.
__device__ __forceinline__ void leave(float* parts, int warpgroup, const float (&sums)[COLUMNS / 2]) {
    const int lane = threadIdx.x & 31, row = warpgroup * 64 + (threadIdx.x & 127) / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            *reinterpret_cast<float2*>(parts + (row + half * 8) * kPitch + i * 8 + lane % 4 * 2) =
                make_float2(sums[i * 4 + half * 2], sums[i * 4 + half * 2 + 1]);
        }
    }
}

// Four floats of block `rank`.
__device__ __forceinline__ float4 load_of_rank(const float* address, int rank) {
    unsigned place = shared_address(address);
    float4 value;
    if (SPLIT > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(place) : "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(place)
                 : "memory");
    return value;
}

// Adds up and stores the block's rows of the tile.
__device__ __forceinline__ void add_up(
    const float* parts, int rank, const Part& part, Scalar* out, int num_rows, int num_columns) {
    constexpr int kVectors = COLUMNS / 8;
    for (int i = threadIdx.x; i < kOwnRows * kVectors; i += kThreads) {
        const int row = rank * kOwnRows + i / kVectors, column = i % kVectors * 8;
        if (part.row + row >= num_rows || part.column + column >= num_columns) continue;
        float4 loaded[SPLIT][2];
#pragma unroll
        for (int other = 0; other < SPLIT; other++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                loaded[other][half] = load_of_rank(parts + row * kPitch + column + half * 4, other);
            }
        }
        Scalar* place = out + static_cast<long long>(part.row + row) * num_columns + part.column + column;
        Vector<Scalar, 8> result;
        if (ADDING) result = load_vector<Scalar, 8>(place);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 total = loaded[0][half];
#pragma unroll
            for (int other = 1; other < SPLIT; other++) {
                const float4& more = loaded[other][half];
                total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
            }
            const float totals[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Scalar& value = result[half * 4 + i];
                value = from_float<Scalar>(ADDING ? to_float(value) + totals[i] : totals[i]);
            }
        }
        store_vector(place, result);
    }
}

// inputs: planes of 64 columns of x in boxes of kRows rows; weights: the same of W in boxes of COLUMNS rows. `out` is
// [num_rows, num_columns], num_columns a multiple of 8. A block has `steps` of the planes. The grid has a cluster for each
// tile; `tile_rows` of them have the same rows of W.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(kThreads, 1) split_product(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap weights, Scalar* out, int steps,
    int num_rows, int num_columns, int tile_rows) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    release_successors();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), kConsumers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int rank = SPLIT > 1 ? cluster_rank() : 0, tile = blockIdx.x / SPLIT;
    const Part part{tile % tile_rows * kRows, tile / tile_rows * COLUMNS, rank * steps, steps};
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x >> 7, 0);
    float sums[COLUMNS / 2];
    if (warpgroup == kConsumers) {
        if (threadIdx.x == kMultiplying) fill_ring(shared, &inputs, &weights, part);
        __syncwarp();
    } else {
        multiply(shared, steps, warpgroup, sums);
    }
    __syncthreads();  // all stages have been read
    float* parts = reinterpret_cast<float*>(shared_bytes);
    if (warpgroup < kConsumers) leave(parts, warpgroup, sums);
    if (SPLIT > 1) cluster_sync();
    else __syncthreads();
    wait_for_predecessors();
    add_up(parts, rank, part, out, num_rows, num_columns);
    if (SPLIT > 1) cluster_sync();  // all that is here has been read
}

#endif
