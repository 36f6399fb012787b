// Merging of decode's partial results: those of a block's warps, then those of the blocks that share a (row, unit).
#pragma once

#include "decode_softmax.cuh"

constexpr int kQuads = HEAD_DIM / 4;
constexpr int kMergeBatch = 8;

struct Partial {
    float* sums;    // [2 * grid, kHeads, HEAD_DIM]
    float2* stats;  // [2 * grid, kHeads]: maximum, sum of exponentials
    int* arrivals;  // [rows, kUnits], zero between launches
};

// Four adjacent elements of one head's output during merging.
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

    // `unit` is the values' scale; `sinks` are those of the segment's heads.
    __device__ __forceinline__ void write(Scalar* target, float unit, const float* sinks, int head) const {
        float total = sum + sink_weight(sinks, head, maximum);
        float inverse = sum == 0.0f ? 0.0f : unit / total;
        *reinterpret_cast<uint2*>(target) = make_uint2(
            Tensor16<Scalar>::pack(output.x * inverse, output.y * inverse),
            Tensor16<Scalar>::pack(output.z * inverse, output.w * inverse));
    }
};

// Merges the warps of this block; `quad` is one of kHeads * kQuads.
__device__ __forceinline__ Merged merge_warps(const float* sums, const float2* stats, int quad) {
    float2 all_stats[WARPS];
    float4 all_sums[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        int head = w * kHeads + quad / kQuads;
        all_stats[w] = stats[head];
        all_sums[w] = *reinterpret_cast<const float4*>(sums + head * kMergePitch + quad % kQuads * 4);
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
            long long head = static_cast<long long>(slot) * kHeads + quad / kQuads;
            stats[i] = __ldcg(partial.stats + head);
            sums[i] = __ldcg(reinterpret_cast<const float4*>(partial.sums + head * HEAD_DIM) + quad % kQuads);
            if (block + i > split.last_block) stats[i] = make_float2(kLowest, 0.0f), sums[i] = make_float4(0, 0, 0, 0);
        }
        merged.add(stats, sums);
    }
    return merged;
}

// Ends a segment: merges the block's warps, then writes the output or stores a partial result. The last block to arrive
// at a (row, unit) merges the partial results and writes the output.
__device__ __forceinline__ void finish_segment(
    const float* sums, const float2* stats, int* is_last, const Partial& partial, const Row& row, int unit, Split split,
    int slot, Scalar* output, long long output_stride, float value_unit, const float* __restrict__ sinks) {
    bool whole = split.is_whole();
    const float* unit_sinks = sinks + first_head(unit);
    Scalar* target = output + row.query * output_stride + first_head(unit) * HEAD_DIM;
    int quads = head_count(unit) * kQuads;
    __syncthreads();
    for (int quad = threadIdx.x; quad < quads; quad += WARPS * 32) {
        Merged merged = merge_warps(sums, stats, quad);
        if (whole) {
            merged.write(target + quad * 4, value_unit, unit_sinks, quad / kQuads);
            continue;
        }
        long long head = static_cast<long long>(slot) * kHeads + quad / kQuads;
        reinterpret_cast<float4*>(partial.sums + head * HEAD_DIM)[quad % kQuads] = merged.output;
        if (quad % kQuads == 0) partial.stats[head] = make_float2(merged.maximum, merged.sum);
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
    for (int quad = threadIdx.x; quad < quads; quad += WARPS * 32) {
        merge_blocks(partial, split, quad).write(target + quad * 4, value_unit, unit_sinks, quad / kQuads);
    }
}
