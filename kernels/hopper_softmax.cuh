// The softmax of the Hopper prefill in registers, and the write of the output.
#pragma once

#include "hopper_store.cuh"

// A thread's part of the softmax of 64 queries: parts of the rows lane / 4 and lane / 4 + 8 of its warp.
//
// Probabilities are relative to `maximum`, which is raised only when a score exceeds it by more than kSlack: most tiles
// need no exchange between lanes and no rescaling of earlier sums.
struct Softmax {
    static constexpr float kSlack = 8.0f;  // in log2 units: fp16 can represent probabilities up to 2^8

    float scale;  // of the piece's head, to log2 units
    float maximum[2];
    float sum[2];     // of this lane's keys only
    float factor[2];  // by which the last tile scaled earlier sums, if `shrinks`
    bool shrinks;     // whether the last tile raised the maximum in any of the warp's rows

    __device__ __forceinline__ void reset() {
        maximum[0] = maximum[1] = kLowest;
        sum[0] = sum[1] = 0.0f;
    }

    // Converts scores to probabilities; `key` is the first key's position and `query` that of the warp's first query.
    // `Plain`: all keys are visible to all of the warp's queries.
    template <bool Plain>
    __device__ __forceinline__ void exponentiate(float (&s)[kScores], int key, int query, int window, float soft_cap) {
        if (SOFT_CAP) {
#pragma unroll
            for (int i = 0; i < kScores; i++) s[i] = soft_capped(s[i], scale * (1.0f / kLog2E), soft_cap);
        }
        if (!Plain) {
            int lane = threadIdx.x & 31;
            int distance = query + (lane >> 2) - key - (lane & 3) * 2;  // from this lane's first key to its first query
            if (key + kKeys - 1 > query) mask<true>(s, distance, 0);
            if (key <= query + 15 - window) mask<false>(s, distance, window);
        }
        float top[2] = {highest<0>(s), highest<1>(s)};
        float above = fmaxf(top[0] - maximum[0], top[1] - maximum[1]) * unit();
        shrinks = __any_sync(kFullWarp, above > kSlack);
        if (__builtin_expect(shrinks, !Plain)) raise_maximum(top);
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
            int r = i / 2 % 2;
            s[i] = exp2_in_order(fmaf(s[i], unit(), -maximum[r] * unit()));
            s[i + 1] = exp2_in_order(fmaf(s[i + 1], unit(), -maximum[r] * unit()));
            sum[r] += s[i] + s[i + 1];
        }
    }

    // The highest of this lane's scores of a row.
    template <int Row>
    static __device__ __forceinline__ float highest(const float (&s)[kScores]) {
        float parts[4] = {kLowest, kLowest, kLowest, kLowest};
#pragma unroll
        for (int j = 0; j < kScores / 4; j++) {
            parts[j & 3] = fmaxf(parts[j & 3], fmaxf(s[4 * j + 2 * Row], s[4 * j + 2 * Row + 1]));
        }
        return fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
    }

    // Raises the maximum to the largest score of each row; `top` is this lane's largest.
    __device__ __forceinline__ void raise_maximum(const float (&top)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float raised = fmaxf(maximum[r], top[r]);
            raised = fmaxf(raised, __shfl_xor_sync(kFullWarp, raised, 1));
            raised = fmaxf(raised, __shfl_xor_sync(kFullWarp, raised, 2));
            factor[r] = exp2_approx((maximum[r] - raised) * unit());
            maximum[r] = raised;
            sum[r] *= factor[r];
        }
    }

    // Factor from scores to log2 units.
    __device__ __forceinline__ float unit() const { return SOFT_CAP ? 1.0f : scale; }

    // Exponentials start in the order of their keys: the compiler's own order is 1% slower.
    static __device__ __forceinline__ float exp2_in_order(float x) {
        float y;
        asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }

    // Masks keys at distances below `bound` (with Below) or at and above it.
    template <bool Below>
    static __device__ __forceinline__ void mask(float (&s)[kScores], int distance, int bound) {
#pragma unroll
        for (int j = 0; j < kScores / 4; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int own = distance + (i >> 1) * 8 - (j * 8 + (i & 1));
                if ((own < bound) == Below) s[4 * j + i] = minus_infinity();
            }
        }
    }
};

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Divides by the sums, multiplies by the values' unit, and stores a thread's rows.
__device__ __forceinline__ void write_output(
    const float (&o)[kOutputs], const float (&sums)[2], float unit, Scalar* output, long long stride, int rows) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = sums[r];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        float inverse = unit * reciprocal(sum);
        store_row(o, r, output, stride, rows, [&](float first, float second) {
            return Tensor16<Scalar>::pack(first * inverse, second * inverse);
        });
    }
}
