// Products of more than 64 rows with a matrix of e4m3, for Hopper (sm_90a): out = x W^T, or activation(x G^T) * (x U^T).
//
// Tiles and the ring are those of gated_product.cu. A wgmma adds up fewer bits than float32 has, so a chain of them spans
// one step of 128 columns, and its sums are added in float32: in steps whose order depends on the tile of W's rows, and in
// SPLIT parts, both given by the matrix alone. While a step's sums are added, the next step is multiplied. A cluster has two blocks at
// most. With CLUSTER_ROWS 2 they need the same weights, and each copies half of them for both. With SPLIT 2 they have the
// parts of a tile and exchange their sums at the end: each writes half of the columns.
//
// Macros: COLUMNS of W in a tile, 112 or 128; GATED, 1 for the second form: half of the columns are G's, half U's;
// GROUPED, 1 for scales per 128 x 128 weights and 128 inputs of a row; STAGES; CLUSTER_ROWS and SPLIT, 1 or 2, not both
// 2; ACTIVATION, only if GATED.

#include "fp8_many.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Fills the ring for all of a block's tiles. Used by one thread.
struct Producer {
    Shared shared;
    const TensorMap* inputs;
    const TensorMap* weights;
    const Problem& problem;
    Member member;

    __device__ __forceinline__ void copy_inputs(int stage, const Place& place, int step) const {
        const int column = (problem.begin + place.step(step)) * kStep;
        copy_tensor(shared.inputs(stage), inputs, column, place.row, 0, shared.full(stage));
    }

    __device__ __forceinline__ void copy_weights(int stage, const Place& place, int step) const {
        const int column = (problem.begin + place.step(step)) * kStep;
        const unsigned target = shared.weights(stage), full = shared.full(stage);
        if (CLUSTER_ROWS == 1) {
            copy_tensor(target, weights, column, place.half(problem, 0), 0, full);
            copy_tensor(target + kHalfBytes, weights, column, place.half(problem, 1), 0, full);
        } else {  // each block copies a half
            copy_tensor_to(3, target + member.row * kHalfBytes, weights, column, place.half(problem, member.row), 0, full);
        }
    }

    __device__ __forceinline__ void produce(const Tiles& tiles) const {
        Ring<STAGES> ring(1);
        for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
            const Place place(tiles, tile, member, problem.steps);
            int step = 0;
            if (tile == tiles.first()) {  // the copies of weights need not wait for predecessors
                const int ahead = min(STAGES, problem.steps);
                for (int i = 0; i < ahead; i++) {
                    barrier_expect(shared.full(i), kStageBytes);
                    copy_weights(i, place, i);
                }
                wait_for_predecessors();
                for (; step < ahead; step++, ring.advance()) copy_inputs(step, place, step);
            }
            for (; step < problem.steps; step++, ring.advance()) {
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
    int freed;
    float totals[kSums];
    float parts[2][kSums];  // of the steps whose products are in flight
    StepScales scales[2];

    // Releases the oldest stage to all blocks that copy into it.
    __device__ __forceinline__ void release() {
        if (leads) {
            if (CLUSTER_ROWS == 1) barrier_arrive(shared.empty(freed));
            else barrier_arrive_at(shared.empty(freed), 0), barrier_arrive_at(shared.empty(freed), 1);
        }
        if (++freed == STAGES) freed = 0;
    }

    __device__ __forceinline__ void start(float (&part)[kSums]) {
        barrier_wait(shared.full(ring.stage), ring.parity);
        wgmma_fence();
        // Equal in all lanes; the shuffle shows that to the compiler, which then uses uniform registers.
        const unsigned place = __shfl_sync(kFullWarp, ring.stage * (kStageBytes >> 4), 0);
#pragma unroll
        for (int k = 0; k < kStep / 32; k++) {
            multiply_codes(part, input_matrix + place + 2 * k, weight_matrix + place + 2 * k, k > 0);
        }
        wgmma_commit();
        ring.advance();
    }

    // Waits until at most `Pending` younger steps are in flight, and adds the sums of one.
    template <int Pending>
    __device__ __forceinline__ void finish(float (&part)[kSums], const StepScales& step_scales, const Halves& halves) {
        wgmma_wait<Pending>();
        pin_sums(part);
        release();
        promote(totals, part, step_scales, halves);
    }

    // Computes the sums of a tile.
    __device__ __forceinline__ void multiply_tile(const Problem& problem, const Place& place, const RowScales& rows,
                                                  const Halves& halves, bool first_tile) {
#pragma unroll
        for (int i = 0; i < kSums; i++) totals[i] = 0.0f;
        const int steps = problem.steps;
        scales[0].load(problem, rows, halves, place.step(0));
        start(parts[0]);
        start_others(first_tile, 0, steps);
        int step = 1;
        for (; step + 1 < steps; step += 2) {
            scales[1].load(problem, rows, halves, place.step(step));
            start(parts[1]);
            start_others(first_tile, step, steps);
            finish<1>(parts[0], scales[0], halves);
            scales[0].load(problem, rows, halves, place.step(step + 1));
            start(parts[0]);
            start_others(first_tile, step + 1, steps);
            finish<1>(parts[1], scales[1], halves);
        }
        if (step < steps) {
            scales[1].load(problem, rows, halves, place.step(step));
            start(parts[1]);
            start_others(first_tile, step, steps);
            finish<1>(parts[0], scales[0], halves);
            finish<0>(parts[1], scales[1], halves);
        } else {
            finish<0>(parts[0], scales[0], halves);
        }
    }

    // Lets the other warpgroup begin kHeadStart steps later, so that one multiplies while another writes.
    __device__ __forceinline__ void start_others(bool first_tile, int step, int steps) const {
        if (first_tile && index == 0 && step + 1 == min(kHeadStart, steps)) {
            asm volatile("bar.arrive %0, %1;" ::"n"(kHeadStartBarrier), "n"(kConsumers * 128) : "memory");
        }
    }
    __device__ __forceinline__ void await_head_start() const {
        if (index > 0) {
            asm volatile("bar.sync %0, %1;" ::"n"(kHeadStartBarrier), "n"(kConsumers * 128) : "memory");
        }
    }

#if SPLIT == 2
    // Leaves this block's half of the columns in the first half of `totals`, with the sums of both parts. The ring is
    // free: all that was copied into it has been multiplied.
    __device__ __forceinline__ void exchange() {
        consumers_sync();
        const unsigned own = shared.base + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < kSums / 2; i += 4) {
            float sent[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float low = totals[i + j], high = totals[i + j + kSums / 2];
                sent[j] = member.part ? low : high;
                totals[i + j] = member.part ? high : low;
            }
            store_shared(own + i * (kConsumers * 128 * 4), make_uint4(__float_as_uint(sent[0]), __float_as_uint(sent[1]),
                                                                      __float_as_uint(sent[2]), __float_as_uint(sent[3])));
        }
        cluster_sync();
        const unsigned other = remote_address(own, member.part ^ 1);
#pragma unroll
        for (int i = 0; i < kSums / 2; i += 4) {
            const float4 received = load_remote(other + i * (kConsumers * 128 * 4));
            totals[i] += received.x, totals[i + 1] += received.y;
            totals[i + 2] += received.z, totals[i + 3] += received.w;
        }
    }
#endif

    // Writes a tile's outputs, two adjacent ones of a row at a time.
    __device__ __forceinline__ void write(
        const Place& place, const Problem& problem, const RowScales& rows, const TileScales& tile_scales) const {
        const int in_tile = member.part * (kOutputs / SPLIT) + (threadIdx.x & 3) * 2, first = place.column + in_tile;
        constexpr int kBlocks = kOutputs / SPLIT / 8;
        tile_scales.keep();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = rows.row + half * 8;
            const float factor = rows.factors[half];
#pragma unroll
            for (int j = 0; j < kBlocks; j++) {
                const int column = first + j * 8, i = 4 * j + 2 * half;
                const float2 scales = tile_scales.two(in_tile + j * 8);
                float low = totals[i] * factor * scales.x, high = totals[i + 1] * factor * scales.y;
#if GATED
                const float2 up_scales = tile_scales.two(kHalf + in_tile + j * 8);
                low = ACTIVATION(low) * (totals[i + kSums / 2] * factor * up_scales.x);
                high = ACTIVATION(high) * (totals[i + 1 + kSums / 2] * factor * up_scales.y);
#endif
                if (row < problem.rows && column < problem.outputs) {
                    *reinterpret_cast<unsigned*>(problem.out + row * static_cast<long long>(problem.out_stride) + column) =
                        Tensor16<Scalar>::pack(low, high);
                }
            }
        }
    }
};

