// The end of a (row, unit) of the canonical decode: its segments are folded in ascending order and its output is written.
#pragma once

#include "canonical_segment.cuh"

constexpr int kQuads = HEAD_DIM / 4;
constexpr int kFoldBatch = COLUMNS > 16 ? 8 : 16;  // segments whose sums a thread loads at once

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
        int quads = query_count(target.unit) * kQuads;
        for (int quad = threadIdx.x; quad < quads; quad += kThreads) {
            int query = quad / kQuads, column = quad % kQuads;
            float maximum = kLowest, sum = 0.0f;
            float4 output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int base = 0; base < count; base += kFoldBatch) {
                float2 own_stats[kFoldBatch];
                float4 own_sums[kFoldBatch];
#pragma unroll
                for (int i = 0; i < kFoldBatch; i++) {
                    long long place = static_cast<long long>(first + min(base + i, count - 1)) * kUnitQueries + query;
                    own_stats[i] = __ldcg(stats + place);
                    own_sums[i] = __ldcg(reinterpret_cast<const float4*>(sums + place * HEAD_DIM) + column);
                }
#pragma unroll
                for (int i = 0; i < kFoldBatch; i++) {
                    if (base + i >= count) break;
                    FoldFactors factors = FoldFactors::of(maximum, own_stats[i].x);
                    sum = factors.sum(sum, own_stats[i].y);
                    output.x = factors.output(output.x, own_sums[i].x);
                    output.y = factors.output(output.y, own_sums[i].y);
                    output.z = factors.output(output.z, own_sums[i].z);
                    output.w = factors.output(output.w, own_sums[i].w);
                }
            }
            float keep = 1.0f;
            if (SINKS) keep = fold_sink(maximum, sum, target.sink(query));
            float inverse = inverse_of(sum, target.value_unit);
            *reinterpret_cast<uint2*>(target.at(query) + column * 4) =
                make_uint2(stored_pair(scaled(output.x, keep, inverse), scaled(output.y, keep, inverse)),
                           stored_pair(scaled(output.z, keep, inverse), scaled(output.w, keep, inverse)));
        }
    }
};
