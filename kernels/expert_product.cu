// Products of rows with the matrices of the experts that they were routed to, for Hopper (sm_90a): as fast as the active
// experts' weights can be read, each once where an expert has at most TOKENS rows.
//
// kernels/expert_routing.cu lists the work on the device: a job is an expert and up to TOKENS of its rows, which lie one
// after the other. A block stays for the whole launch and takes a tile of 64 rows of an expert's matrix at a time, those
// of a job one after another, so that jobs of one expert run at the same time and find its weights in L2. W's rows are
// the product's 64-row operand and the job's rows its columns, of which there are as many as it needs, in powers of two.
// One thread copies pieces of 64 columns through a ring of stages, also across tiles.
//
// Each output is one sum over the columns of W, ascending: it depends on its row alone, not on the rows beside it.
//
// Few rows of x (`all_rows`) need no sorting: each job multiplies all of them and writes those that are its own.
//
// Macros: SCALAR; TOKENS, 8, 16, 32, 64 or 128; STAGES; GATED, 1: out = gated(gate, up) of gating.cuh, where W is all rows
// of gate, then those of up; of GATED: HALF_ROWS, rows of gate in a tile, 32 or, for more tiles, 24 or 16, so that the
// product's other rows are unused; BIAS; SCALED, 1: products are multiplied by their rows' scales; EARLY, 1: the jobs are
// older than this kernel's predecessor, so weights are copied before that has ended; ROUTES, 1: x is a single row, whose
// experts every block finds from the router's logits, which saves a launch (macros of lone_row.cuh).

#include "expert_ring.cuh"
#include "wgmma.cuh"
#if GATED
#include "gating.cuh"
#endif
#if ROUTES
#include "lone_row.cuh"
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using Scalar = SCALAR;

constexpr int kRows = 64;
constexpr int kConsumers = 128;
constexpr int kWeightBytes = kRows * 128;
constexpr int kBoxRows = 8;  // of x, copied at once
constexpr int kBoxBytes = kBoxRows * 128;
constexpr int kPitch = kRows + 4;  // of a row's sums: lanes of a warp write to different banks
constexpr int kOutputs = GATED ? HALF_ROWS : kRows;  // of a row
constexpr int kCopiedBytes = (GATED ? 2 * HALF_ROWS : kRows) * 128;  // of weights in a stage
constexpr int kQuads = kOutputs / 4;

// Behind the ring, sums [TOKENS][kPitch].
using Shared = OperandRing<STAGES, kWeightBytes, TOKENS * 128>;

// What fills the ring.
struct Copies {
    Shared shared;
    const TensorMap* weights;
    const TensorMap* inputs;
    const Problem& problem;
    unsigned long long policy;

    __device__ __forceinline__ void expect(const Work& work, int stage) const {
        barrier_expect(shared.full(stage), kCopiedBytes + boxes(work) * kBoxBytes);
    }
    __device__ __forceinline__ void copy_weights(const Work& work, int step, int stage) const {
        const unsigned target = shared.weights(stage), full = shared.full(stage);
        if (GATED) {
            const int row = work.expert * 2 * problem.outputs + work.tile * kOutputs;
            copy_tensor(target, weights, 0, row, step, full, policy);
            copy_tensor(target + kWeightBytes / 2, weights, 0, row + problem.outputs, step, full, policy);
        } else {
            copy_tensor(target, weights, 0, work.expert * problem.outputs + work.tile * kRows, step, full, policy);
        }
    }
    __device__ __forceinline__ void copy_inputs(const Work& work, int step, int stage) const {
        const int first = problem.all_rows ? 0 : work.first;
        for (int box = 0; box < boxes(work); box++) {
            copy_tensor(shared.inputs(stage) + box * kBoxBytes, inputs, 0, first + box * kBoxRows, step, shared.full(stage));
        }
    }

private:
    __device__ __forceinline__ int boxes(const Work& work) const {
        return (work.columns(problem) + kBoxRows - 1) / kBoxRows;
    }
};

__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// The warpgroup that multiplies.
struct Consumer {
    Shared shared;
    float* sums;  // [TOKENS][kPitch]
    const Problem& problem;
    Ring<STAGES> ring;

    __device__ __forceinline__ void consume() {
        const int total = load_job(problem.jobs) * problem.tiles;
        for (int index = blockIdx.x; index < total; index += gridDim.x) {
            const Work work(problem, index);
            const int columns = work.columns(problem);
            if (ROUTES || columns <= 8) multiply<8>();
            else if (TOKENS >= 16 && columns <= 16) multiply<16>();
            else if (TOKENS >= 32 && columns <= 32) multiply<32>();
            else if (TOKENS >= 64 && columns <= 64) multiply<64>();
            else multiply<TOKENS>();
            consumers_sync();
            write(work);
            consumers_sync();
        }
    }

private:
    // Leaves the sums of a tile in shared memory.
    template <int Columns>
    __device__ __forceinline__ void multiply() {
        constexpr int kSums = (Columns < TOKENS ? Columns : TOKENS) / 2;
        using Product = Wgmma<Scalar, kSums>;
        const bool leads = threadIdx.x == 0;
        const unsigned a = matrix_descriptor(shared.weights(0), 16), b = matrix_descriptor(shared.inputs(0), 16);
        float d[kSums] = {};  // without which the compiler waits for each product of a kernel that routes
        int last_stage = 0;
        for (int step = 0; step < problem.steps; step++) {
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
        if (leads) barrier_arrive(shared.empty(last_stage));
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < kSums / 4; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[(j * 8 + column + i % 2) * kPitch + row + i / 2 * 8] = d[4 * j + i];
        }
    }

