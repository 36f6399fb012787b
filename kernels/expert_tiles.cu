// Products of many rows with the matrices of the experts that they were routed to, for Hopper (sm_90a): as
// kernels/expert_product.cu, with the same sums bit for bit, but at the rate of the tensor cores.
//
// A tile is 256 rows of an expert's matrix by a job's rows, of which there are up to TOKENS: the matrix's rows are the
// product's 64-row operands, so that a job pays for its own rows, rounded up to 8 or 16, and not for whole tiles of 64 or
// 128 rows. Two warpgroups multiply 128 rows each, where GATED 64 of gate and the same 64 of up: a thread has the gate and
// up sums of the same outputs. The third copies pieces of 64 columns through a ring of stages, also across tiles.
// Outputs are transposed within warps and stored without shared memory.
//
// The jobs are older than this kernel's predecessor, so weights are copied before that has ended; unless it GATHERS. Then x
// is not sorted, and the predecessor is the routing: the third warpgroup copies the rows of a job from wherever they are,
// and notes where their outputs will lie. While the routing still runs, L2 gets the weights of the first tiles, on the guess
// that each expert has one job.
//
// Jobs of many rows multiply at the rate of the tensor cores, and find their weights in L2; those of few run at the rate of
// memory. In a step with a long prompt there may be many of both, as a prompt's positions choose much the same experts. So
// that both run at the same time, the routing lets them alternate, and blocks with CLAIMS take the next tile as they end one.
//
// Macros: SCALAR; TOKENS, 32, 64, 128 or 160; STAGES; GATED, 1: out = gated(gate, up) of gating.cuh, where W is all rows of gate,
// then those of up; CLAIMS, 1: blocks
// claim tiles; of GATED: BIAS, GATHERS, and SCALED, 1: products are multiplied by their rows' scales.

#include "expert_claims.cuh"
#include "expert_tile.cuh"
#include "wgmma.cuh"
#if GATED
#include "gating.cuh"
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = SCALAR;

constexpr int kConsumers = 2;
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kBlockBytes = 64 * 128;      // 64 columns of a block
constexpr int kWeightBytes = kBlocks * kBlockBytes;
constexpr int kBoxRows = 16;               // of x, copied at once: by a box, or by a warpgroup that GATHERS
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kOutputs = GATED ? kGatedOutputs : 256;  // of a tile
constexpr int kSums = TOKENS / 2;            // of a thread, for each of its warpgroup's two blocks of rows

using Shared = OperandRing<STAGES, kWeightBytes, TOKENS * 128>;

#if GATHERS
static_assert(GATED && !SCALED, "what gathers is of steps whose rows are normed");
// The rows of a job, as a thread of the copying warpgroup knows them: it copies 16 bytes of every 16th.
struct JobRows {
    const char* x;
    unsigned offsets[TOKENS / kBoxRows];  // from x, in units of 16 bytes
    int rows;                             // of which the thread copies some
    int row;                              // the first of them
    int chunk;

    // The first tile of a job also leaves the places of its rows.
    __device__ __forceinline__ void find(const Problem& problem, const Work& work, int* places) {
        const int* members = problem.pairs + work.expert * problem.room + work.before;
        rows = work.rows;
#pragma unroll
        for (int i = 0; i < TOKENS / kBoxRows; i++) {  // all are loaded before one is used
            if (i * kBoxRows + row < rows) offsets[i] = __ldcg(members + i * kBoxRows + row);
        }
#pragma unroll
        for (int i = 0; i < TOKENS / kBoxRows; i++) {
            const int index = i * kBoxRows + row;
            if (index >= rows) continue;
            const int pair = offsets[i];
            offsets[i] = pair / problem.top_k * (problem.steps * 8) + chunk;
            if (work.tile == 0 && chunk == 0) places[pair] = work.first + index;
        }
    }
    // Copies 64 columns, from `step` on, of all rows to a stage, and arrives at its barrier when they are there.
    __device__ __forceinline__ void copy(int step, unsigned target, unsigned barrier) const {
        const unsigned own = target + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
        for (int i = 0; i < TOKENS / kBoxRows; i++) {
            if (i * kBoxRows + row >= rows) continue;
            copy_async(own + i * kBoxBytes, x + (static_cast<unsigned long long>(offsets[i] + step * 8) << 4), 16);
        }
        arrive_after_copies(barrier);
    }
};
#endif

