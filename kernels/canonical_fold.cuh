// The end of a (row, unit) of the canonical decode: its segments are folded in ascending order and its output is written.
#pragma once

#include "canonical_segment.cuh"

constexpr int kQuads = HEAD_DIM / 4;
// Segments whose sums a thread loads at once, if a row has many or few; with few, of several quads.
constexpr int kManySegments = COLUMNS == 8 ? 24 : COLUMNS == 16 ? 16 : 12, kFewSegments = 4;
constexpr int kQuadsOfFew = COLUMNS == 8 ? 1 : COLUMNS == 16 ? 4 : 3;

// Where outputs of a (row, unit) go.
struct Target {
    Scalar* output;  // of the first head of the unit at the row's first position
    long long stride;
    int unit;
    float value_unit;
    const float* sinks;  // of the first head

    __device__ __forceinline__ float sink(int query) const { return __ldg(sinks + head_of(unit, query)); }
    __device__ __forceinline__ Scalar* at(int query) const {
        return output + position_of(unit, query) * stride + head_of(unit, query) * HEAD_DIM;
    }
};

// Writes a whole (row, unit) that one block has folded.
__device__ __forceinline__ void write_whole(Sums& total, const Target& target, int warp, int lane) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int query = n * 8 + (lane & 3) * 2 + c;
            if (query >= query_count(target.unit)) continue;
            float keep = 1.0f;
            if (SINKS) keep = fold_sink(total.maximum[n][c], total.sum[n][c], target.sink(query));
            float inverse = inverse_of(total.sum[n][c], target.value_unit);
#pragma unroll
            for (int j = 0; j < kOwnSteps; j++) {
                if (kSpans % WARPS && step_of(warp, j) >= kSteps) continue;
                unsigned pair = stored_pair(scaled(total.output[j][n][c], keep, inverse),
                                            scaled(total.output[j][n][c + 2], keep, inverse));
                auto place = reinterpret_cast<unsigned short*>(target.at(query) + step_of(warp, j) * 16);
                place[dimension_of(lane)] = pair & 0xffff;
                place[dimension_of(lane) + kDimensionStride] = pair >> 16;
            }
        }
    }
}

// Four adjacent dimensions of a query whose segments are folded.
struct FoldedQuad {
    float maximum = kLowest;
    float sum = 0.0f;
    float4 output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    __device__ __forceinline__ void add(float2 stats, float4 segment) {
        FoldFactors factors = FoldFactors::of(maximum, stats.x);
        sum = factors.sum(sum, stats.y);
        output.x = factors.output(output.x, segment.x);
        output.y = factors.output(output.y, segment.y);
        output.z = factors.output(output.z, segment.z);
        output.w = factors.output(output.w, segment.w);
    }
    __device__ __forceinline__ void write(const Target& target, int quad) {
        int query = quad / kQuads;
        float keep = 1.0f;
        if (SINKS) keep = fold_sink(maximum, sum, target.sink(query));
        float inverse = inverse_of(sum, target.value_unit);
        *reinterpret_cast<uint2*>(target.at(query) + quad % kQuads * 4) =
            make_uint2(stored_pair(scaled(output.x, keep, inverse), scaled(output.y, keep, inverse)),
                       stored_pair(scaled(output.z, keep, inverse), scaled(output.w, keep, inverse)));
    }
};

// Segments' sums of the (row, unit)s that several blocks share.
struct Partial {
    float* sums;    // [slots, kUnitQueries, HEAD_DIM]
    float2* stats;  // [slots, kUnitQueries]: maximum, sum of probabilities
    int* arrivals;  // [rows, kUnits]: segments that are stored, zero between launches

    __device__ __forceinline__ void store(int slot, const Sums& segment, int warp, int lane) const {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int query = n * 8 + (lane & 3) * 2 + c;
                if (query >= kUnitQueries) continue;
                long long place = static_cast<long long>(slot) * kUnitQueries + query;
#pragma unroll
                for (int j = 0; j < kOwnSteps; j++) {
                    if (kSpans % WARPS && step_of(warp, j) >= kSteps) continue;
                    float* own = sums + place * HEAD_DIM + step_of(warp, j) * 16 + dimension_of(lane);
                    own[0] = segment.output[j][n][c];
                    own[kDimensionStride] = segment.output[j][n][c + 2];
                }
                if (warp == 0 && lane < 4) stats[place] = make_float2(segment.maximum[n][c], segment.sum[n][c]);
            }
        }
    }

    // Returns whether the block's segments, `count` of the `all` of a (row, unit), were the last to be stored.
    __device__ __forceinline__ bool arrive(int place, int count, int all, int* is_last) const {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            bool last = atomicAdd(arrivals + place, count) == all - count;
            if (last) arrivals[place] = 0;
            *is_last = last;
        }
        __syncthreads();
        bool last = *is_last;
        if (last) __threadfence();
        return last;
    }

    // Folds the `count` segments from `first` on and writes the output.
    __device__ __forceinline__ void fold(int first, int count, const Target& target) const {
        if (count <= kFewSegments) {
            fold_quads<kQuadsOfFew, kFewSegments>(first, count, target);
        } else {
            fold_quads<1, kManySegments>(first, count, target);
        }
    }

private:
    // Each thread folds `Quads` quads of dimensions at once, and loads `Batch` segments of them at once.
    template <int Quads, int Batch>
    __device__ __forceinline__ void fold_quads(int first, int count, const Target& target) const {
        int quads = query_count(target.unit) * kQuads;
        for (int quad = threadIdx.x; quad < quads; quad += Quads * kThreads) {
            FoldedQuad folded[Quads];
            for (int base = 0; base < count; base += Batch) {
                float2 own_stats[Quads][Batch];
                float4 own_sums[Quads][Batch];
#pragma unroll
                for (int n = 0; n < Quads; n++) {
                    int own = min(quad + n * kThreads, quads - 1);
#pragma unroll
                    for (int i = 0; i < Batch; i++) {
                        long long slot = first + min(base + i, count - 1), place = slot * kUnitQueries + own / kQuads;
                        own_stats[n][i] = __ldcg(stats + place);
                        own_sums[n][i] = __ldcg(reinterpret_cast<const float4*>(sums + place * HEAD_DIM) + own % kQuads);
                        // What is folded beyond the end changes nothing. A branch would make loads wait for each other.
                        if (base + i >= count) {
                            own_stats[n][i] = make_float2(kLowest, 0.0f), own_sums[n][i] = make_float4(0, 0, 0, 0);
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < Quads; n++) {
#pragma unroll
                    for (int i = 0; i < Batch; i++) folded[n].add(own_stats[n][i], own_sums[n][i]);
                }
            }
#pragma unroll
            for (int n = 0; n < Quads; n++) {
                if (quad + n * kThreads < quads) folded[n].write(target, quad + n * kThreads);
            }
        }
    }
};
