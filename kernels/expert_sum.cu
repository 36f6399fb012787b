// The end of a layer with experts for a lone row, for Hopper (sm_90a): the products with its experts' second matrices,
// their weighted sum, and its addition to the residual stream, in one launch.
//
// A cluster takes 64 outputs. Each of its TOP_K blocks multiplies by one expert's matrix, as kernels/expert_product.cu
// does; the first block adds up what they leave in shared memory, in the router's order. Products are rounded before that,
// so that the sum has the bits of kernels/expert_rows.cu. The next norm is left to the next product, as by
// kernels/skinny_product.cu: `out` is the residual times the norm's weight, and `new_squares` its squares.
//
// All blocks find the row's experts themselves. What they find them by is older than this kernel's predecessor, so weights
// are copied before that has ended.
//
// Macros: STAGES; BIAS, 1: products have their biases; those of lone_row.cuh, TOP_K up to 8.

#include "operand_ring.cuh"
#include "hopper_cluster.cuh"
#include "lone_row.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = __nv_bfloat16;

constexpr int kRows = 64;
constexpr int kColumns = 8;  // of the products: all of the row's experts, of which a block needs its own
constexpr int kConsumers = 128;
constexpr int kThreads = kConsumers + 32;
constexpr int kWeightBytes = kRows * 128;
constexpr int kQuads = kRows / 4;
static_assert(TOP_K <= kColumns, "a cluster has up to eight blocks");

using Product = Wgmma<Scalar, kColumns / 2>;

// Behind the ring, sums [kRows] and logits [EXPERTS].
using Shared = OperandRing<STAGES, kWeightBytes, kColumns * 128>;

// By one thread: fills the ring; the first stages get their weights before the predecessor is waited for.
__device__ __forceinline__ void produce(
    Shared shared, const TensorMap* weights, const TensorMap* inputs, int first_row, int steps) {
    const int ahead = min(STAGES, steps);
    for (int i = 0; i < ahead; i++) {
        barrier_expect(shared.full(i), Shared::kStageBytes);
        copy_tensor(shared.weights(i), weights, 0, first_row, i, shared.full(i));
    }
    wait_for_predecessors();
    Ring<STAGES> ring(1);
    for (int i = 0; i < ahead; i++, ring.advance()) copy_tensor(shared.inputs(i), inputs, 0, 0, i, shared.full(i));
    for (int i = ahead; i < steps; i++, ring.advance()) {
        barrier_wait(shared.empty(ring.stage), ring.parity);
        barrier_expect(shared.full(ring.stage), Shared::kStageBytes);
        copy_tensor(shared.weights(ring.stage), weights, 0, first_row, i, shared.full(ring.stage));
        copy_tensor(shared.inputs(ring.stage), inputs, 0, 0, i, shared.full(ring.stage));
    }
}

// By the multiplying warpgroup: the rounded products of the block's expert, to shared memory [kRows].
__device__ __forceinline__ void multiply(Shared shared, float* sums, int steps, int rank) {
    const unsigned a = matrix_descriptor(shared.weights(0), 16), b = matrix_descriptor(shared.inputs(0), 16);
    const bool leads = threadIdx.x == 0;
    float d[kColumns / 2] = {};
    Ring<STAGES> ring(0);
    int last_stage = 0;
    for (int step = 0; step < steps; step++) {
        barrier_wait(shared.full(ring.stage), ring.parity);
        wgmma_fence();
        const unsigned place = ring.stage * (Shared::kStageBytes >> 4);
#pragma unroll
        for (int k = 0; k < 4; k++) Product::multiply(d, a + place + 2 * k, b + place + 2 * k, step > 0 || k > 0);
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            if (leads) barrier_arrive(shared.empty(last_stage));
        }
        last_stage = ring.stage;
        ring.advance();
    }
    wgmma_wait<0>();
    Product::pin(d);
    // A thread has the columns lane % 4 * 2 and the next of its warp's rows lane / 4 and lane / 4 + 8.
    if (static_cast<int>(threadIdx.x % 4) != rank / 2) return;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sums[row + half * 8] = to_float(from_float<Scalar>(rank % 2 ? d[half * 2 + 1] : d[half * 2]));
    }
}

