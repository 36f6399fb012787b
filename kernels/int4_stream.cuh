// The warps of a product with a 4-bit matrix that share nothing while they multiply: each copies its own columns through
// a ring of its own, and multiplies them.
//
// Macros: those of kernels/int4_stream.cu.
#pragma once

#include "attention.cuh"
#include "int4_codes.cuh"
#include "int4_tile.cuh"
#include "hopper.cuh"

constexpr int kRowsOfX = 8;  // columns of the product
constexpr int kRestPieces = (kStripBytes - kCodeBytes) / 16;  // of a strip's scales and zeros
constexpr int kStageBytes = STRIPS * kStripBytes;
constexpr int kPieceBytes = kRowsOfX * kStep * 2;  // of x: the columns of a step
constexpr int kChain = GROUP < 64 ? GROUP : 64;  // columns whose products are added one after another
constexpr int kChains = kStep / kChain;
constexpr int kLinks = kChain / 16;
constexpr int kUnitSums = STRIPS * 32 * 16;  // bytes of a warp's sums of a unit
using XRows = SwizzledRows<kStep * 2>;
static_assert(STAGES >= 2, "one stage is read while others are copied");
static_assert(RESIDENT_STEPS > 0 || UNITS == 1, "x that several units need stays in shared memory");

// Shared memory: each warp's ring of weights and its part of x; sums [SLOTS][WARPS], a unit's in the order of lanes; scales
// of x's rows; a full and an empty barrier for each slot.
struct Shared {
    char* bytes;
    unsigned base;

    static constexpr int kPieces = RESIDENT_STEPS > 0 ? RESIDENT_STEPS : STAGES;
    static constexpr int kWarpBytes = STAGES * kStageBytes + kPieces * kPieceBytes;
    static constexpr int kSums = WARPS * kWarpBytes;
    static constexpr int kScales = kSums + SLOTS * WARPS * kUnitSums;
    static constexpr int kBarriers = kScales + kRowsOfX * 4;

    __device__ __forceinline__ explicit Shared(char* bytes) : bytes(bytes), base(shared_address(bytes)) {}
    __device__ __forceinline__ int weights(int warp, int stage) const { return warp * kWarpBytes + stage * kStageBytes; }
    __device__ __forceinline__ int x(int warp, int piece) const {
        return warp * kWarpBytes + STAGES * kStageBytes + piece * kPieceBytes;
    }
    __device__ __forceinline__ char* sums(int slot, int warp) const {
        return bytes + kSums + (slot * WARPS + warp) * kUnitSums;
    }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bytes + kScales); }
    __device__ __forceinline__ unsigned full(int slot) const { return base + kBarriers + slot * 16; }
    __device__ __forceinline__ unsigned empty(int slot) const { return full(slot) + 8; }
};

// Units of STRIPS adjacent strips of W, where gated of a strip of gate and one of up.
struct Units {
    int count;
    int first;  // of this block
    int end;
    int strips;  // of W, where gated of each half

    __device__ __forceinline__ explicit Units(int tiles) : strips(tiles * kTileStrips / kHalves) {
        count = (strips + kAdjacent - 1) / kAdjacent;
        first = count * static_cast<long long>(blockIdx.x) / gridDim.x;
        end = count * (blockIdx.x + 1ll) / gridDim.x;
    }
    // Number of a unit's strip in W; of those that a last unit lacks, no less than that of all.
    __device__ __forceinline__ int strip(int unit, int index) const {
        return kHalves == 2 ? unit + index * strips : unit * STRIPS + index;
    }
    __device__ __forceinline__ bool has(int unit, int index) const { return kHalves == 2 || strip(unit, index) < strips; }

    static constexpr int kHalves = GATED ? 2 : 1;
    static constexpr int kAdjacent = STRIPS / kHalves;  // of a unit, of each half
    static_assert(!GATED || STRIPS == 2, "a unit has a strip of gate and one of up");
};

// One of the warps that multiply.
struct Stream {
    Shared shared;
    Units units;
    const char* matrix;
    const SCALAR* x;
    long long x_stride;
    int width;   // columns of x
    int tokens;  // rows of x
    int steps;   // of W
    int warp;    // the same in a warp for the compiler too
    int lane = threadIdx.x % 32;
    int begin = steps * warp / WARPS;
    int own = steps * (warp + 1) / WARPS - begin;  // steps of each unit
    // The first of them: blocks begin with different ones, for all would ask L2 for the same columns of x at once.
    int turn = own > 0 ? units.first % own : 0;

    // Where the next copies come from.
    int copied_unit = units.first;
    int copied_step = 0;
    int copied = 0;
    const char* codes[STRIPS] = {};
    float total[STRIPS][4] = {};

    // Calls `end` with each unit, when `total` has its sums.
    template <typename End>
    __device__ __forceinline__ void multiply(End end) {
        const int count = own * (units.end - units.first);
        place();
        for (int i = 0; i < STAGES; i++) {
            if (i < count) copy_weights(i), advance();
        }
        wait_for_predecessors();
        for (int i = 0; i < STAGES; i++) {
            if (i < own) copy_x(i, i);
            commit_copies();
        }
        int slot = 0, done = 0;
        for (int unit = units.first; unit < units.end; unit++) {
            for (int step = 0; step < own; step++, done++) {
                if (done == 0) {
                    wait_copies<STAGES - 1>();
                    __syncwarp();
                } else {
                    wait_copies<STAGES - 2>();
                    __syncwarp();  // all lanes see all copies, and have read the stage before
                    refill(slot == 0 ? STAGES - 1 : slot - 1, done + STAGES - 1, count);
                }
                add(shared.bytes + shared.weights(warp, slot), shared.x(warp, RESIDENT_STEPS > 0 ? step : slot));
                if (++slot == STAGES) slot = 0;
            }
            end(unit);
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) {
#pragma unroll
                for (int i = 0; i < 4; i++) total[strip][i] = 0.0f;
            }
        }
    }

