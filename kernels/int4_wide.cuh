// A block that converts strips of a 4-bit matrix for many rows of x: its rings, and the warps between them.
//
// Macros: those of kernels/int4_wide.cu.
#pragma once

#include "int4_codes.cuh"
#include "int4_tile.cuh"
#include "product_ends.cuh"
#include "wgmma.cuh"

constexpr int kConsumers = TOKENS * 2;
constexpr int kThreads = kConsumers + (CONVERTERS + 1) * 32;
// With four warpgroups, those that multiply take registers from the others.
constexpr bool kMovesRegisters = kThreads > 384;
constexpr int kConsumerRegisters = 168, kOtherRegisters = 88;
static_assert(kThreads % 128 == 0 && kThreads <= 512, "registers are those of warpgroups");
constexpr int kHalves = kGated ? 2 : 1;
constexpr int kOwnStrips = STRIPS / kHalves;  // adjacent ones
constexpr int kInputBytes = TOKENS * 128;     // of 64 columns of x
constexpr int kNumberBytes = TILE_ROWS * 128;
constexpr int kPieceBytes = STRIPS * kStripBytes;
static_assert(STRIPS % kHalves == 0 && TILE_ROWS == STRIPS * kStripRows && PARTS == 1, "no rest");

// Shared memory: the rings of x, of numbers and of codes, with a full and an empty barrier for each stage, and scales
// [TOKENS]. In the end, sums [TOKENS][kPitch] take the place of the rings.
struct Shared {
    char* bytes;
    unsigned base;

    static constexpr int kNumbers = INPUT_STAGES * kInputBytes;
    static constexpr int kCodes = kNumbers + NUMBER_STAGES * kNumberBytes;
    static constexpr int kScalesPlace = kCodes + CODE_STAGES * kPieceBytes;
    static constexpr int kBarriers = kScalesPlace + TOKENS * 4;
    static_assert(kSumBytes <= kScalesPlace, "sums take the place of the rings");

    __device__ __forceinline__ explicit Shared(char* bytes) : bytes(bytes), base(shared_address(bytes)) {}
    __device__ __forceinline__ unsigned inputs(int stage) const { return base + stage * kInputBytes; }
    __device__ __forceinline__ unsigned numbers(int stage) const { return base + kNumbers + stage * kNumberBytes; }
    __device__ __forceinline__ int codes(int stage) const { return kCodes + stage * kPieceBytes; }
    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(bytes + kScalesPlace); }
    // Full barriers; the empty ones follow.
    __device__ __forceinline__ unsigned input_full(int stage) const { return base + kBarriers + stage * 16; }
    __device__ __forceinline__ unsigned number_full(int stage) const { return input_full(INPUT_STAGES + stage); }
    __device__ __forceinline__ unsigned code_full(int stage) const { return number_full(NUMBER_STAGES + stage); }

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < INPUT_STAGES; i++) init(input_full(i), 1, kConsumers / 32);
        for (int i = 0; i < NUMBER_STAGES; i++) init(number_full(i), CONVERTERS, kConsumers / 32);
        for (int i = 0; i < CODE_STAGES; i++) init(code_full(i), 1, CONVERTERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

private:
    static __device__ __forceinline__ void init(unsigned full, int filled, int emptied) {
        barrier_init(full, filled);
        barrier_init(full + 8, emptied);
    }
};

struct Problem {
    int steps;   // of kStep columns of W
    int strips;  // of W; where gated, of each half
    int tile;
    int token;  // the first one
    int rank;   // of this block among those that split the columns

    __device__ __forceinline__ int first() const { return steps * rank / SPLIT; }
    __device__ __forceinline__ int length() const { return steps * (rank + 1) / SPLIT - first(); }
    // The step with which the tile begins: others begin elsewhere, for all would ask L2 for the same columns of x at once.
    __device__ __forceinline__ int turn() const { return length() > 0 ? tile % length() : 0; }
    // Strips of each half that the tile has.
    __device__ __forceinline__ int present() const { return min(kOwnStrips, strips - tile * kOwnStrips); }
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
            copy_inputs(2 * multiplied);
            copy_inputs(2 * multiplied + 1);
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
            copy_tensor(shared.inputs(input_ring.stage), inputs, 0, problem.token, 2 * problem.first() + plane, full);
        }
        input_ring.advance();
    }
};

// One of the warps that turn codes into numbers, [row][64 columns] as products read them.
struct Converter {
    static constexpr int kMost = (STRIPS + CONVERTERS - 1) / CONVERTERS;  // strips of a warp

    Shared shared;
    Problem problem;
    int warp;  // of those that convert
    int lane = threadIdx.x % 32;
    Ring<CODE_STAGES> code_ring{0};
    Ring<NUMBER_STAGES> number_ring{1};

    __device__ __forceinline__ void convert() {
        for (int step = 0; step < problem.length(); step++, code_ring.advance()) {
            const unsigned full = shared.code_full(code_ring.stage);
            barrier_wait(full, code_ring.parity);
            convert_half(0);
            convert_half(64);
            if (lane == 0) barrier_arrive(full + 8);
        }
    }

private:
    // What a lane needs of 64 columns of a strip; those of 32 columns are of one group.
    struct Codes {
        Vector<unsigned, 4> words;
        Vector<SCALE, 2> scales[2];
        Vector<unsigned char, 2> zeros[2];