// inputs: codes of x in boxes of 128 columns and kRows rows; weights: those of W in boxes of 128 columns and kHalf
// rows. tile_rows and tile_columns count clusters. With SPLIT 2 there is a cluster for every tile.
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) fp8_many(
    const __grid_constant__ TensorMap inputs, const __grid_constant__ TensorMap weights, const float* input_factors,
    const float* input_scales, const float* weight_scales, Scalar* out, int width, int rows, int outputs,
    int out_stride, int scales_pitch, int tile_rows, int tile_columns) {
    extern __shared__ __align__(1024) char shared_bytes[];
    const Shared shared{shared_address(shared_bytes)};
    const Member member = Member::self();
    const Tiles tiles{tile_rows, tile_columns};
    const int steps = (width + kStep - 1) / kStep;
    const int begin = steps * member.part / SPLIT, end = steps * (member.part + 1) / SPLIT;
    const Problem problem{input_factors, input_scales, weight_scales, out,   rows, outputs,
                          out_stride,    scales_pitch, steps,         begin, end - begin};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared.full(i), 1);
            barrier_init(shared.empty(i), CLUSTER_ROWS * kConsumers);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (kCluster > 1) cluster_sync();
    else __syncthreads();
    release_successors();
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x >> 7, 0);
    if (warpgroup == kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (threadIdx.x == kConsumers * 128) Producer{shared, &inputs, &weights, problem, member}.produce(tiles);
        __syncwarp();
        if (SPLIT > 1) cluster_sync();  // of `exchange`
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        Consumer consumer{shared, member, warpgroup, (threadIdx.x & 127) == 0,
                          matrix_descriptor(shared.inputs(0) + warpgroup * (64 * kStep), 16),
                          matrix_descriptor(shared.weights(0), 16), Ring<STAGES>(0), 0};
        TileScales tile_scales{reinterpret_cast<float*>(shared_bytes + Shared::kScales) + warpgroup * COLUMNS, {}};
        consumer.await_head_start();
        wait_for_predecessors();
        for (int tile = tiles.first(); tile < tiles.count(); tile += tiles.step()) {
            const Place place(tiles, tile, member, problem.steps);
            const RowScales row_scales(problem, place.row + warpgroup * 64 + (threadIdx.x & 127) / 32 * 16 +
                                                    (threadIdx.x & 31) / 4);
            const Halves halves(problem, place);
            tile_scales.load(problem, place);
            consumer.multiply_tile(problem, place, row_scales, halves, tile == tiles.first());
#if SPLIT == 2
            consumer.exchange();
#endif
            consumer.write(place, problem, row_scales, tile_scales);
        }
    }
    if (kCluster > 1) cluster_sync();  // others may still copy into this block, read its sums, and arrive at its barriers
}

#endif
