// A block that multiplies tens or hundreds of rows of x with strips of a 4-bit matrix: its rings, and the warps around
// them.
//
// Macros: those of kernels/int4_wide.cu.
#pragma once

#include "int4_codes.cuh"
#include "int4_tile.cuh"
#include "product_ends.cuh"
#include "wgmma.cuh"
#if SHARERS > 1
#include "hopper_cluster.cuh"
#endif

constexpr int kWarpgroups = STRIPS / kTileStrips;
constexpr int kConsumers = kWarpgroups * 128;
// With a warp that copies and one that reads the scales of x's rows. Where more registers are needed, these are of a
// warpgroup, of which those that multiply take them.
constexpr bool kMovesRegisters = TOKENS > 192 && kWarpgroups == 2;
constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 64);
constexpr int kConsumerRegisters = 224, kOtherRegisters = 56;
constexpr int kHalves = kGated ? 2 : 1;
constexpr int kOwnStrips = STRIPS / kHalves;  // adjacent ones
constexpr int kInputBytes = TOKENS * 128;     // of 64 columns of x
constexpr int kPieceBytes = STRIPS * kStripBytes;
static_assert(STRIPS % kTileStrips == 0 && TILE_ROWS == STRIPS * kStripRows && PARTS == 1, "no rest");

// Shared memory: the rings of x and of codes, scales [TOKENS], and a full and an empty barrier for each stage. With
// SPLIT 1, sums [TOKENS][kPitch] take the place of the rings in the end.
struct Shared {
    char* bytes;
    unsigned base;

    static constexpr int kCodes = INPUT_STAGES * kInputBytes;
    static constexpr int kScalesPlace = kCodes + CODE_STAGES * kPieceBytes;
    static constexpr int kBarriers = kScalesPlace + TOKENS * 4;
    static_assert(SPLIT > 1 || kSumBytes <= kScalesPlace, "sums take the place of the rings");

