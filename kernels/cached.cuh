// Elements of the KV cache, and the operands that mma.sync kernels make from them.
//
// Without FP8_CACHE elements are SCALAR. With it they are e4m3 in units of a scale per head, and products are done in
// fp16, which represents every e4m3 exactly. Queries and probabilities are rounded to fp16, which is finer than bf16
// but has less range: queries beyond 65,504 are clipped. A 32-bit word of four elements becomes two words of two, the
// even and the odd ones, so the order of dimensions within a step of 16 differs: see the kernels' fragments.
#pragma once

#include "attention.cuh"
#include "vector.cuh"

using Scalar = SCALAR;

#if FP8_CACHE
using Operand = __half;
constexpr int kCachedBytes = 1;
#else
using Operand = Scalar;
constexpr int kCachedBytes = 2;
#endif

using CachedRows = SwizzledRows<HEAD_DIM * kCachedBytes>;

// Two fp16 each: elements 0 and 2, 1 and 3 of a word of e4m3.
struct Expanded {
    unsigned even;
    unsigned odd;
};

#if __CUDA_ARCH__ >= 890

// Factor by which expanded elements must be multiplied.
constexpr float kExpandedUnit = 1.0f;

__device__ __forceinline__ Expanded expand_e4m3(unsigned four) {
    Expanded expanded;
    unsigned sorted = __byte_perm(four, 0, 0x3120);
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(expanded.even), "=r"(expanded.odd)
        : "r"(sorted));
    return expanded;
}

#else

// e4m3's fields shifted to fp16's positions give 1 / 2^8 of the value, also for denormals; NaN becomes 480.
constexpr float kExpandedUnit = 256.0f;

__device__ __forceinline__ Expanded expand_e4m3(unsigned four) {
    constexpr unsigned kSigns = 0x80008000u, kRest = 0x3f803f80u;
    return {four << 8 & kSigns | four << 7 & kRest, four & kSigns | four >> 1 & kRest};
}

#endif

// Factor for scores (with the scales of keys) or outputs (with those of values) of a head.
__device__ __forceinline__ float cached_unit(const float* __restrict__ scales, int head) {
#if FP8_CACHE
    return __ldg(scales + head) * kExpandedUnit;
#else
    return 1.0f;
#endif
}

#if FP8_CACHE
// Four adjacent elements of a query as fp16: the even ones and the odd ones.
__device__ __forceinline__ Expanded load_query(const Scalar* source) {
    constexpr float kMost = 65504.0f;
    const Vector<Scalar, 4> four = load_vector<Scalar, 4>(source);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = fminf(fmaxf(to_float(four[i]), -kMost), kMost);
    return {Tensor16<__half>::pack(x[0], x[2]), Tensor16<__half>::pack(x[1], x[3])};
}
#endif