    // The row of unsorted x of a sorted one.
    __device__ __forceinline__ int token(int row) const {
        return ROUTES ? 0 : __ldcg(problem.pairs + row) / problem.top_k;
    }

    // Four neighbouring outputs at a time.
    __device__ __forceinline__ void write(const Work& work) const {
        for (int index = threadIdx.x; index < work.rows * kQuads; index += kConsumers) {
            const int i = index / kQuads, quad = index % kQuads * 4, output = work.tile * kOutputs + quad;
            if (output >= problem.outputs) continue;
            const int row = work.first + i;
            const int column = problem.all_rows ? token(row) : i;
            auto values = load_vector<float, 4>(sums + column * kPitch + quad);
#if GATED
            auto up = load_vector<float, 4>(sums + column * kPitch + kRows / 2 + quad);
#if SCALED
            const float scale = ROUTES ? *problem.scales : __ldcg(problem.scales + token(row));
#pragma unroll
            for (int j = 0; j < 4; j++) values[j] *= scale, up[j] *= scale;
#endif
#if BIAS
            const Scalar* bias = problem.bias + work.expert * 2ll * problem.outputs + output;
            const auto gate_bias = load_vector<Scalar, 4>(bias), up_bias = load_vector<Scalar, 4>(bias + problem.outputs);
#pragma unroll
            for (int j = 0; j < 4; j++) values[j] += to_float(gate_bias[j]), up[j] += to_float(up_bias[j]);
#endif
#pragma unroll
            for (int j = 0; j < 4; j++) values[j] = gated(values[j], up[j]);
#endif
            Vector<Scalar, 4> result;
#pragma unroll
            for (int j = 0; j < 4; j++) result[j] = from_float<Scalar>(values[j]);
            store_vector(problem.out + static_cast<long long>(row) * problem.outputs + output, result);
        }
    }
};

#if ROUTES
static_assert(EXPERTS <= TOKENS * kPitch, "the logits lie where sums will");

// By a warp: the jobs of a lone row, to shared memory; where GATED the first block leaves the choice to the kernels behind
// the products.
__device__ __forceinline__ void list_jobs(const Choice& choice, int* jobs, int* experts, float* weights, int* places) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) jobs[0] = TOP_K;
    if (lane >= TOP_K) return;
    int* job = jobs + 4 + lane * 4;
    job[0] = choice.expert, job[1] = lane, job[2] = 1;
    if (GATED && blockIdx.x == 0) experts[lane] = choice.expert, weights[lane] = choice.weight, places[lane] = lane;
}
#endif

// weights: planes of 64 columns of all experts' matrices, one above the other, in boxes of 64 rows (of HALF_ROWS where
// GATED); inputs: those of x in boxes of 8 rows. With `reads_once` few experts have more than one job. Any grid will do.
extern "C" __global__ void __launch_bounds__(kConsumers + 32) expert_product(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, const int* jobs,
    const int* pairs, const Scalar* bias, const float* scales, Scalar* out, int top_k, int all_rows, int steps, int tiles,
    int outputs, int reads_once
#if ROUTES
    , const float* parts, int num_parts, const float* router_bias, const float* squares, int num_squares,
    float inverse_width, float eps, int* experts, float* router_weights, int* places
#endif
) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    if (threadIdx.x == kConsumers) shared.init(1, 1);
    const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
    float* sums = reinterpret_cast<float*>(shared_bytes + Shared::kBytes);
#if ROUTES
    __shared__ int own_jobs[4 + 4 * TOP_K];
    __shared__ float own_scale;
    if (!EARLY) wait_for_predecessors();
    const LoneRow lone{parts, num_parts, router_bias, squares, num_squares, inverse_width, eps};
    const float scale = lone.add_up(sums);
    __syncthreads();
    if (warp == kConsumers / 32) {
        list_jobs(Choice(sums, router_bias), own_jobs, experts, router_weights, places);
        if (threadIdx.x == kConsumers) own_scale = scale;
    }
    jobs = own_jobs, scales = &own_scale;
#endif
    __syncthreads();
    const Problem problem{jobs, pairs, top_k, all_rows, steps, tiles, outputs, bias, scales, out};
    if (warp < kConsumers / 32) {
        wait_then_release();
        Consumer{shared, sums, problem, Ring<STAGES>(0)}.consume();
    } else if (threadIdx.x == kConsumers) {
        const unsigned long long policy = reads_once ? evict_first_policy() : evict_normal_policy();
        fill_ring<EARLY>(Copies{shared, &weights, &inputs, problem, policy}, problem);
    }
}

#endif