    __device__ __forceinline__ explicit Shared(char* bytes) : bytes(bytes), base(shared_address(bytes)) {}
    __device__ __forceinline__ unsigned inputs(int stage) const { return base + stage * kInputBytes; }
    __device__ __forceinline__ int codes(int stage) const { return kCodes + stage * kPieceBytes; }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bytes + kScalesPlace); }
    // Full barriers; the empty ones follow.
    __device__ __forceinline__ unsigned input_full(int stage) const { return base + kBarriers + stage * 16; }
    __device__ __forceinline__ unsigned code_full(int stage) const { return input_full(INPUT_STAGES + stage); }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < INPUT_STAGES + CODE_STAGES; i++) {
            barrier_init(input_full(i), 1);
            barrier_init(input_full(i) + 8, (i < INPUT_STAGES ? SHARERS : 1) * kConsumers / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

struct Problem {
    int steps;   // of kStep columns of W
    int strips;  // of W; where gated, of each half
    int tile;
    int token;  // the first one
    int rank;   // of this block among those that split the columns
    int sharer;  // of this block among those that share x

    __device__ __forceinline__ int first() const { return steps * rank / SPLIT; }
    __device__ __forceinline__ int length() const { return steps * (rank + 1) / SPLIT - first(); }
    // The step with which the tile begins, and which half of each step: others begin elsewhere, for all would ask L2 for
    // the same columns of x at once.
    __device__ __forceinline__ int turn() const { return tile / SHARERS % length(); }
    __device__ __forceinline__ int first_half() const { return tile / SHARERS / length() % 2; }
    // Strips of each half that the tile has.
    __device__ __forceinline__ int present() const { return max(0, min(kOwnStrips, strips - tile * kOwnStrips)); }
};

// One warp, which copies codes and x. Each lane copies codes that are contiguous.
struct Producer {
    static constexpr int kEach = (kOwnStrips + 2) / kTileStrips + 1;  // most tiles in memory over which strips lie
    static_assert(kHalves * kEach <= 32, "a lane has one piece");

    Shared shared;
    const TensorMap* inputs;
    Problem problem;
    int lane = threadIdx.x % 32;
    const char* source;  // of the next step
    int bytes = 0;
    int place = 0;  // in a stage
    int copied = problem.turn(), multiplied = copied;  // the next steps whose codes and x are copied
    Ring<INPUT_STAGES> input_ring{1};
    Ring<CODE_STAGES> code_ring{1};

    __device__ __forceinline__ Producer(Shared shared, const char* matrix, const TensorMap* inputs, Problem problem)
        : shared(shared), inputs(inputs), problem(problem), source(matrix) {
        const int half = lane / kEach, index = lane % kEach;
        if (half >= kHalves) return;
        const int first = half * problem.strips + problem.tile * kOwnStrips;
        const int tile = first / kTileStrips + index, begin = max(first, tile * kTileStrips);
        const int end = min(first + problem.present(), (tile + 1) * kTileStrips);
        if (end <= begin) return;
        bytes = (end - begin) * kStripBytes;
        place = (half * kOwnStrips + begin - first) * kStripBytes;
        source += (static_cast<long long>(tile) * problem.steps + problem.first() + copied) * kTileBytes +
                  (begin - tile * kTileStrips) * kStripBytes;
    }

    // The first codes are copied before the wait for predecessors.
    __device__ __forceinline__ void produce() {
        const int ahead = min(CODE_STAGES, problem.length());
        for (int i = 0; i < ahead; i++) copy_codes();
        wait_for_predecessors();
        for (int i = 0; i < problem.length(); i++) {
            copy_inputs(2 * multiplied + problem.first_half());
            copy_inputs(2 * multiplied + 1 - problem.first_half());
            if (++multiplied == problem.length()) multiplied = 0;
            if (i + ahead < problem.length()) copy_codes();
        }
    }

private:
    __device__ __forceinline__ void copy_codes() {
        const unsigned full = shared.code_full(code_ring.stage);
        barrier_wait(full + 8, code_ring.parity);
        if (lane == 0) barrier_expect(full, kHalves * problem.present() * kStripBytes);
        __syncwarp();
        if (bytes > 0) copy_bytes(shared.base + shared.codes(code_ring.stage) + place, source, bytes, full);
        source += kTileBytes;
        if (++copied == problem.length()) copied = 0, source -= static_cast<long long>(problem.length()) * kTileBytes;
        code_ring.advance();
    }
    __device__ __forceinline__ void copy_inputs(int plane) {
        const unsigned full = shared.input_full(input_ring.stage);
        barrier_wait(full + 8, input_ring.parity);
        if (lane == 0) {
            barrier_expect(full, kInputBytes);
#if SHARERS > 1
            // Some of the rows for all sharers, each of which copies others.
            constexpr int kRowsOfSharer = TOKENS / SHARERS;
            copy_tensor_to((1u << SHARERS) - 1, shared.inputs(input_ring.stage) + problem.sharer * kRowsOfSharer * 128,
                           inputs, 0, problem.token + problem.sharer * kRowsOfSharer, 2 * problem.first() + plane, full);
#else
            copy_tensor(shared.inputs(input_ring.stage), inputs, 0, problem.token, 2 * problem.first() + plane, full);
#endif
        }
        input_ring.advance();
    }
};

// One of the warpgroups, which multiplies 64 rows of W: its numbers are in registers, those of the next columns are
// made while these are multiplied.
struct Consumer {
    using Product = Wgmma<SCALAR, TOKENS / 2>;
    static constexpr int kFragments = CHUNK / 16, kChunks = kStep / CHUNK;
    static_assert(CHUNK == 32 || CHUNK == 64, "a chunk's columns of x are of one stage");

    Shared shared;
    Problem problem;
    int group;  // the same in a warp for the compiler too
    LanePlaces places{group * kTileStrips + static_cast<int>(threadIdx.x / 32 % 4), static_cast<int>(threadIdx.x % 32)};
    Ring<INPUT_STAGES> input_ring{0}, input_done{0};
    Ring<CODE_STAGES> code_ring{0};

    __device__ __forceinline__ void consume(float (&sums)[TOKENS / 2]) {
        unsigned a[2][kFragments][4];
        const int length = problem.length();
        const unsigned inputs = matrix_descriptor(shared.inputs(0), 16);
        const int first_half = problem.first_half() * 64;
        barrier_wait(shared.code_full(0), 0);
        load(a[0], first_half);
        for (int step = 0; step < length; step++) {
#pragma unroll
            for (int chunk = 0; chunk < kChunks; chunk++) {
                const int column = chunk * CHUNK % 64;
                if (column == 0 && (step > 0 || chunk > 0)) input_ring.advance();
                if (column == 0) barrier_wait(shared.input_full(input_ring.stage), input_ring.parity);
                const unsigned x = inputs + input_ring.stage * (kInputBytes >> 4) + column / 8;
                wgmma_fence();
#pragma unroll
                for (int f = 0; f < kFragments; f++) {
                    Product::multiply(sums, a[chunk % 2][f], x + 2 * f, chunk > 0 || f > 0 || step > 0);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the chunk before has been multiplied: its registers are free
                if (column == 0 && (step > 0 || chunk > 0)) release_inputs();
                if (chunk + 1 < kChunks) {
                    load(a[(chunk + 1) % 2], (chunk + 1) * CHUNK ^ first_half);
                } else {
                    release(shared.code_full(code_ring.stage));
                    code_ring.advance();
                    if (step + 1 < length) {
                        barrier_wait(shared.code_full(code_ring.stage), code_ring.parity);
                        load(a[0], first_half);
                    }
                }
            }
        }
        wgmma_wait<0>();
        Product::pin(sums);
    }

    // [token][row]
    __device__ __forceinline__ void store(const float (&sums)[TOKENS / 2], float* place) const {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) place[(j * 8 + token + i % 2) * kPitch + row + i / 2 * 8] = sums[4 * j + i];
        }
    }

private:
    // The numbers of a chunk of a step's columns, code times scale rounded once; those of 32 columns are of one group.
    __device__ __forceinline__ void load(unsigned (&a)[kFragments][4], int column) const {
        const char* codes = shared.bytes + shared.codes(code_ring.stage);
        const auto words = load_codes<kFragments>(codes + places.codes, column);
#pragma unroll
        for (int f = 0; f < kFragments; f++) {
            const int number = (column + f * 16) / GROUP;
            const auto scales = load_scales(codes + places.scales, number);
            const auto zeros = load_zeros(codes + places.zeros, number);
            const unsigned zero[2] = {raised_twice<SCALAR>(zeros[0]), raised_twice<SCALAR>(zeros[1])};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned pair = minus<SCALAR>(raised<SCALAR>(words[f] >> 4 * i), zero[i % 2]);
                a[f][i] = times<SCALAR>(pair, scales[i % 2]);
                asm volatile("" : "+r"(a[f][i]));  // before the next wait or fence
            }
        }
    }

    __device__ __forceinline__ void release_inputs() {
        const unsigned full = shared.input_full(input_done.stage);
        release(full);
#if SHARERS > 1
        if (threadIdx.x % 32 == 0) barrier_arrive_at(full + 8, 1 - problem.sharer);
#endif
        input_done.advance();
    }

    static __device__ __forceinline__ void release(unsigned full) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(full + 8);
    }
};
