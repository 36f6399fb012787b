// Keys and values in flight, queries and their products for the prefill kernels that use mma.sync.
#pragma once

#include "cached.cuh"
#include "prefill_tile.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kHeads = KV_HEADS * GROUP_SIZE;
constexpr int kSteps = HEAD_DIM / 16;
constexpr int kKeyTiles = KEYS / 8;
constexpr int kHalfStageBytes = KEYS * CachedRows::kRowBytes;
constexpr int kStageBytes = 2 * kHalfStageBytes;

static_assert(KEYS % 16 == 0, "keys are multiplied sixteen at a time");
static_assert(KEYS * CachedRows::kChunks % kThreads == 0, "threads share the copies evenly");

// A thread block's keys and values in flight: two stages of each.
struct KeyBuffer {
    const char* keys;
    const char* values;
    const int* table;  // the row's blocks
    int first;         // positions outside [first, end) are read as zeros
    int end;
    unsigned shared;

    __device__ __forceinline__ void copy(const char* source, unsigned target, int position) const {
#pragma unroll
        for (int i = 0; i < KEYS * CachedRows::kChunks / kThreads; i++) {
            int index = i * kThreads + threadIdx.x;
            int row = index / CachedRows::kChunks, chunk = index % CachedRows::kChunks;
            int key = position + row;
            bool seen = key >= first && key < end;
            int cached = seen ? __ldg(table + key / BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE : 0;
            const char* from = source + static_cast<long long>(cached) * (KV_HEADS * CachedRows::kRowBytes);
            copy_async(target + CachedRows::offset(row, chunk), from + chunk * 16, seen ? 16 : 0);
        }
        commit_copies();
    }
    __device__ __forceinline__ void issue(int stage, int position) const {
        copy(keys, shared + stage * kStageBytes, position);
        copy(values, shared + stage * kStageBytes + kHalfStageBytes, position);
    }
};

// 16 queries of a warp: lane l holds parts of rows l / 4 and l / 4 + 8.
struct QueryRows {
    unsigned fragments[kSteps][4];
    float output[2 * kSteps][4];
    float maximum[2];
    float sum[2];  // of this lane's keys only; `write` adds those of other lanes

    __device__ __forceinline__ void load(const Scalar* queries, long long stride, int rows, int lane) {
#pragma unroll
        for (int k = 0; k < kSteps; k++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = (lane >> 2) + r * 8;
                const Scalar* source = queries + row * stride + k * 16;
#if FP8_CACHE
                Expanded four = row < rows ? load_query(source + (lane & 3) * 4) : Expanded{0, 0};
                fragments[k][r] = four.even;
                fragments[k][r + 2] = four.odd;
#else
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const Scalar* two = source + half * 8 + (lane & 3) * 2;
                    fragments[k][r + 2 * half] = row < rows ? *reinterpret_cast<const unsigned*>(two) : 0u;
                }
#endif
            }
        }
#pragma unroll
        for (int j = 0; j < 2 * kSteps; j++) output[j][0] = output[j][1] = output[j][2] = output[j][3] = 0.0f;
        maximum[0] = maximum[1] = kLowest;
        sum[0] = sum[1] = 0.0f;
    }

    __device__ __forceinline__ void score(float (&scores)[kKeyTiles][4], unsigned keys, int lane) const {
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
            float(&low)[4] = scores[n];
            float(&high)[4] = scores[n + 1];
            low[0] = low[1] = low[2] = low[3] = high[0] = high[1] = high[2] = high[3] = 0.0f;
#if FP8_CACHE
            int row = lane & 15, chunk = lane >> 4;
#pragma unroll
            for (int k = 0; k < kSteps; k += 2) {
                unsigned words[4];
                load_matrices(words, keys + CachedRows::offset(n * 8 + row, k + chunk));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    Expanded first = expand_e4m3(words[2 * i]), second = expand_e4m3(words[2 * i + 1]);
                    Tensor16<Operand>::mma(low, fragments[k + i], first.even, first.odd);
                    Tensor16<Operand>::mma(high, fragments[k + i], second.even, second.odd);
                }
            }
#else
            int row = (lane >> 4) * 8 + (lane & 7), chunk = (lane >> 3) & 1;