// Four sums of block `rank` of the cluster.
__device__ __forceinline__ float4 load_sums(unsigned address, int rank) {
    float4 value;
    if (TOP_K > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

struct Ends {
    const Scalar* bias;         // [experts, outputs], of BIAS
    Scalar* residual;           // [outputs]
    const Scalar* norm_weight;  // [outputs]
    Scalar* out;                // [outputs]
    float* new_squares;         // [tiles, kSquaresPitch]
};

// By a warp: adds the row's experts up, and ends a tile.
__device__ __forceinline__ void end_tile(
    Shared shared, const int* experts, const float* weights, const Ends& ends, int tile, int outputs) {
    const int quad = threadIdx.x, column = tile * kRows + quad * 4;
    float squares = 0.0f;
    if (quad < kQuads) {
        auto residual = load_vector<Scalar, 4>(ends.residual + column);
        const auto weight = load_vector<Scalar, 4>(ends.norm_weight + column);
        float4 parts[TOP_K];
#pragma unroll
        for (int rank = 0; rank < TOP_K; rank++) parts[rank] = load_sums(shared.base + Shared::kBytes + quad * 16, rank);
        float sums[4] = {};
#pragma unroll
        for (int rank = 0; rank < TOP_K; rank++) {
            const float factor = weights[rank];
#if BIAS
            const auto bias = load_vector<Scalar, 4>(ends.bias + experts[rank] * static_cast<long long>(outputs) + column);
            parts[rank].x += to_float(bias[0]), parts[rank].y += to_float(bias[1]);
            parts[rank].z += to_float(bias[2]), parts[rank].w += to_float(bias[3]);
#endif
            sums[0] += factor * parts[rank].x, sums[1] += factor * parts[rank].y;
            sums[2] += factor * parts[rank].z, sums[3] += factor * parts[rank].w;
        }
        Vector<Scalar, 4> result;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            residual[j] = from_float<Scalar>(to_float(residual[j]) + sums[j]);
            const float rounded = to_float(residual[j]);
            squares += rounded * rounded;
            result[j] = from_float<Scalar>(rounded * to_float(weight[j]));
        }
        store_vector(ends.residual + column, residual);
        store_vector(ends.out + column, result);
    }
    squares = lane_sum(squares, 32);
    if (quad == 0) ends.new_squares[tile * kSquaresPitch] = squares;
}

// weights: planes of 64 columns of all experts' matrices, one above the other, in boxes of 64 rows; inputs: those of the
// experts' activations [TOP_K, width], in the router's order, in boxes of 8 rows. `outputs` is a multiple of 64, and the
// grid has a cluster for each tile.
extern "C" __global__ void __cluster_dims__(TOP_K, 1, 1) __launch_bounds__(kThreads) expert_sum(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, const float* parts, int num_parts,
    const float* router_bias, const float* squares, int num_squares, float inverse_width, float eps, const Scalar* bias,
    Scalar* residual, const Scalar* norm_weight, Scalar* out, float* new_squares, int steps, int outputs) {
    extern __shared__ __align__(1024) char shared_bytes[];
    __shared__ float own_weights[TOP_K];
    __shared__ int own_experts[TOP_K];
    const Shared shared{shared_address(shared_bytes)};
    float* sums = reinterpret_cast<float*>(shared_bytes + Shared::kBytes);
    float* logits = sums + kRows;
    if (threadIdx.x == kConsumers) shared.init(1, 1);
    release_successors();
    LoneRow{parts, num_parts, router_bias, squares, num_squares, inverse_width, eps}.add_up(logits);
    __syncthreads();
    const int rank = TOP_K > 1 ? cluster_rank() : 0, tile = blockIdx.x / TOP_K;
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0), lane = threadIdx.x % 32;
    if (warp == kConsumers / 32) {
        const Choice choice(logits, router_bias);
        if (lane < TOP_K) own_weights[lane] = choice.weight, own_experts[lane] = choice.expert;
        const int expert = __shfl_sync(kFullWarp, choice.expert, rank);
        if (lane == 0) produce(shared, &weights, &inputs, expert * outputs + tile * kRows, steps);
        __syncwarp();
    } else {
        wait_for_predecessors();
        multiply(shared, sums, steps, rank);
        __syncwarp();
    }
    if (TOP_K > 1) cluster_sync();
    else __syncthreads();
    if (rank == 0 && warp == 0) {
        const Ends ends{bias, residual, norm_weight, out, new_squares};
        end_tile(shared, own_experts, own_weights, ends, tile, outputs);
        __syncwarp();
    }
    if (TOP_K > 1) cluster_sync();  // the first block still reads the others' sums
}

#endif
