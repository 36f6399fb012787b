// The canonical decode's sums over a segment: of a block's warps together, transposed as in decode_products.cuh.
//
// Of a sub-tile of 64 keys each warp multiplies sixteen keys with all queries of the unit. Maxima and probabilities pass
// through shared memory, and each warp multiplies all 64 probabilities with its own part of the values' dimensions, in
// ascending steps of sixteen keys. Sums of probabilities are chains by key modulo eight, one for each thread.
#pragma once

#include "canonical_walk.cuh"
#include "decode_products.cuh"

// An FP8 cache's words have dimensions of two steps of 16 (cached.cuh).
constexpr int kSpan = FP8_CACHE ? 2 : 1;
constexpr int kSpans = kSteps / kSpan;
constexpr int kOwnSpans = (kSpans + WARPS - 1) / WARPS;
constexpr int kOwnSteps = kOwnSpans * kSpan;
constexpr int kResidues = 8;
constexpr int kChains = (COLUMNS * kResidues + kThreads - 1) / kThreads;  // of each thread
constexpr int kPitch = kSubTile + 8;                                     // of a query's probabilities; avoids bank conflicts

// What the warps exchange.
struct Exchange {
    float probabilities[COLUMNS][kPitch];
    float maxima[WARPS][COLUMNS];  // of scores, by warp
    float factors[COLUMNS];        // by which the sub-tile scales the segment's sums so far
    float sums[COLUMNS];           // of the segment
    int is_last;
};

// A lane's part of sums over keys: for queries n * 8 + lane % 4 * 2 + {0, 1}, the dimensions of the warp's steps.
struct Sums {
    float output[kOwnSteps][kColumnTiles][4];
    float maximum[kColumnTiles][2];
    float sum[kColumnTiles][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            maximum[n][0] = maximum[n][1] = kLowest;
            sum[n][0] = sum[n][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < kOwnSteps; j++) {
                output[j][n][0] = output[j][n][1] = output[j][n][2] = output[j][n][3] = 0.0f;
            }
        }
    }

    __device__ __forceinline__ void fold(const Sums& segment) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                FoldFactors factors = FoldFactors::of(maximum[n][c], segment.maximum[n][c]);
                sum[n][c] = factors.sum(sum[n][c], segment.sum[n][c]);
#pragma unroll
                for (int j = 0; j < kOwnSteps; j++) {
                    output[j][n][c] = factors.output(output[j][n][c], segment.output[j][n][c]);
                    output[j][n][c + 2] = factors.output(output[j][n][c + 2], segment.output[j][n][c + 2]);
                }
            }
        }
    }
};

// Index of the head's step of 16 dimensions that is the warp's step `own`, or one beyond the head.
__device__ __forceinline__ int step_of(int warp, int own) {
    return (warp + own / kSpan * WARPS) * kSpan + own % kSpan;
}

// The first of two dimensions of a lane in a step of 16, and the distance to the second: an FP8 cache's are adjacent.
__device__ __forceinline__ int dimension_of(int lane) { return FP8_CACHE ? 2 * (lane >> 2) : lane >> 2; }
constexpr int kDimensionStride = FP8_CACHE ? 1 : 8;

// The current segment.
struct Segment {
    Exchange& exchange;
    int warp, lane;
    Sums sums;
    float chains[kChains];

    __device__ __forceinline__ void clear() {
        sums.clear();
#pragma unroll
        for (int i = 0; i < kChains; i++) chains[i] = 0.0f;
    }

    // Masks the scores of the warp's keys, the first at `position`, and publishes their maxima.
    __device__ __forceinline__ void mask(
        float (&scores)[kColumnTiles][4], const ScoreUnit& unit, const Sight& sight, int query, int position) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            float highest[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#if POSITIONS
                Keys seen = sight.keys_of(query + n * 8 + (lane & 3) * 2 + (i & 1));
#else
                Keys seen{sight.begin, sight.end};
#endif
                int key = position + (lane >> 2) + (i >> 1) * 8;
                bool visible = key >= seen.begin && key < seen.end;
                scores[n][i] = visible ? unit.capped(scores[n][i]) : minus_infinity();
            }
#pragma unroll
            for (int c = 0; c < 2; c++) {
                highest[c] = fmaxf(scores[n][c], scores[n][c + 2]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) {
                    highest[c] = fmaxf(highest[c], __shfl_xor_sync(kFullWarp, highest[c], lanes));
                }
            }
            if (lane < 4) {
                exchange.maxima[warp][n * 8 + lane * 2] = highest[0];
                exchange.maxima[warp][n * 8 + lane * 2 + 1] = highest[1];
            }
        }
    }

    // Raises the maxima to those that the warps have published, rescales, and publishes probabilities.
    __device__ __forceinline__ void exponentiate(const float (&scores)[kColumnTiles][4], const ScoreUnit& unit) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int column = n * 8 + (lane & 3) * 2 + c;
                float highest = exchange.maxima[0][column];
