// The ring of a block that multiplies strips of a 4-bit matrix: the warp that fills it and those that multiply.
//
// Macros: those of kernels/int4_strips.cu.
#pragma once

#include "int4_codes.cuh"
#include "int4_tile.cuh"
#include "product_ends.cuh"
#include "hopper.cuh"

constexpr int kConsumers = STRIPS * AT_ONCE * 32;
constexpr int kThreads = kConsumers + 64;  // with a warp that copies and one that reads the scales of x's rows
constexpr int kHalves = kGated ? 2 : 1;
constexpr int kOwnStrips = STRIPS / kHalves;  // adjacent ones
constexpr int kPlaneBytes = TOKENS * 128;     // of 64 columns of x
constexpr int kInputBytes = 2 * kPlaneBytes;
constexpr int kPieceBytes = STRIPS * kStripBytes;
constexpr int kPartsEach = PARTS / AT_ONCE;  // of a warp, one after another
static_assert(PARTS % AT_ONCE == 0 && STRIPS % kHalves == 0 && TILE_ROWS == STRIPS * kStripRows, "no rest");
static_assert(SPLIT == 1, "there are no clusters");

// Shared memory: the rings of x and of weights, sums [PARTS][TOKENS][kPitch], scales [TOKENS], a full and an empty
// barrier for each stage.
struct Shared {
    char* bytes;
    unsigned base;

    static constexpr int kWeights = STAGES * AT_ONCE * kInputBytes;
    static constexpr int kSumsPlace = kWeights + STAGES * AT_ONCE * kPieceBytes;
    static constexpr int kScalesPlace = kSumsPlace + PARTS * kSumBytes;
    static constexpr int kBarriers = kScalesPlace + TOKENS * 4;

    __device__ __forceinline__ explicit Shared(char* bytes) : bytes(bytes), base(shared_address(bytes)) {}
    __device__ __forceinline__ unsigned inputs(int stage, int run) const {
        return base + (stage * AT_ONCE + run) * kInputBytes;
    }
    __device__ __forceinline__ int weights(int stage, int run) const {
        return kWeights + (stage * AT_ONCE + run) * kPieceBytes;
    }
    __device__ __forceinline__ char* sums(int part) const { return bytes + kSumsPlace + part * kSumBytes; }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bytes + kScalesPlace); }
    __device__ __forceinline__ unsigned full(int stage) const { return base + kBarriers + stage * 16; }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(stage) + 8; }
};

struct Problem {
    int steps;   // of kStep columns of W
    int strips;  // of W; where gated, of each half
    int tile;

    __device__ __forceinline__ int begin(int part) const { return steps * part / PARTS; }
    // Steps of a warp's parts, which are adjacent.
    __device__ __forceinline__ int first(int run) const { return begin(run * kPartsEach); }
    __device__ __forceinline__ int length(int run) const { return first(run + 1) - first(run); }
    __device__ __forceinline__ int longest() const {
        int most = 0;
#pragma unroll
        for (int run = 0; run < AT_ONCE; run++) most = max(most, length(run));
        return most;
    }
    // Strips of each half that the tile has; those beyond W have none.
    __device__ __forceinline__ int present() const { return min(kOwnStrips, strips - tile * kOwnStrips); }
};

// One warp, which fills the ring. Each lane copies what is contiguous, in steps from one tile in memory to the next.
struct Producer {
    static constexpr int kEach = (kOwnStrips + 2) / kTileStrips + 1;  // most tiles in memory over which strips lie
    static constexpr int kPieces = kHalves * kEach;
    static_assert(kPieces * AT_ONCE <= 32, "a lane has one piece");

    Shared shared;
    const TensorMap* inputs;
    Problem problem;
    int lane = threadIdx.x % 32;
    const char* source;  // of the next step
    int bytes = 0;
    int place = 0;   // in a stage's weights
    int length = 0;  // steps of the piece
    int input_length = 0, plane = 0;  // of the lane that copies x's columns of a run

    __device__ __forceinline__ Producer(Shared shared, const char* matrix, const TensorMap* inputs, Problem problem)
        : shared(shared), inputs(inputs), problem(problem), source(matrix) {
        const int run = lane / kPieces, half = lane % kPieces / kEach, index = lane % kEach;
        if (lane < AT_ONCE) input_length = problem.length(lane), plane = 2 * problem.first(lane);
        if (run >= AT_ONCE) return;
        const int own = problem.tile * kOwnStrips, first = half * problem.strips + own;
        const int tile = first / kTileStrips + index, begin = max(first, tile * kTileStrips);
        const int end = min(first + problem.present(), (tile + 1) * kTileStrips);
        if (end <= begin) return;
        bytes = (end - begin) * kStripBytes;
        place = (half * kOwnStrips + begin - first) * kStripBytes + run * kPieceBytes;
        length = problem.length(run);
        source += (static_cast<long long>(tile) * problem.steps + problem.first(run)) * kTileBytes +
                  (begin - tile * kTileStrips) * kStripBytes;
    }