private:
    // Finds the strips of the unit that is copied.
    __device__ __forceinline__ void place() {
#pragma unroll
        for (int i = 0; i < STRIPS; i++) {
            const int strip = units.strip(copied_unit, i);
            codes[i] = matrix + (static_cast<long long>(strip / kTileStrips) * steps + begin + turn) * kTileBytes +
                       strip % kTileStrips * kStripBytes + lane * 16;
        }
    }
    __device__ __forceinline__ void advance() {
        if (++copied_step < own) {
            const int distance = copied_step + turn == own ? (1 - own) * kTileBytes : kTileBytes;
#pragma unroll
            for (int i = 0; i < STRIPS; i++) codes[i] += distance;
        } else {
            copied_step = 0, copied_unit++;
            place();
        }
    }

    // Copies what is used as number `ahead` of all steps of all units, of `count`.
    __device__ __forceinline__ void refill(int stage, int ahead, int count) {
        if (ahead < count) {
            copy_weights(stage);
            advance();
        }
        if (ahead < own) copy_x(ahead, RESIDENT_STEPS > 0 ? ahead : stage);
        commit_copies();
    }

    __device__ __forceinline__ void copy_weights(int stage) const {
        const unsigned target = shared.base + shared.weights(warp, stage) + lane * 16;
#pragma unroll
        for (int i = 0; i < STRIPS; i++) {
            if (!units.has(copied_unit, i)) continue;
#pragma unroll
            for (int piece = 0; piece < kStripBytes / 16; piece += 32) {
                if (piece + 32 <= kStripBytes / 16 || lane < kRestPieces % 32) {
                    copy_async(target + i * kStripBytes + piece * 16, codes[i] + piece * 16, 16);
                }
            }
        }
    }
    // The columns of one of this warp's steps.
    __device__ __forceinline__ void copy_x(int step, int piece) const {
        const unsigned target = shared.base + shared.x(warp, piece);
        const int turned = step + turn < own ? step + turn : step + turn - own;
#pragma unroll
        for (int index = lane; index < kRowsOfX * XRows::kChunks; index += 32) {
            const int row = index / XRows::kChunks, chunk = index % XRows::kChunks;
            const int column = (begin + turned) * kStep + chunk * 8;
            const bool present = row < tokens && column < width;
            const SCALAR* source = present ? x + row * x_stride + column : x;
            copy_async(target + XRows::offset(row, chunk), source, present ? 16 : 0);
        }
    }

    // Multiplies a step's columns of a unit.
    __device__ __forceinline__ void add(const char* weights, int x_place) {
        const LanePlaces places(0, lane);
        Vector<unsigned, 4> words[STRIPS][2];
        Vector<SCALE, 2> scales[STRIPS][kGroups];
        unsigned zeros[STRIPS][kGroups][2];
        unsigned b[4][4];
        float sums[STRIPS][kChains][4] = {};
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            const char* strip = weights + s * kStripBytes;
#pragma unroll
            for (int half = 0; half < 2; half++) words[s][half] = load_codes<4>(strip + places.codes, half * 64);
        }
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            load_matrices(b[pair], shared.base + x_place + XRows::offset(lane % 8, pair * 4 + lane / 8));
        }
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            const char* strip = weights + s * kStripBytes;
#pragma unroll
            for (int group = 0; group < kGroups; group++) {
                scales[s][group] = load_scales(strip + places.scales, group);
                const auto stored = load_zeros(strip + places.zeros, group);
#pragma unroll
                for (int i = 0; i < 2; i++) zeros[s][group][i] = raised_twice<SCALAR>(stored[i]);
            }
        }
        // Chains of products take turns, and so do the strips: none waits for the one before.
#pragma unroll
        for (int link = 0; link < kLinks; link++) {
#pragma unroll
            for (int chain = 0; chain < kChains; chain++) {
                const int fragment = chain * kLinks + link, group = chain * kChain / GROUP;
#pragma unroll
                for (int s = 0; s < STRIPS; s++) {
                    unsigned a[4];
                    numbers(a, words[s][fragment / 4][fragment % 4], zeros[s][group]);
                    Tensor16<SCALAR>::mma(sums[s][chain], a, b[fragment / 2][fragment % 2 * 2],
                                          b[fragment / 2][fragment % 2 * 2 + 1]);
                }
            }
        }
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
#pragma unroll
            for (int group = 0; group < kGroups; group++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float sum = sums[s][group * kChains / kGroups][i];
                    if (kChains > kGroups) sum += sums[s][group * kChains / kGroups + 1][i];
                    total[s][i] = fmaf(sum, to_float(scales[s][group][i / 2]), total[s][i]);
                }
            }
        }
    }

    static __device__ __forceinline__ void numbers(unsigned (&a)[4], unsigned word, const unsigned (&zero)[2]) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = minus<SCALAR>(raised<SCALAR>(word >> 4 * i), zero[i % 2]);
    }
};