// What fills the ring.
struct Copies {
    Shared shared;
    const TensorMap* weights;
    const TensorMap* inputs;
    const Problem& problem;
    unsigned long long policy;  // of weights, unless those of each tile have their own

    __device__ __forceinline__ int row_of(int expert, int tile, int block) const {
        return GATED ? gated_row(expert, tile, block, problem.outputs)
                     : expert * problem.outputs + tile * kOutputs + block * 64;
    }
    __device__ __forceinline__ void copy_weights(const Work& work, int step, int stage) const {
#pragma unroll
        for (int block = 0; block < kBlocks; block++) {
            copy_tensor(shared.weights(stage) + block * kBlockBytes, weights, 0, row_of(work.expert, work.tile, block), step,
                        shared.full(stage), policy_of(work));
        }
    }
    // Where blocks claim, an expert of several jobs has many rows in each.
    __device__ __forceinline__ unsigned long long policy_of(const Work& work) const {
        if (!CLAIMS) return policy;
        return 2 * work.rows < TOKENS ? evict_first_policy() : evict_normal_policy();
    }
#if !GATHERS
    __device__ __forceinline__ void expect(const Work& work, int stage) const {
        barrier_expect(shared.full(stage), kWeightBytes + boxes(work) * kBoxBytes);
    }
    __device__ __forceinline__ void copy_inputs(const Work& work, int step, int stage) const {
        const int count = boxes(work);
        for (int box = 0; box < count; box++) {
            copy_tensor(shared.inputs(stage) + box * kBoxBytes, inputs, 0, work.first + box * kBoxRows, step,
                        shared.full(stage));
        }
    }

private:
    __device__ __forceinline__ int boxes(const Work& work) const { return (work.rows + kBoxRows - 1) / kBoxRows; }
#endif
};

#if GATHERS
// Steps of a block's first tile that L2 gets early. Of few rows it gets every second one: the others then come from memory at
// the same time, while the ring is filled.
constexpr int kFetchStride = TOKENS > 32 ? 1 : 2;
constexpr int kFetched = TOKENS > 32 ? 14 : 11;

__device__ __forceinline__ void fetch_first_tile(const Copies& copies, const Problem& problem) {
    const int fetched = min(kFetched, problem.steps / kFetchStride);
    fetch_tile(copies.weights, blockIdx.x, problem.tiles, problem.outputs, fetched, kFetchStride);
}

// By a warpgroup, one thread of which copies weights and, with CLAIMS, claims tiles: fills the ring for all of a block's tiles.
// With `guesses` each expert is thought to have one job.
__device__ __forceinline__ void gather_into_ring(
    const Copies& copies, const Problem& problem, const char* x, int* places, bool leads, bool guesses
#if CLAIMS
    , const Announced& announced, int* claimed
#endif
) {
    const Shared& shared = copies.shared;
    JobRows job{x};
    job.row = threadIdx.x % 128 / 8, job.chunk = threadIdx.x % 8;
    if (leads && guesses) fetch_first_tile(copies, problem);
    wait_then_release();
    Ring<STAGES> ring(1);
    Work work = first_work(problem);
    const int total = load_job(problem.jobs) * problem.tiles;
    int given = 0;  // steps whose weights have been asked for: those of the first tile before its rows are known
    if (leads && static_cast<int>(blockIdx.x) < total) {
        given = min(STAGES, problem.steps);
#if CLAIMS
        announced.leave(0, work);
#endif
        for (int i = 0; i < given; i++) {
            barrier_expect(shared.full(i), kWeightBytes);
            copies.copy_weights(work, i, i);
        }
    }
#if CLAIMS
    __shared__ int claims[2];
    int claim = 0;
#endif
    for (int index = blockIdx.x, turn = 0; index < total; turn++, given = 0) {
        if (turn > 0) work = Work(problem, index);
#if CLAIMS
        if (leads) claim = gridDim.x + atomicAdd(claimed, 1);
#endif
        job.find(problem, work, places);
        for (int step = 0; step < problem.steps; step++, ring.advance()) {
            barrier_wait(shared.empty(ring.stage), ring.parity);
            if (leads && step >= given) {
#if CLAIMS
                if (step == 0) announced.leave(ring.stage, work);
#endif
                barrier_expect(shared.full(ring.stage), kWeightBytes);
                copies.copy_weights(work, step, ring.stage);
            }
            job.copy(step, shared.inputs(ring.stage), shared.full(ring.stage));
        }
#if CLAIMS
        index = share_claim(claims, turn, leads, claim);
#else
        index += gridDim.x;
#endif
    }
#if CLAIMS
    barrier_wait(shared.empty(ring.stage), ring.parity);
    if (leads) {
        announced.leave_end(ring.stage);
        barrier_arrive(shared.full(ring.stage));  // for the weights
    }
    barrier_arrive(shared.full(ring.stage));
#endif
}
#endif

