// Merging of decode's partial results: those of a block's teams, then those of the blocks that share a (row, unit).
#pragma once

#include "decode_softmax.cuh"

constexpr int kQuads = HEAD_DIM / 4;
constexpr int kMergeBatch = 8;

struct Partial {
    float* sums;    // [2 * grid, kUnitQueries, HEAD_DIM]
    float2* stats;  // [2 * grid, kUnitQueries]: maximum, sum of exponentials
    int* arrivals;  // [rows, kUnits], zero between launches
};

// Four adjacent elements of one query's output during merging.
struct Merged {
    float maximum = kLowest;
    float sum = 0.0f;
    float4 output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    template <int Count>
    __device__ __forceinline__ void add(const float2 (&stats)[Count], const float4 (&sums)[Count]) {
        float highest = maximum;
#pragma unroll
        for (int i = 0; i < Count; i++) highest = fmaxf(highest, stats[i].x);
        float factor = exp2_approx(maximum - highest);
        maximum = highest;
        sum *= factor;
        output.x *= factor, output.y *= factor, output.z *= factor, output.w *= factor;
#pragma unroll
        for (int i = 0; i < Count; i++) {
            factor = exp2_approx(stats[i].x - highest);
            sum += factor * stats[i].y;
            output.x += factor * sums[i].x, output.y += factor * sums[i].y;
            output.z += factor * sums[i].z, output.w += factor * sums[i].w;
        }
    }

    // `unit` is the values' scale; `sinks` are by query head.
    __device__ __forceinline__ void write(Scalar* target, float unit, const float* sinks, int head) const {
        float total = sum + sink_weight(sinks, head, maximum);
        float inverse = sum == 0.0f ? 0.0f : unit / total;
        *reinterpret_cast<uint2*>(target) = make_uint2(
            Tensor16<Scalar>::pack(output.x * inverse, output.y * inverse),
            Tensor16<Scalar>::pack(output.z * inverse, output.w * inverse));
    }
};

// Merges the teams of this block; `quad` is one of kUnitQueries * kQuads.
__device__ __forceinline__ Merged merge_teams(const float* sums, const float2* stats, int quad) {
    float2 all_stats[kTeams];
    float4 all_sums[kTeams];
#pragma unroll
    for (int t = 0; t < kTeams; t++) {
        int query = t * kUnitQueries + quad / kQuads;
        all_stats[t] = stats[query];
        all_sums[t] = *reinterpret_cast<const float4*>(sums + query * kMergePitch + quad % kQuads * 4);
    }
    Merged merged;
    merged.add(all_stats, all_sums);
    return merged;
}

// Merges the partial results of the blocks of a split.
__device__ __forceinline__ Merged merge_blocks(const Partial& partial, Split split, int quad) {
    Merged merged;
    for (int block = split.first_block(); block <= split.last_block; block += kMergeBatch) {
        float2 stats[kMergeBatch];
        float4 sums[kMergeBatch];
#pragma unroll
        for (int i = 0; i < kMergeBatch; i++) {
            int source = min(block + i, split.last_block);
            int slot = source == split.first_block() ? split.first_slot : 2 * source;
            long long query = static_cast<long long>(slot) * kUnitQueries + quad / kQuads;
            stats[i] = __ldcg(partial.stats + query);
            sums[i] = __ldcg(reinterpret_cast<const float4*>(partial.sums + query * HEAD_DIM) + quad % kQuads);
            if (block + i > split.last_block) stats[i] = make_float2(kLowest, 0.0f), sums[i] = make_float4(0, 0, 0, 0);
        }
        merged.add(stats, sums);
    }
    return merged;
}

#if POSITIONS > 1
// Quads that a thread merges at once: with more queries than threads, one after the other would wait for memory longer.
constexpr int kQuadsAtOnce = 2;

