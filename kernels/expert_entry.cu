// All that lies between the product before a layer's experts and their products, in one launch for Hopper (sm_90a):
// residual += product, the norm, the router's product, and routing. For some hundred rows these are all short, and what
// costs is to start one kernel after another.
//
// A cluster of SPLIT blocks takes kRows rows; each block has kSlice of their columns, and the router's weights for these,
// which are read before the product is there. The blocks exchange sums of squares, then parts of the logits, and add both
// up in a fixed order: what a row gets depends on it alone. Each block then routes some of the rows. The norm is that of
// add_rms_norm.cu, and the plan that of expert_routing.cu with several blocks.
//
// The experts' products cannot start while these blocks fill the multiprocessors, so this kernel asks L2 for their first
// weights.
//
// Macros: SCALAR; WIDTH, of a row; SPLIT, 1, 2, 4 or 8; those of expert_choice.cuh, with up to 256 EXPERTS.

#include "expert_choice.cuh"
#include "expert_lists.cuh"
#include "expert_tile.cuh"
#include "hopper_cluster.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = SCALAR;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 16;                     // of a cluster: those of one product of tensor cores
constexpr int kOwn = kRows / SPLIT;           // rows that a block routes
constexpr int kSlice = WIDTH / SPLIT;
constexpr int kChunks = kSlice / 8;           // of 16 bytes
constexpr int kOfRow = kThreads / kRows;      // threads that share a row
constexpr int kVectors = (kChunks + kOfRow - 1) / kOfRow;  // of a thread
constexpr int kExperts = (EXPERTS + 15) / 16 * 16;         // of the product; further ones are 0
constexpr int kPitch = kExperts + 4;          // of a row's logits
static_assert(WIDTH % (16 * SPLIT) == 0, "a slice is a whole number of steps of 16");
static_assert(EXPERTS <= kThreads && TOP_K <= 32 && TOP_K <= EXPERTS, "a thread for each expert, a lane for each choice");

using Tile = SwizzledRows<kSlice * 2>;  // of rows and of the router

struct Shared {
    char rows[kRows * Tile::kRowBytes];
    char router[kExperts * Tile::kRowBytes];
    float parts[kRows][kPitch];  // of the logits, of this block's columns
    float logits[kOwn][kPitch];
    float squares[kRows];        // of this block's columns
};

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

__device__ __forceinline__ void meet() {
    if (SPLIT > 1) cluster_sync();
    else __syncthreads();
}

__device__ __forceinline__ void copy_router(Shared& shared, const Scalar* router, int first_column) {
    for (int i = threadIdx.x; i < kExperts * kChunks; i += kThreads) {
        const int expert = i / kChunks, chunk = i % kChunks;
        const Scalar* from = router + min(expert, EXPERTS - 1) * static_cast<long long>(WIDTH) + first_column + chunk * 8;
        copy_async(shared_address(shared.router) + Tile::offset(expert, chunk), from, expert < EXPERTS ? 16 : 0);
    }
    commit_copies();
}

// A thread's part of a row: vectors lane, lane + kOfRow, ... of the block's columns.
struct RowPart {
    Vector<Scalar, 8> values[kVectors], scales[kVectors];
    int lane, row;     // among the threads of the row, and of the cluster's rows
    long long place;   // of the row's first column here
    bool exists;

    __device__ __forceinline__ RowPart(int first_row, int num_rows, int first_column)
        : lane(threadIdx.x % kOfRow), row(threadIdx.x / kOfRow),
          place(static_cast<long long>(first_row + row) * WIDTH + first_column), exists(first_row + row < num_rows) {}
    __device__ __forceinline__ bool has(int i) const { return i * kOfRow + lane < kChunks; }

    __device__ __forceinline__ void load_scales(const Scalar* norm_weight, int first_column) {
#pragma unroll
        for (int i = 0; i < kVectors; i++) {
            if (has(i)) scales[i] = load_vector<Scalar, 8>(norm_weight + first_column + (i * kOfRow + lane) * 8);
        }
    }
    // Adds `product` to the residual stream; returns the sum of squares over this block's columns.
    __device__ __forceinline__ float add(const Scalar* product, Scalar* residual) {
        Vector<Scalar, 8> carried[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; i++) {
            values[i] = carried[i] = {};
            if (!exists || !has(i)) continue;
            values[i] = load_vector<Scalar, 8>(product + place + (i * kOfRow + lane) * 8);
            carried[i] = load_vector<Scalar, 8>(residual + place + (i * kOfRow + lane) * 8);
        }
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; i++) {
            if (!exists || !has(i)) continue;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                values[i][j] = from_float<Scalar>(to_float(values[i][j]) + to_float(carried[i][j]));
                squares += to_float(values[i][j]) * to_float(values[i][j]);
            }
            store_vector(residual + place + (i * kOfRow + lane) * 8, values[i]);
        }
        return lane_sum(squares, kOfRow);
    }
    // Stores the normed row, to `out` too.
    __device__ __forceinline__ void norm(Shared& shared, float scale, Scalar* out) {
#pragma unroll
        for (int i = 0; i < kVectors; i++) {
            if (!has(i)) continue;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                values[i][j] = from_float<Scalar>(to_float(values[i][j]) * scale * to_float(scales[i][j]));
            }
            const int chunk = i * kOfRow + lane;
            *reinterpret_cast<Vector<Scalar, 8>*>(shared.rows + Tile::offset(row, chunk)) = values[i];
            if (exists) store_vector(out + place + chunk * 8, values[i]);
        }
    }
};

