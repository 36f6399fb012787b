// What the KV cache holds, and the operands that mma.sync kernels make of it.
//
// Without FP8_CACHE that is SCALAR itself. With it the cache holds e4m3 in the unit of a scale per head, and products
// are done in fp16, which holds every e4m3 exactly: queries and probabilities are rounded to fp16 (finer than bf16, of
// less range: queries beyond 65,504 are clipped). A 32-bit word of four elements becomes two words of two, the even and
// the odd ones, so that the order of dimensions within a step of 16 differs: see the kernels' fragments.
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

// What an expanded element is to be multiplied by.
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

// e4m3's fields, moved to where fp16 has them, mean 2^8 times less, denormals too; NaN becomes 480.
constexpr float kExpandedUnit = 256.0f;

__device__ __forceinline__ Expanded expand_e4m3(unsigned four) {
    constexpr unsigned kSigns = 0x80008000u, kRest = 0x3f803f80u;
    return {four << 8 & kSigns | four << 7 & kRest, four & kSigns | four >> 1 & kRest};
}

#endif

// What scores and outputs are to be multiplied by, for the head whose scale this is.
__device__ __forceinline__ float cached_unit(const float* __restrict__ scales, int head) {
#if FP8_CACHE
    return __ldg(scales + head) * kExpandedUnit;
#else
    return 1.0f;
#endif
}

#if FP8_CACHE
// Four neighbouring elements of a query as fp16: the even ones and the odd ones.
__device__ __forceinline__ Expanded load_query(const Scalar* source) {
    constexpr float kMost = 65504.0f;
    const Vector<Scalar, 4> four = load_vector<Scalar, 4>(source);
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = fminf(fmaxf(to_float(four[i]), -kMost), kMost);
    return {Tensor16<__half>::pack(x[0], x[2]), Tensor16<__half>::pack(x[1], x[3])};
}
#endif
