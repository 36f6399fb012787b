// The canonical order of attention: a query's bits depend on it and on the keys that it sees alone, not on the batch, the
// chunk, the split or the kernel. docs/determinism.md defines it and tests/support/canonical_twin.py follows it.
//
// Positions are cut into segments of kSegment, counted from the sequence's first, and segments into sub-tiles of
// kSubTile. Every float32 operation is an intrinsic that rounds once, or ex2.approx or div.approx by name: the compiler
// contracts nothing. Maxima are whole numbers, in log2 units, so that rescaling by their differences is exact.
#pragma once

#include "cached.cuh"

constexpr int kSegment = 256;
constexpr int kSubTile = 64;

// How scores of a head become exponents of two.
struct ScoreUnit {
    float factor;  // of a score; with SOFT_CAP of the cap's argument, doubled
    float cap;     // in log2 units

    // `scale` multiplies the scores; `unit` is that of the cached keys.
    static __device__ __forceinline__ ScoreUnit of(float scale, float unit, float soft_cap) {
        float log2_units = __fmul_rn(__fmul_rn(scale, unit), kLog2E);
        if (!SOFT_CAP) return {log2_units, 0.0f};
        return {__fdiv_rn(__fmul_rn(2.0f, log2_units), soft_cap), __fmul_rn(soft_cap, kLog2E)};
    }

    // cap * tanh(score * scale / cap) in log2 units with SOFT_CAP, otherwise the score itself.
    __device__ __forceinline__ float capped(float score) const {
        if (!SOFT_CAP) return score;
        float doubled = exp2_approx(__fmul_rn(score, factor));
        return __fmul_rn(cap, __fsub_rn(1.0f, __fdividef(2.0f, __fadd_rn(1.0f, doubled))));
    }

    // The maximum of a sub-tile whose highest capped score is `highest`: the next whole number.
    __device__ __forceinline__ float maximum(float highest) const {
        return ceilf(SOFT_CAP ? highest : __fmul_rn(highest, factor));
    }

    // Of a capped score; +0 for minus infinity.
    __device__ __forceinline__ float probability(float score, float maximum) const {
        return exp2_approx(SOFT_CAP ? __fsub_rn(score, maximum) : __fmaf_rn(score, factor, -maximum));
    }
};

// Factors that bring what came before, and a segment, to their common maximum.
struct FoldFactors {
    float keep;
    float add;

    // Raises `maximum` to that of the segment.
    static __device__ __forceinline__ FoldFactors of(float& maximum, float segment_maximum) {
        float highest = fmaxf(maximum, segment_maximum);
        FoldFactors factors{exp2_approx(maximum - highest), exp2_approx(segment_maximum - highest)};
        maximum = highest;
        return factors;
    }
    __device__ __forceinline__ float sum(float total, float segment) const {
        return __fadd_rn(__fmul_rn(total, keep), __fmul_rn(segment, add));
    }
    __device__ __forceinline__ float output(float total, float segment) const {
        return __fmaf_rn(segment, add, __fmul_rn(total, keep));
    }
};

// A sink is folded last, like a segment whose output is 0. Returns the factor of the outputs; `sink` is in log2 units.
__device__ __forceinline__ float fold_sink(float& maximum, float& sum, float sink) {
    float highest = fmaxf(ceilf(sink), kLowest);  // minus infinity, of a layer without sinks, adds 0
    FoldFactors factors = FoldFactors::of(maximum, highest);
    sum = factors.sum(sum, exp2_approx(__fsub_rn(sink, highest)));
    return factors.keep;
}

// Factor of the outputs: the values' unit divided by the sum; 0 where nothing was visible.
__device__ __forceinline__ float inverse_of(float sum, float unit) { return sum == 0.0f ? 0.0f : __fdiv_rn(unit, sum); }

// An output: the folded sum times the sink's factor, which is 1 without sinks, times `inverse`.
__device__ __forceinline__ float scaled(float sum, float keep, float inverse) {
    return __fmul_rn(SINKS ? __fmul_rn(sum, keep) : sum, inverse);
}

// Two outputs as they are stored. With LOW_HALVES, for tests, the halves of float32 outputs that rounding drops.
__device__ __forceinline__ unsigned stored_pair(float first, float second) {
#if LOW_HALVES
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x5410);
#else
    return Tensor16<Scalar>::pack(first, second);
#endif
}