// One of the multiplying warpgroups: two blocks of 64 rows of each tile.
struct Consumer {
    Shared shared;
    const Problem& problem;
    int index;
    bool leads;  // this thread arrives for the warpgroup
    unsigned weight_matrix, input_matrix;
    Ring<STAGES> ring;
    float sums[2][kSums];

#if CLAIMS
    __device__ __forceinline__ void consume(const Announced& announced) {
        while (true) {
            barrier_wait(shared.full(ring.stage), ring.parity);
            const Work work = announced.at(ring.stage);
            if (work.rows == 0) return;
            multiply_columns(work.rows);
            write(work);
        }
    }
#else
    __device__ __forceinline__ void consume() {
        Work work = first_work(problem);
        const int total = load_job(problem.jobs) * problem.tiles;
        for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
            if (tile != static_cast<int>(blockIdx.x)) work = Work(problem, tile);
            multiply_columns(work.rows);
            write(work);
        }
    }
#endif

private:
    __device__ __forceinline__ void multiply_columns(int columns) {
        if (columns <= 8) multiply<8>();
        else if (columns <= 16) multiply<16>();
        else if (columns <= 24) multiply<24>();
        else if (columns <= 32) multiply<32>();
#if TOKENS > 32
        else if (columns <= 48) multiply<48>();
        else if (columns <= 64) multiply<64>();
#endif
#if TOKENS > 64
        else if (columns <= 80) multiply<80>();
        else if (columns <= 96) multiply<96>();
        else if (columns <= 112) multiply<112>();
        else if (columns <= 128) multiply<128>();
#endif
#if TOKENS > 128
        else if (columns <= 136) multiply<136>();
        else if (columns <= 144) multiply<144>();
        else multiply<160>();
#endif
    }

    template <int Columns>
    __device__ __forceinline__ void multiply() {
        using Product = Wgmma<Scalar, Columns / 2>;
        using Sums = float[Columns / 2];
        Sums& first = reinterpret_cast<Sums&>(sums[0]);
        Sums& second = reinterpret_cast<Sums&>(sums[1]);
        int last_stage = 0;
        for (int step = 0; step < problem.steps; step++) {
            barrier_wait(shared.full(ring.stage), ring.parity);
            if (GATHERS) fence_async_proxy();  // rows of x are not written by the copy engine
            wgmma_fence();
            // Equal in all lanes; the shuffle shows that to the compiler, which then uses uniform registers.
            const unsigned place = __shfl_sync(kFullWarp, ring.stage * (Shared::kStageBytes >> 4), 0);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const unsigned a = weight_matrix + place + 2 * k, b = input_matrix + place + 2 * k;
                Product::multiply(first, a, b, step > 0 || k > 0);
                Product::multiply(second, a + (kBlockBytes >> 4), b, step > 0 || k > 0);
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
        Product::pin(first);
        Product::pin(second);
        if (leads) barrier_arrive(shared.empty(last_stage));
    }

    // A thread's sums are of the rows lane / 4 and lane / 4 + 8 of its warp's 16, and two neighbouring columns in 8.
    __device__ __forceinline__ void write(const Work& work) const {
        const int warp = (threadIdx.x & 127) / 32 * 16;
#if GATED
        const int output = work.tile * kOutputs + index * 64 + warp;
        if (output >= problem.outputs) return;
        Biases biases(problem, work, output);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j += 2) {
            if (j * 8 >= work.rows) return;
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = activated(work, biases, j + i / 2, i % 2);
            store(words, work, j, output);
        }
#else
#pragma unroll
        for (int block = 0; block < 2; block++) {
            const int output = work.tile * kOutputs + index * 128 + block * 64 + warp;
            if (output >= problem.outputs) return;
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j += 2) {
                if (j * 8 >= work.rows) break;
                unsigned words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* pair = sums[block] + (j + i / 2) * 4 + i % 2 * 2;
                    words[i] = Tensor16<Scalar>::pack(pair[0], pair[1]);
                }
                store(words, work, j, output);
            }
        }