// Parts of the logits of all rows, of 16 experts a warp at a time.
__device__ __forceinline__ void multiply(Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned rows = shared_address(shared.rows), router = shared_address(shared.router);
    for (int first = warp * 16; first < kExperts; first += kWarps * 16) {
        float sums[2][4] = {};
#pragma unroll 4
        for (int step = 0; step < kSlice / 16; step++) {
            unsigned a[4], b[4];
            load_matrices(a, rows + Tile::offset(lane % 16, step * 2 + lane / 16));
            load_matrices(b, router + Tile::offset(first + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
            Tensor16<Scalar>::mma(sums[0], a, b[0], b[1]);
            Tensor16<Scalar>::mma(sums[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                shared.parts[lane / 4 + i / 2 * 8][first + half * 8 + lane % 4 * 2 + i % 2] = sums[half][i];
            }
        }
    }
}

// The logits of the rows that this block routes.
__device__ __forceinline__ void add_up(Shared& shared, int rank) {
    constexpr int kQuads = kExperts / 4;
    for (int i = threadIdx.x; i < kOwn * kQuads; i += kThreads) {
        const int row = i / kQuads, column = i % kQuads * 4;
        float4 parts[SPLIT], total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int other = 0; other < SPLIT; other++) {
            parts[other] = load_of_rank(&shared.parts[rank * kOwn + row][column], other);
        }
#pragma unroll
        for (int other = 0; other < SPLIT; other++) {
            total.x += parts[other].x, total.y += parts[other].y, total.z += parts[other].z, total.w += parts[other].w;
        }
        *reinterpret_cast<float4*>(&shared.logits[row][column]) = total;
    }
}

// By a warp: a row's experts, weights and places among the pairs of its experts.
__device__ __forceinline__ void route(
    const float* logits, const float* bias, int row, int* experts, float* weights, const Sorted& sorted) {
    const int lane = threadIdx.x % 32;
    const Choice choice(logits, bias);
    if (lane >= TOP_K) return;
    const int pair = row * TOP_K + lane, index = atomicAdd(&sorted.counts[choice.expert], 1);
    experts[pair] = choice.expert;
    weights[pair] = choice.weight;
    sorted.places[pair] = index;
    sorted.members[choice.expert * sorted.room + index] = pair;
}

// product, residual and out [num_rows, WIDTH]; router [EXPERTS, WIDTH]; bias, experts to arrived: as expert_routing.cu,
// of several blocks. gate_up: the map of the gated products' weights, of whose first tiles, as many as `products`,
// `fetched` pieces of 64 columns are asked for, every `stride`-th. The grid has SPLIT blocks for kRows rows.
extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(kThreads) expert_entry(
    const __grid_constant__ TensorMap gate_up, const Scalar* product, Scalar* residual, const Scalar* norm_weight,
    Scalar* out, const Scalar* router, const float* bias, int* experts, float* weights, int* indexes, int* members,
    int* counts, int* ends, int* jobs, int* arrived, float eps, int num_rows, int job_rows, int room, int products, int tiles,
    int outputs, int fetched, int stride) {
    extern __shared__ __align__(128) char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    release_successors();
    const int rank = SPLIT > 1 ? cluster_rank() : 0, first_row = blockIdx.x / SPLIT * kRows;
    copy_router(shared, router, rank * kSlice);
    RowPart part(first_row, num_rows, rank * kSlice);
    part.load_scales(norm_weight, rank * kSlice);
    wait_for_predecessors();
    const float squares = part.add(product, residual);
    if (part.lane == 0) shared.squares[part.row] = squares;
    meet();
    const float4 four = load_of_rank(&shared.squares[part.row / 4 * 4], part.lane % SPLIT);
    const float own = part.row % 4 == 0 ? four.x : part.row % 4 == 1 ? four.y : part.row % 4 == 2 ? four.z : four.w;
    part.norm(shared, rsqrtf(lane_sum(own, SPLIT) / WIDTH + eps), out);
    wait_copies<0>();
    __syncthreads();
    if (threadIdx.x >= kThreads - 32) {
        for (int i = blockIdx.x; i < products; i += gridDim.x) {
            fetch_tile(&gate_up, i, tiles, outputs, fetched, stride, threadIdx.x % 32, 32);
        }
        __syncwarp();
    }
    multiply(shared);
    meet();
    add_up(shared, rank);
    __syncthreads();
    if (SPLIT > 1) cluster_arrive();  // all that is in other blocks has been read
    const Sorted sorted{indexes, nullptr, members, counts, ends, jobs, room, job_rows, false};
    for (int i = threadIdx.x / 32; i < kOwn; i += kWarps) {
        const int row = first_row + rank * kOwn + i;
        if (row < num_rows) route(shared.logits[i], bias, row, experts, weights, sorted);
    }
    list_jobs_at_last<kThreads>(sorted, arrived);
    if (SPLIT > 1) cluster_wait();
}

#endif