    // The first stages get their weights before the wait for predecessors.
    __device__ __forceinline__ void produce() {
        const int longest = problem.longest(), ahead = min(STAGES, longest);
        for (int i = 0; i < ahead; i++) copy_weights(i, i);
        wait_for_predecessors();
        for (int i = 0; i < ahead; i++) copy_inputs(i, i);
        Ring<STAGES> ring(1);
        for (int i = 0; i < ahead; i++) ring.advance();
        for (int i = ahead; i < longest; i++, ring.advance()) {
            barrier_wait(shared.empty(ring.stage), ring.parity);
            copy_weights(i, ring.stage);
            copy_inputs(i, ring.stage);
        }
    }

private:
    __device__ __forceinline__ void copy_weights(int step, int stage) {
        if (lane == 0) {
            int runs = 0;
#pragma unroll
            for (int run = 0; run < AT_ONCE; run++) runs += step < problem.length(run);
            barrier_expect(shared.full(stage), runs * (kHalves * problem.present() * kStripBytes + kInputBytes));
        }
        __syncwarp();
        const unsigned target = shared.base + shared.weights(stage, 0) + place;
        if (step < length) copy_bytes(target, source, bytes, shared.full(stage));
        source += kTileBytes;
    }
    __device__ __forceinline__ void copy_inputs(int step, int stage) const {
        if (step < input_length) {
            copy_tensor(shared.inputs(stage, lane), inputs, 0, 0, plane + 2 * step, shared.full(stage));
        }
    }
};

// One of the warps that multiply.
struct Consumer {
    static constexpr int kChunk = GROUP < 64 ? 32 : 64;  // columns whose numbers are in registers at a time
    static constexpr int kFragments = kChunk / 16;
    using Sums = float[TOKENS / 8][4];

    Shared shared;
    Problem problem;
    Ring<STAGES> ring;
    int warp;  // the same in a warp for the compiler too
    int run = warp / STRIPS;
    int strip = warp % STRIPS;
    int lane = threadIdx.x % 32;
    LanePlaces places{strip, lane};

    // Leaves the sums of the warp's parts in shared memory.
    __device__ __forceinline__ void consume() {
        for (int part = run * kPartsEach; part < (run + 1) * kPartsEach; part++) {
            Sums total = {};
            for (int step = problem.begin(part); step < problem.begin(part + 1); step++, ring.advance()) {
                barrier_wait(shared.full(ring.stage), ring.parity);
                multiply(total);
                release();
            }
            store_sums(total, part);
        }
        for (int i = problem.length(run); i < problem.longest(); i++, ring.advance()) {  // stages of other warps
            barrier_wait(shared.full(ring.stage), ring.parity);
            release();
        }
    }

private:
    // Multiplies a step's columns: by codes that are added to a power, from which the sums of x times that are taken.
    __device__ __forceinline__ void multiply(Sums& total) const {
        const char* weights = shared.bytes + shared.weights(ring.stage, run);
        const unsigned x = shared.inputs(ring.stage, run) + lane % 8 * 128;
#pragma unroll
        for (int group = 0; group < kGroups; group++) {
            const auto scales = load_scales(weights + places.scales, group);
            const auto zeros = load_zeros(weights + places.zeros, group);
            Sums sums = {}, x_sums = {};
#pragma unroll
            for (int column = group * GROUP; column < (group + 1) * GROUP; column += kChunk) {
                unsigned a[kFragments][4];
                load(a, weights, column);
#pragma unroll
                for (int f = 0; f < kFragments; f += 2) {
                    multiply_pair(sums, x_sums, a[f], a[f + 1], x, column + f * 16);
                }
            }
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float sum = fmaf(x_sums[j][i % 2], -(kBase<SCALAR> + zeros[i / 2]), sums[j][i]);
                    total[j][i] = fmaf(sum, to_float(scales[i / 2]), total[j][i]);
                }
            }
        }
    }

    // The codes of kChunk columns from `column` on, added to the power.
    __device__ __forceinline__ void load(unsigned (&a)[kFragments][4], const char* weights, int column) const {
        const auto words = load_codes<kFragments>(weights + places.codes, column);
#pragma unroll
        for (int f = 0; f < kFragments; f++) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[f][i] = raised<SCALAR>(words[f] >> 4 * i);
        }
    }

    // 32 columns from `column` on. `x` is the place of a row of x for this lane.
    __device__ __forceinline__ void multiply_pair(Sums& sums, Sums& x_sums, const unsigned (&first)[4],
                                                  const unsigned (&second)[4], unsigned x, int column) const {
        constexpr unsigned kAll[4] = {kOnes<SCALAR>, kOnes<SCALAR>, kOnes<SCALAR>, kOnes<SCALAR>};
        const int chunk = (column % 64 / 8 + lane / 8) ^ lane % 8;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
            unsigned b[4];
            load_matrices(b, x + column / 64 * kPlaneBytes + j * 1024 + chunk * 16);
            Tensor16<SCALAR>::mma(sums[j], first, b[0], b[1]);
            Tensor16<SCALAR>::mma(x_sums[j], kAll, b[0], b[1]);
            Tensor16<SCALAR>::mma(sums[j], second, b[2], b[3]);
            Tensor16<SCALAR>::mma(x_sums[j], kAll, b[2], b[3]);
        }
    }

    __device__ __forceinline__ void release() const {
        fence_async_proxy();  // waits for loads that nothing has used yet
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty(ring.stage));
    }

    // Stores a part's sums of this warp's rows, [token][row].
    __device__ __forceinline__ void store_sums(const Sums& total, int part) const {
        float* sums = reinterpret_cast<float*>(shared.sums(part));
        const int row = strip * kStripRows + lane / 4, token = lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[(j * 8 + token + i % 2) * kPitch + row + i / 2 * 8] = total[j][i];
        }
    }
};

// Meets the other warps that multiply, and the one that reads the scales of x's rows.
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(kConsumers + 32) : "memory");
}
