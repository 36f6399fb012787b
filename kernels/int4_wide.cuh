// A block that multiplies tens or hundreds of rows of x with strips of a 4-bit matrix: its rings, and the warps around
// them.
//
// Macros: those of kernels/int4_wide.cu.
#pragma once

#include "int4_codes.cuh"
#include "int4_tile.cuh"
#include "product_ends.cuh"
#include "wgmma.cuh"

constexpr int kWarpgroups = STRIPS / kTileStrips;
constexpr int kConsumers = kWarpgroups * 128;
// With a warp that copies and one that reads the scales of x's rows. Where more registers are needed, these are of a
// warpgroup, of which those that multiply take them.
constexpr bool kMovesRegisters = TOKENS > 192 && kWarpgroups == 2;
constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 64);
constexpr int kConsumerRegisters = 224, kOtherRegisters = 56;
constexpr int kHalves = kGated ? 2 : 1;
constexpr int kOwnStrips = STRIPS / kHalves;  // adjacent ones
constexpr int kTurnedStrips = 48 / kHalves;   // of a half, whose columns are added in the same order
constexpr int kInputBytes = TOKENS * 128;     // of 64 columns of x
constexpr int kPieceBytes = STRIPS * kStripBytes;
static_assert(STRIPS % kTileStrips == 0 && TILE_ROWS == STRIPS * kStripRows && PARTS == 1, "no rest");

// Shared memory: the rings of x and of codes, with SHARES sums [SLICE][kPitch], scales [TOKENS], and a full and an empty
// barrier for each stage. With SPLIT 1 and no SHARES, sums take the place of the rings in the end.
struct Shared {
    char* bytes;
    unsigned base;

    static constexpr int kCodes = INPUT_STAGES * kInputBytes;
    static constexpr int kSumsPlace = SHARES ? kCodes + CODE_STAGES * kPieceBytes : 0;
    static constexpr int kScalesPlace = kCodes + CODE_STAGES * kPieceBytes + (SHARES ? SLICE * kPitch * 4 : 0);
    static constexpr int kBarriers = kScalesPlace + TOKENS * 4;
    static_assert(SPLIT > 1 || SHARES || kSumBytes <= kScalesPlace, "sums take the place of the rings");