// The same for quads that are a block's threads apart, from `quad` on; those beyond `quads` are not to be used.
__device__ __forceinline__ void merge_blocks(
    Merged (&merged)[kQuadsAtOnce], const Partial& partial, Split split, int quad, int quads) {
    for (int block = split.first_block(); block <= split.last_block; block += kMergeBatch) {
        float2 stats[kQuadsAtOnce][kMergeBatch];
        float4 sums[kQuadsAtOnce][kMergeBatch];
#pragma unroll
        for (int n = 0; n < kQuadsAtOnce; n++) {
            int own = min(quad + n * WARPS * 32, quads - 1);
#pragma unroll
            for (int i = 0; i < kMergeBatch; i++) {
                int source = min(block + i, split.last_block);
                int slot = source == split.first_block() ? split.first_slot : 2 * source;
                long long query = static_cast<long long>(slot) * kUnitQueries + own / kQuads;
                stats[n][i] = __ldcg(partial.stats + query);
                sums[n][i] = __ldcg(reinterpret_cast<const float4*>(partial.sums + query * HEAD_DIM) + own % kQuads);
                if (block + i > split.last_block) {
                    stats[n][i] = make_float2(kLowest, 0.0f), sums[n][i] = make_float4(0, 0, 0, 0);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < kQuadsAtOnce; n++) merged[n].add(stats[n], sums[n]);
    }
}
#endif

// Elements from those of first_head(unit), at a row's first position, to a quad of a unit's queries.
__device__ __forceinline__ long long quad_offset(int unit, int quad, long long stride) {
#if POSITIONS > 1
    int query = quad / kQuads;
    return position_of(unit, query) * stride + head_of(unit, query) * HEAD_DIM + quad % kQuads * 4;
#else
    return quad * 4;
#endif
}

// Ends a segment: merges the block's teams, then writes the output or stores a partial result. The last block to arrive
// at a (row, unit) merges the partial results and writes the output.
__device__ __forceinline__ void finish_segment(
    const float* sums, const float2* stats, int* is_last, const Partial& partial, const Row& row, int unit, Split split,
    int slot, Scalar* output, long long output_stride, float value_unit, const float* __restrict__ sinks) {
    bool whole = split.is_whole();
    const float* unit_sinks = sinks + first_head(unit);
    Scalar* target = output + row.query * output_stride + first_head(unit) * HEAD_DIM;
    int quads = query_count(unit) * kQuads;
    __syncthreads();
    for (int quad = threadIdx.x; quad < quads; quad += WARPS * 32) {
        Merged merged = merge_teams(sums, stats, quad);
        if (whole) {
            Scalar* place = target + quad_offset(unit, quad, output_stride);
            merged.write(place, value_unit, unit_sinks, head_of(unit, quad / kQuads));
            continue;
        }
        long long query = static_cast<long long>(slot) * kUnitQueries + quad / kQuads;
        reinterpret_cast<float4*>(partial.sums + query * HEAD_DIM)[quad % kQuads] = merged.output;
        if (quad % kQuads == 0) partial.stats[query] = make_float2(merged.maximum, merged.sum);
    }
    if (!whole) __threadfence();
    __syncthreads();
    if (whole) return;
    if (threadIdx.x == 0) {
        int* arrivals = partial.arrivals + row.index * kUnits + unit;
        bool last = atomicAdd(arrivals, 1) == split.last_block - split.first_block();
        if (last) *arrivals = 0;
        *is_last = last;
    }
    __syncthreads();
    if (!*is_last) return;
    __threadfence();
#if POSITIONS > 1
    for (int first = threadIdx.x; first < quads; first += kQuadsAtOnce * WARPS * 32) {
        Merged merged[kQuadsAtOnce];
        merge_blocks(merged, partial, split, first, quads);
#pragma unroll
        for (int n = 0; n < kQuadsAtOnce; n++) {
            int quad = first + n * WARPS * 32;
            if (quad >= quads) continue;
            Scalar* place = target + quad_offset(unit, quad, output_stride);
            merged[n].write(place, value_unit, unit_sinks, head_of(unit, quad / kQuads));
        }
    }
#else
    for (int quad = threadIdx.x; quad < quads; quad += WARPS * 32) {
        Scalar* place = target + quad_offset(unit, quad, output_stride);
        merge_blocks(partial, split, quad).write(place, value_unit, unit_sinks, head_of(unit, quad / kQuads));
    }
#endif
}