#endif
    }

#if GATED
    // Of a thread's two rows.
    struct Biases {
        float gate[2] = {}, up[2] = {};

        __device__ __forceinline__ Biases(const Problem& problem, const Work& work, int output) {
#if BIAS
            const Scalar* bias = problem.bias + work.expert * 2ll * problem.outputs + output + (threadIdx.x & 31) / 4;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                gate[i] = to_float(bias[i * 8]);
                up[i] = to_float(bias[problem.outputs + i * 8]);
            }
#endif
        }
    };

    // Two columns of one of the thread's rows, in the j-th 8 of the job's rows.
    __device__ __forceinline__ unsigned activated(const Work& work, const Biases& biases, int j, int half) const {
        float values[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float gate = sums[0][j * 4 + half * 2 + i], up = sums[1][j * 4 + half * 2 + i];
#if SCALED
            const int row = work.first + min(j * 8 + static_cast<int>(threadIdx.x & 3) * 2 + i, work.rows - 1);
            const float scale = __ldcg(problem.scales + __ldcg(problem.pairs + row) / problem.top_k);
            gate *= scale, up *= scale;
#endif
#if BIAS
            gate += biases.gate[half], up += biases.up[half];
#endif
            values[i] = gated(gate, up);
        }
        return Tensor16<Scalar>::pack(values[0], values[1]);
    }
#endif

    // Stores 16 outputs of 16 of the job's rows: words are both halves of the j-th 8 rows, then of the next.
    __device__ __forceinline__ void store(unsigned (&words)[4], const Work& work, int j, int output) const {
        const int lane = threadIdx.x & 31, quad = lane & 3;
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = transpose_matrix(words[i]);
        exchange_in_quad(words, static_cast<bool>(quad & 1), static_cast<bool>(quad & 2));
        const int row = (j + quad / 2) * 8 + lane / 4;
        if (row >= work.rows) return;
        Scalar* target = problem.out + (work.first + row) * static_cast<long long>(problem.outputs) + output + quad % 2 * 8;
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// weights: planes of 64 columns of all experts' matrices, one above the other, in boxes of 64 rows; inputs: those of x,
// sorted, in boxes of 16 rows, or x itself, whose rows are `steps` pieces of 64 columns, for what GATHERS. With `reads_once`
// few experts have more than one job. `claimed` is 0, and becomes the number of tiles claimed. Any grid will do.
extern "C" __global__ void __launch_bounds__(kThreads, 1) expert_tiles(
    const __grid_constant__ TensorMap weights,
#if GATHERS
    const char* x, int* places,
#else
    const __grid_constant__ TensorMap inputs,
#endif
    const int* jobs, const int* pairs, const Scalar* bias, const float* scales, Scalar* out, int top_k, int room, int steps,
    int tiles, int outputs, int reads_once
#if CLAIMS
    , int* claimed
#endif
) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
#if CLAIMS
    const Announced announced{reinterpret_cast<int*>(shared_bytes + Shared::kBytes)};
#endif
    if (threadIdx.x == 0) shared.init(GATHERS ? 1 + 128 : 1, kConsumers);
    __syncthreads();
    const Problem problem{jobs, pairs, top_k, room, steps, tiles, outputs, bias, scales, out};
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x >> 7, 0);
    if (warpgroup == kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const bool leads = threadIdx.x == kConsumers * 128;
        const unsigned long long policy = reads_once ? evict_first_policy() : evict_normal_policy();
#if GATHERS
        const Copies copies{shared, &weights, nullptr, problem, policy};
#if CLAIMS
        gather_into_ring(copies, problem, x, places, leads, reads_once != 0, announced, claimed);
#else
        gather_into_ring(copies, problem, x, places, leads, true);
#endif
#else
        const Copies copies{shared, &weights, &inputs, problem, policy};
#if CLAIMS
        if (leads) fill_ring_by_claims(copies, problem, announced, claimed);
#else
        if (leads) fill_ring<true>(copies, problem);
#endif
#endif
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wait_then_release();
        Consumer consumer{shared, problem, warpgroup, (threadIdx.x & 127) == 0,
                          matrix_descriptor(shared.weights(0) + warpgroup * 2 * kBlockBytes, 16),
                          matrix_descriptor(shared.inputs(0), 16), Ring<STAGES>(0)};
#if CLAIMS
        consumer.consume(announced);
#else
        consumer.consume();
#endif
    }
}

#endif