    __device__ __forceinline__ explicit Shared(char* bytes) : bytes(bytes), base(shared_address(bytes)) {}
    __device__ __forceinline__ unsigned inputs(int stage) const { return base + stage * kInputBytes; }
    __device__ __forceinline__ int codes(int stage) const { return kCodes + stage * kPieceBytes; }
    __device__ __forceinline__ char* sums() const { return bytes + kSumsPlace; }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bytes + kScalesPlace); }
    // Full barriers; the empty ones follow.
    __device__ __forceinline__ unsigned input_full(int stage) const { return base + kBarriers + stage * 16; }
    __device__ __forceinline__ unsigned code_full(int stage) const { return input_full(INPUT_STAGES + stage); }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < INPUT_STAGES + CODE_STAGES; i++) {
            barrier_init(input_full(i), 1);
            barrier_init(input_full(i) + 8, kConsumers / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

struct Problem {
    int steps;   // of kStep columns of W
    int strips;  // of W; where gated, of each half
    int passes;  // of TOKENS rows of x

    // Strips of each half that the tile has.
    __device__ __forceinline__ int present(int tile) const { return min(kOwnStrips, strips - tile * kOwnStrips); }
};

// What a block multiplies without a break: steps of a tile, for the rows of x from `token` on.
struct Piece {
    int tile, token;
    int first, length;  // steps
    int turn;           // the number of the step that comes first
};

// The pieces of a block. With SHARES, all steps of all tiles are divided among the blocks evenly, and the last block has
// the first ones: so a tile's first piece, whose block ends the tile, waits for blocks before its own. Otherwise a block
// has one piece.
struct Pieces {
    Problem problem;
    int next, end;  // steps of all tiles

    __device__ __forceinline__ explicit Pieces(const Problem& problem, int tiles) : problem(problem) {
#if SHARES
        const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
        next = begin(block, tiles), end = begin(block + 1, tiles);
#else
        next = 0, end = 1;
#endif
    }
    __device__ __forceinline__ int begin(int block, int tiles) const {
        return static_cast<long long>(tiles) * problem.passes * problem.steps * block / static_cast<int>(gridDim.x);
    }
    __device__ __forceinline__ bool more() const { return next < end; }
    __device__ __forceinline__ Piece take() {
#if SHARES
        const int index = next / problem.steps, first = next % problem.steps;
        const int length = min(problem.steps - first, end - next);
        next += length;
        return {index / problem.passes, index % problem.passes * TOKENS, first, length, 0};
#else
        next = end;
        const int index = static_cast<int>(blockIdx.x) / SPLIT, rank = split_rank(), tile = index / problem.passes;
        const int first = problem.steps * rank / SPLIT, length = problem.steps * (rank + 1) / SPLIT - first;
        // Blocks of other tiles begin with other steps, for all would ask L2 for the same columns of x at once.
        return {tile, index % problem.passes * TOKENS, first, length, tile * kOwnStrips / kTurnedStrips % length};
#endif
    }
};

// A warp that copies codes, of which each lane copies those that are contiguous, or one that copies x: neither waits for
// stages of the other's ring, so that both are as far ahead as their rings are long.
struct Producer {
    static constexpr int kEach = (kOwnStrips + 2) / kTileStrips + 1;  // most tiles in memory over which strips lie
    static_assert(kHalves * kEach <= 32, "a lane has one piece");

    // Goes through the steps of pieces.
    struct Steps {
        Pieces pieces;
        Piece piece{};
        int index = 0;  // in the piece

        __device__ __forceinline__ explicit Steps(const Pieces& pieces) : pieces(pieces) {}
        // Goes to the next step. Returns whether it is of another piece.
        __device__ __forceinline__ bool advance() {
            if (++index < piece.length) return false;
            piece = pieces.take(), index = 0;
            return true;
        }
        __device__ __forceinline__ bool more() const { return index + 1 < piece.length || pieces.more(); }
        __device__ __forceinline__ int step() const {
            const int turned = index + piece.turn;
            return piece.first + (turned < piece.length ? turned : turned - piece.length);
        }
    };

    Shared shared;
    const char* matrix;
    const TensorMap* inputs;
    Problem problem;
    Steps steps;
    int lane = threadIdx.x % 32;
    const char* source = nullptr;  // of the tile's first step
    int bytes = 0;
    int place = 0;  // in a stage
    Ring<INPUT_STAGES> input_ring{1};
    Ring<CODE_STAGES> code_ring{1};

    __device__ __forceinline__ Producer(
        Shared shared, const char* matrix, const TensorMap* inputs, const Problem& problem, const Pieces& pieces)
        : shared(shared), matrix(matrix), inputs(inputs), problem(problem), steps(pieces) {}

    // The first codes are copied before the wait for predecessors, which `meanwhile` contains.
    template <typename Act>
    __device__ __forceinline__ void produce_codes(Act meanwhile) {
        for (int i = 0; i < CODE_STAGES && steps.more(); i++) copy_codes();
        meanwhile();
        while (steps.more()) copy_codes();
    }
    __device__ __forceinline__ void produce_inputs() {
        wait_for_predecessors();
        while (steps.more()) {
            steps.advance();
            copy_inputs(2 * steps.step());
            copy_inputs(2 * steps.step() + 1);
        }
    }

private:
    __device__ __forceinline__ void find(int block_tile) {
        bytes = 0;
        const int half = lane / kEach, index = lane % kEach;
        if (half >= kHalves) return;
        const int first = half * problem.strips + block_tile * kOwnStrips;
        const int tile = first / kTileStrips + index, begin = max(first, tile * kTileStrips);
        const int end = min(first + problem.present(block_tile), (tile + 1) * kTileStrips);
        if (end <= begin) return;
        bytes = (end - begin) * kStripBytes;
        place = (half * kOwnStrips + begin - first) * kStripBytes;
        source = matrix + static_cast<long long>(tile) * problem.steps * kTileBytes + (begin - tile * kTileStrips) * kStripBytes;
    }
    __device__ __forceinline__ void copy_codes() {
        if (steps.advance()) find(steps.piece.tile);
        const unsigned full = shared.code_full(code_ring.stage);
        barrier_wait(full + 8, code_ring.parity);
        if (lane == 0) barrier_expect(full, kHalves * problem.present(steps.piece.tile) * kStripBytes);
        __syncwarp();
        if (bytes > 0) {
            copy_bytes(shared.base + shared.codes(code_ring.stage) + place, source + steps.step() * kTileBytes, bytes, full);
        }
        code_ring.advance();
    }
    __device__ __forceinline__ void copy_inputs(int plane) {
        const unsigned full = shared.input_full(input_ring.stage);
        barrier_wait(full + 8, input_ring.parity);
        if (lane == 0) {
            barrier_expect(full, kInputBytes);
            copy_tensor(shared.inputs(input_ring.stage), inputs, 0, steps.piece.token, plane, full);
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
    int group;  // the same in a warp for the compiler too
    LanePlaces places{group * kTileStrips + static_cast<int>(threadIdx.x / 32 % 4), static_cast<int>(threadIdx.x % 32)};
    Ring<INPUT_STAGES> input_ring{0}, input_done{0};
    Ring<CODE_STAGES> code_ring{0};

    // Multiplies the columns of the next `length` stages.
    __device__ __forceinline__ void consume(float (&sums)[TOKENS / 2], int length) {
        unsigned a[2][kFragments][4];
        const unsigned inputs = matrix_descriptor(shared.inputs(0), 16);
        barrier_wait(shared.code_full(code_ring.stage), code_ring.parity);
        load(a[0], 0);
        for (int step = 0; step < length; step++) {
#pragma unroll
            for (int chunk = 0; chunk < kChunks; chunk++) {
                const int column = chunk * CHUNK % 64;
                if (column == 0) barrier_wait(shared.input_full(input_ring.stage), input_ring.parity);
                const unsigned x = inputs + input_ring.stage * (kInputBytes >> 4) + column / 8;
                wgmma_fence();
#pragma unroll
                for (int f = 0; f < kFragments; f++) {
                    Product::multiply(sums, a[chunk % 2][f], x + 2 * f, chunk > 0 || f > 0 || step > 0);
                }
                wgmma_commit();
                if (column + CHUNK == 64) input_ring.advance();
                wgmma_wait<1>();  // the chunk before has been multiplied: its registers are free
                if (column == 0 && (step > 0 || chunk > 0)) release_inputs();
                if (chunk + 1 < kChunks) {
                    load(a[(chunk + 1) % 2], (chunk + 1) * CHUNK);
                } else {
                    release(shared.code_full(code_ring.stage));
                    code_ring.advance();
                    if (step + 1 < length) {
                        barrier_wait(shared.code_full(code_ring.stage), code_ring.parity);
                        load(a[0], 0);
                    }
                }
            }
        }
        wgmma_wait<0>();
        Product::pin(sums);
        release_inputs();
    }

    // Stores the sums of Count tokens from `First` on, [token][row].
    template <int First, int Count>
    __device__ __forceinline__ void store(const float (&sums)[TOKENS / 2], float* place) const {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < Count / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                place[(j * 8 + token + i % 2) * kPitch + row + i / 2 * 8] = sums[First / 2 + 4 * j + i];
            }
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
        release(shared.input_full(input_done.stage));
        input_done.advance();
    }
    static __device__ __forceinline__ void release(unsigned full) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(full + 8);
    }
};