#pragma unroll
                for (int w = 1; w < WARPS; w++) highest = fmaxf(highest, exchange.maxima[w][column]);
                float before = sums.maximum[n][c], maximum = fmaxf(before, unit.maximum(highest));
                float factor = exp2_approx(__fsub_rn(before, maximum));
                sums.maximum[n][c] = maximum;
                if (warp == 0 && lane < 4) exchange.factors[column] = factor;
#pragma unroll
                for (int j = 0; j < kOwnSteps; j++) {
                    sums.output[j][n][c] = __fmul_rn(sums.output[j][n][c], factor);
                    sums.output[j][n][c + 2] = __fmul_rn(sums.output[j][n][c + 2], factor);
                }
                float* own = exchange.probabilities[column] + warp * kTile + (lane >> 2);
                own[0] = unit.probability(scores[n][c], maximum);
                own[8] = unit.probability(scores[n][c + 2], maximum);
            }
        }
    }

    // Adds the published probabilities to the sums by key modulo eight, in ascending order.
    __device__ __forceinline__ void add_probabilities() {
#pragma unroll
        for (int i = 0; i < kChains; i++) {
            int chain = i * kThreads + threadIdx.x, column = chain / kResidues;
            if (COLUMNS * kResidues % kThreads && column >= COLUMNS) continue;
            const float* own = exchange.probabilities[column] + chain % kResidues;
            float sum = __fmul_rn(chains[i], exchange.factors[column]);
#pragma unroll
            for (int k = 0; k < kSubTile; k += kResidues) sum = __fadd_rn(sum, own[k]);
            chains[i] = sum;
        }
    }

    // Adds the published probabilities times the values to the outputs.
    __device__ __forceinline__ void add_values(unsigned values) {
#pragma unroll
        for (int k = 0; k < kSubTileKeys; k++) {
            unsigned p[kColumnTiles][2];
#pragma unroll
            for (int n = 0; n < kColumnTiles; n++) {
                const float* own = exchange.probabilities[n * 8 + (lane >> 2)] + k * kTile + (lane & 3) * 2;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float2 two = *reinterpret_cast<const float2*>(own + 8 * half);
                    p[n][half] = Tensor16<Operand>::pack(two.x, two.y);
                }
            }
#pragma unroll
            for (int i = 0; i < kOwnSpans; i++) {
                int span = warp + i * WARPS;
                if (kSpans % WARPS && span >= kSpans) continue;
                add_span(i, values + k * kTile * CachedRows::kRowBytes, span, p);
            }
        }
    }

    // Ends the segment: all threads get its sums of probabilities, ((0 1) (2 3)) ((4 5) (6 7)) by residue.
    __device__ __forceinline__ void end() {
#pragma unroll
        for (int i = 0; i < kChains; i++) {
            int chain = i * kThreads + threadIdx.x;
            float sum = chains[i];
#pragma unroll
            for (int lanes = 1; lanes < kResidues; lanes *= 2) {
                sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, lanes));
            }
            if (chain % kResidues == 0 && chain / kResidues < COLUMNS) exchange.sums[chain / kResidues] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            sums.sum[n][0] = exchange.sums[n * 8 + (lane & 3) * 2];
            sums.sum[n][1] = exchange.sums[n * 8 + (lane & 3) * 2 + 1];
        }
    }

private:
    // Sixteen keys' values of a span, at `values`, times their probabilities.
    __device__ __forceinline__ void add_span(int own, unsigned values, int span, const unsigned (&p)[kColumnTiles][2]) {
#if FP8_CACHE
        unsigned words[4];
        load_matrices_transposed(words, values + CachedRows::offset(lane & 15, 2 * span + (lane >> 4)));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Expanded low = expand_e4m3(words[2 * i]), high = expand_e4m3(words[2 * i + 1]);
            unsigned a[4] = {low.even, low.odd, high.even, high.odd};
            multiply(own * 2 + i, a, p);
        }
#else
        unsigned a[4];
        int row = (lane >> 4) * 8 + (lane & 7), chunk = (lane >> 3) & 1;
        load_matrices_transposed(a, values + CachedRows::offset(row, 2 * span + chunk));
        multiply(own, a, p);
#endif
    }
    __device__ __forceinline__ void multiply(int step, const unsigned (&a)[4], const unsigned (&p)[kColumnTiles][2]) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) Tensor16<Operand>::mma(sums.output[step][n], a, p[n][0], p[n][1]);
    }
};