        __device__ __forceinline__ void load(const char* bytes, const LanePlaces& places, int column) {
            words = load_codes<4>(bytes + places.codes, column);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                scales[i] = load_scales(bytes + places.scales, (column + 32 * i) / GROUP);
                zeros[i] = load_zeros(bytes + places.zeros, (column + 32 * i) / GROUP);
            }
        }
    };

    // 64 columns from `column` on of a step. Everything is loaded first: stores would keep loads behind them.
    __device__ __forceinline__ void convert_half(int column) {
        const unsigned full = shared.number_full(number_ring.stage), numbers = shared.numbers(number_ring.stage);
        Codes codes[kMost];
#pragma unroll
        for (int i = 0; i < kMost; i++) {
            const int strip = warp + i * CONVERTERS;
            if (strip < STRIPS) {
                codes[i].load(shared.bytes + shared.codes(code_ring.stage), LanePlaces(strip, lane), column);
            }
        }
        barrier_wait(full + 8, number_ring.parity);
#pragma unroll
        for (int i = 0; i < kMost; i++) {
            const int strip = warp + i * CONVERTERS;
            if (strip < STRIPS) store_numbers(numbers + strip * kStripRows * 128, codes[i]);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
        number_ring.advance();
    }

    __device__ __forceinline__ void store_numbers(unsigned strip, const Codes& codes) const {
        const unsigned own = strip + lane / 4 * 128 + lane % 4 * 4;
#pragma unroll
        for (int f = 0; f < 4; f++) {
            const auto scales = codes.scales[f / 2];
            const auto zeros = codes.zeros[f / 2];
            const unsigned zero[2] = {raised_twice<SCALAR>(zeros[0]), raised_twice<SCALAR>(zeros[1])};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned pair = minus<SCALAR>(raised<SCALAR>(codes.words[f] >> 4 * i), zero[i % 2]);
                const int chunk = (2 * f + i / 2) ^ lane / 4;
                store(own + i % 2 * 1024 + chunk * 16, times<SCALAR>(pair, scales[i % 2]));
            }
        }
    }

    static __device__ __forceinline__ void store(unsigned address, unsigned word) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
    }
};

// Called by the warps that multiply: computes 1 / rms of each token, by two lanes each.
__device__ __forceinline__ void read_pair_scales(float* scales, const Ends& ends) {
    const int token = threadIdx.x / 2;
    float sum = 0.0f;
#pragma unroll 16
    for (int i = threadIdx.x % 2; i < ends.num_squares; i += 2) sum += __ldcg(ends.squares + i * kSquaresPitch + token);
    sum = lane_sum(sum, 2);
    if (threadIdx.x % 2 == 0) scales[token] = ends.squares ? rsqrtf(sum * ends.inverse_width + ends.eps) : 1.0f;
}

// One of the warpgroups that multiply 64 rows of x.
struct Consumer {
    using Product = Wgmma<SCALAR, TILE_ROWS / 2>;

    Shared shared;
    Problem problem;
    int group;  // the same in a warp for the compiler too
    Ring<INPUT_STAGES> input_ring{0}, input_done{0};
    Ring<NUMBER_STAGES> number_ring{0}, number_done{0};

    // Leaves the sums in shared memory.
    __device__ __forceinline__ void consume() {
        float sums[TILE_ROWS / 2];
        const unsigned inputs = matrix_descriptor(shared.inputs(0) + group * 64 * 128, 16);
        const unsigned numbers = matrix_descriptor(shared.numbers(0), 16);
        for (int half = 0; half < 2 * problem.length(); half++) {
            barrier_wait(shared.input_full(input_ring.stage), input_ring.parity);
            barrier_wait(shared.number_full(number_ring.stage), number_ring.parity);
            const unsigned a = inputs + input_ring.stage * (kInputBytes >> 4);
            const unsigned b = numbers + number_ring.stage * (kNumberBytes >> 4);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++) Product::multiply(sums, a + 2 * k, b + 2 * k, half > 0 || k > 0);
            wgmma_commit();
            if (half > 0) {
                wgmma_wait<1>();
                release();
            }
            input_ring.advance();
            number_ring.advance();
        }
        wgmma_wait<0>();
        Product::pin(sums);
        asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(kConsumers) : "memory");  // all have read the rings
        store_sums(sums);
    }

private:
    __device__ __forceinline__ void release() {
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(shared.input_full(input_done.stage) + 8);
            barrier_arrive(shared.number_full(number_done.stage) + 8);
        }
        input_done.advance();
        number_done.advance();
    }

    // [token][row]
    __device__ __forceinline__ void store_sums(const float (&sums)[TILE_ROWS / 2]) const {
        const int token = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
        float* own = reinterpret_cast<float*>(shared.bytes) + token * kPitch + row;
#pragma unroll
        for (int j = 0; j < TILE_ROWS / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Vector<float, 2> pair{{sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]}};
                store_vector(own + i * 8 * kPitch + j * 8, pair);
            }
        }
    }
};

// Called by the whole block when its sums and x's scales are in shared memory.
__device__ __forceinline__ void meet_all() {
#if SPLIT > 1
    cluster_sync();
#else
    __syncthreads();
#endif
}
