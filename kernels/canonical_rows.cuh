// The canonical softmax of the prefill kernels: a lane's parts of the rows lane / 4 and lane / 4 + 8 of a warp's queries.
//
// A lane's scores are [8-key tile][row][two adjacent keys]: keys 8 * j + 2 * (lane % 4) and the next one. So its sums of
// even and of odd keys are two of the eight sums by key modulo eight.
#pragma once

#include "canonical.cuh"

constexpr int kLaneScores = kSubTile / 2;

// Probabilities of the current segment.
struct SegmentRows {
    ScoreUnit unit;
    float maximum[2];
    float even[2], odd[2];
    float factor[2];  // by which the last sub-tile scaled earlier sums, if `shrinks`
    bool shrinks;     // whether the last sub-tile raised the maximum in any of the warp's rows

    __device__ __forceinline__ void reset() {
        maximum[0] = maximum[1] = kLowest;
        even[0] = even[1] = odd[0] = odd[1] = 0.0f;
    }

    // Converts scores to probabilities; `key` is the first key's position and `query` that of the warp's first query.
    // `Plain`: all keys are visible to all of the warp's queries.
    template <bool Plain>
    __device__ __forceinline__ void exponentiate(float (&s)[kLaneScores], int key, int query, int window) {
        if (SOFT_CAP) {
#pragma unroll
            for (int i = 0; i < kLaneScores; i++) s[i] = unit.capped(s[i]);
        }
        if (!Plain) {
            int lane = threadIdx.x & 31;
            int distance = query + (lane >> 2) - key - (lane & 3) * 2;  // from this lane's first key to its first query
            if (key + kSubTile - 1 > query) mask<true>(s, distance, 0);
            if (key <= query + 15 - window) mask<false>(s, distance, window);
        }
        float top[2] = {unit.maximum(highest<0>(s)), unit.maximum(highest<1>(s))};
        shrinks = __any_sync(kFullWarp, top[0] > maximum[0] || top[1] > maximum[1]);
        if (__builtin_expect(shrinks, !Plain)) raise_maximum(top);
#pragma unroll
        for (int i = 0; i < kLaneScores; i += 2) {
            int r = i / 2 % 2;
            s[i] = unit.probability(s[i], maximum[r]);
            s[i + 1] = unit.probability(s[i + 1], maximum[r]);
            even[r] = __fadd_rn(even[r], s[i]);
            odd[r] = __fadd_rn(odd[r], s[i + 1]);
        }
    }

    // Scales a lane's outputs, ordered like its scores, as the last sub-tile scaled the sums.
    template <int Outputs>
    __device__ __forceinline__ void rescale(float (&outputs)[Outputs]) const {
#pragma unroll
        for (int i = 0; i < Outputs; i++) outputs[i] = __fmul_rn(outputs[i], factor[i >> 1 & 1]);
    }

    // The whole sum of a row: ((0 1) (2 3)) ((4 5) (6 7)) by key modulo eight.
    __device__ __forceinline__ float whole_sum(int r) const {
        float total = __fadd_rn(even[r], odd[r]);
        total = __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, 1));
        return __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, 2));
    }

private:
    // The highest of this lane's scores of a row.
    template <int Row>
    static __device__ __forceinline__ float highest(const float (&s)[kLaneScores]) {
        float parts[4] = {minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity()};
#pragma unroll
        for (int j = 0; j < kLaneScores / 4; j++) {
            parts[j & 3] = fmaxf(parts[j & 3], fmaxf(s[4 * j + 2 * Row], s[4 * j + 2 * Row + 1]));
        }
        return fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
    }

    // Raises the maxima to those of each row; `top` is this lane's.
    __device__ __forceinline__ void raise_maximum(const float (&top)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float raised = fmaxf(maximum[r], top[r]);
            raised = fmaxf(raised, __shfl_xor_sync(kFullWarp, raised, 1));
            raised = fmaxf(raised, __shfl_xor_sync(kFullWarp, raised, 2));
            factor[r] = exp2_approx(__fsub_rn(maximum[r], raised));
            maximum[r] = raised;
            even[r] = __fmul_rn(even[r], factor[r]);
            odd[r] = __fmul_rn(odd[r], factor[r]);
        }
    }

    // Masks keys at distances below `bound` (with Below) or at and above it.
    template <bool Below>
    static __device__ __forceinline__ void mask(float (&s)[kLaneScores], int distance, int bound) {
#pragma unroll
        for (int j = 0; j < kLaneScores / 4; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int own = distance + (i >> 1) * 8 - (j * 8 + (i & 1));
                if ((own < bound) == Below) s[4 * j + i] = minus_infinity();
            }
        }
    }
};

// The segments before, folded.
template <int Outputs>
struct FoldedRows {
    float output[Outputs];
    float maximum[2];
    float sum[2];
    FoldFactors factors[2];  // of the fold under way

    __device__ __forceinline__ void clear() {
        maximum[0] = maximum[1] = kLowest;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < Outputs; i++) output[i] = 0.0f;
    }
    // Folds a segment's sums of probabilities; those of its values may be folded later, by `fold_outputs`.
    __device__ __forceinline__ void fold_sums(const SegmentRows& segment) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            factors[r] = FoldFactors::of(maximum[r], segment.maximum[r]);
            sum[r] = factors[r].sum(sum[r], segment.whole_sum(r));
        }
    }
    __device__ __forceinline__ void fold_outputs(const float (&segment)[Outputs]) {
        // Few segments raise a maximum; where none does in the warp, what came before is multiplied by 1.
        if (__any_sync(kFullWarp, factors[0].keep != 1.0f || factors[1].keep != 1.0f)) {
#pragma unroll
            for (int i = 0; i < Outputs; i++) output[i] = __fmul_rn(output[i], factors[i >> 1 & 1].keep);
        }
#pragma unroll
        for (int i = 0; i < Outputs; i++) output[i] = __fmaf_rn(segment[i], factors[i >> 1 & 1].add, output[i]);
    }
    // Ends the row with its head's sink. Returns the factor of outputs; `keep` is the sink's, as `scaled` takes both.
    __device__ __forceinline__ float end(int r, const float* __restrict__ sinks, int head, float unit, float& keep) {
        keep = SINKS ? fold_sink(maximum[r], sum[r], __ldg(sinks + head)) : 1.0f;
        return inverse_of(sum[r], unit);
    }
};