#pragma unroll
            for (int k = 0; k < kSteps; k++) {
                unsigned b[4];
                load_matrices(b, keys + CachedRows::offset(n * 8 + row, 2 * k + chunk));
                Tensor16<Operand>::mma(low, fragments[k], b[0], b[1]);
                Tensor16<Operand>::mma(high, fragments[k], b[2], b[3]);
            }
#endif
        }
    }

    // Converts scores to probabilities relative to the raised maxima, and rescales earlier sums.
    __device__ __forceinline__ void exponentiate(float (&scores)[kKeyTiles][4]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float highest = maximum[r];
#pragma unroll
            for (int n = 0; n < kKeyTiles; n++) highest = fmaxf(highest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
            float factor = exp2_approx(maximum[r] - highest);
            maximum[r] = highest;
            sum[r] *= factor;
#pragma unroll
            for (int j = 0; j < 2 * kSteps; j++) output[j][2 * r] *= factor, output[j][2 * r + 1] *= factor;
#pragma unroll
            for (int n = 0; n < kKeyTiles; n++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float p = exp2_approx(scores[n][2 * r + c] - highest);
                    scores[n][2 * r + c] = p;
                    sum[r] += p;
                }
            }
        }
    }

    __device__ __forceinline__ void add_values(const float (&p)[kKeyTiles][4], unsigned values, int lane) {
        int row = lane & 15, chunk = lane >> 4;
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
            unsigned a[4] = {Tensor16<Operand>::pack(p[n][0], p[n][1]), Tensor16<Operand>::pack(p[n][2], p[n][3]),
                             Tensor16<Operand>::pack(p[n + 1][0], p[n + 1][1]),
                             Tensor16<Operand>::pack(p[n + 1][2], p[n + 1][3])};
#if FP8_CACHE
#pragma unroll
            for (int j = 0; j < kSteps; j += 2) {
                unsigned words[4];
                load_matrices_transposed(words, values + CachedRows::offset(n * 8 + row, j + chunk));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    Expanded low = expand_e4m3(words[2 * i]), high = expand_e4m3(words[2 * i + 1]);
                    Tensor16<Operand>::mma(output[2 * (j + i)], a, low.even, high.even);
                    Tensor16<Operand>::mma(output[2 * (j + i) + 1], a, low.odd, high.odd);
                }
            }
#else
#pragma unroll
            for (int j = 0; j < kSteps; j++) {
                unsigned b[4];
                load_matrices_transposed(b, values + CachedRows::offset(n * 8 + row, 2 * j + chunk));
                Tensor16<Operand>::mma(output[2 * j], a, b[0], b[1]);
                Tensor16<Operand>::mma(output[2 * j + 1], a, b[2], b[3]);
            }
#endif
        }
    }

    // `unit` is the values' scale; `sinks` are those of all heads.
    __device__ __forceinline__ void write(
        Scalar* target, long long stride, int rows, float unit, const float* __restrict__ sinks, int head, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = sum[r];
            total += __shfl_xor_sync(kFullWarp, total, 1);
            total += __shfl_xor_sync(kFullWarp, total, 2);
            float inverse = unit / (total + sink_weight(sinks, head, maximum[r]));
            int row = (lane >> 2) + r * 8;
            if (row >= rows) continue;
            Scalar* line = target + row * stride;
#pragma unroll
            for (int j = 0; j < kSteps; j++) {
                const float* low = &output[2 * j][2 * r];
                const float* high = &output[2 * j + 1][2 * r];
#if FP8_CACHE
                *reinterpret_cast<uint2*>(line + j * 16 + (lane & 3) * 4) =
                    make_uint2(Tensor16<Scalar>::pack(low[0] * inverse, high[0] * inverse),
                               Tensor16<Scalar>::pack(low[1] * inverse, high[1] * inverse));
#else
                unsigned* two = reinterpret_cast<unsigned*>(line + j * 16 + (lane & 3) * 2);
                two[0] = Tensor16<Scalar>::pack(low[0] * inverse, low[1] * inverse);
                two[4] = Tensor16<Scalar>::pack(high[0] * inverse, high[1] * inverse);
#endif
            }
        }
    }
};
