// Rounding of rows in bf16 to e4m3: a scale, and codes of x / scale. Defined by runner_svc/weights/activation_rounding.py.
//
// A row with a NaN or an infinity gets a NaN code, so all its products are NaN. Zero rows have the smallest scale.
#pragma once

#include "canonical_norm.cuh"

#ifndef CANONICAL
#define CANONICAL 0
#endif

#if __CUDA_ARCH__ < 890
#include <cuda_fp8.h>
#endif

constexpr float kLargestCode = 448.0f;
constexpr float kSmallestScale = 1.17549435e-38f;  // 2^-126: smaller ones are flushed to zero

// 16 adjacent numbers of a row, bf16.
struct Chunk {
    uint4 low;
    uint4 high;
};

// Loads 16 numbers from beyond L1: the kernel may have begun before they were written.
__device__ __forceinline__ Chunk load_chunk(const __nv_bfloat16* address, bool present) {
    if (!present) return {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    const uint4* words = reinterpret_cast<const uint4*>(address);
    return {__ldcg(words), __ldcg(words + 1)};
}

// Bits of the largest magnitude as bf16; a NaN is larger than all numbers.
__device__ __forceinline__ unsigned largest_bits(const Chunk& chunk) {
    const unsigned words[8] = {chunk.low.x,  chunk.low.y,  chunk.low.z,  chunk.low.w,
                               chunk.high.x, chunk.high.y, chunk.high.z, chunk.high.w};
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = __vmaxu2(most, words[i] & 0x7fff7fffu);
    return max(most >> 16, most & 0xffffu);
}

// Whether scales have a bound: infinity is none.
__device__ __forceinline__ bool is_bounded(float bound) { return bound < __uint_as_float(0x7f800000u); }

// The scale of numbers whose largest magnitude has these bits; larger ones than `bound` saturate.
__device__ __forceinline__ float scale_of(unsigned bits, float bound) {
    return fmaxf(fminf(__uint_as_float(bits << 16), bound) / kLargestCode, kSmallestScale);
}

// Four codes, the first in the lowest byte.
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    unsigned packed;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
#else
    const auto code = [](float x) -> unsigned { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); };
    return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
#endif
}

// x / scale, rounded correctly where nothing underflows; `inverse` is 1 / scale.
__device__ __forceinline__ float quotient(float x, float scale, float inverse) {
    const float near = x * inverse;
    return fmaf(fmaf(-near, scale, x), inverse, near);
}

// Four codes of factor * numbers / scale from two words of bf16.
__device__ __forceinline__ unsigned four_codes(unsigned low, unsigned high, float factor, float scale, float inverse) {
    const auto number = [&](unsigned bits) { return quotient(__uint_as_float(bits) * factor, scale, inverse); };
    return pack_e4m3(
        number(low << 16), number(low & 0xffff0000u), number(high << 16), number(high & 0xffff0000u));
}

__device__ __forceinline__ uint4 codes_of(const Chunk& chunk, float factor, float scale, float inverse) {
    return make_uint4(
        four_codes(chunk.low.x, chunk.low.y, factor, scale, inverse),
        four_codes(chunk.low.z, chunk.low.w, factor, scale, inverse),
        four_codes(chunk.high.x, chunk.high.y, factor, scale, inverse),
        four_codes(chunk.high.z, chunk.high.w, factor, scale, inverse));
}

// 1 / rms of row `row` by the sums of squares that its product left, [count, pitch]; 1 without them. Four adjacent lanes
// share a row, and all lanes of the warp must call it: the order of addition depends on `count` alone. With CANONICAL it is
// that of canonical_norm.cuh, with the same root.
__device__ __forceinline__ float inverse_rms(
    const float* squares, int count, int pitch, int row, float inverse_width, float eps) {
    float sum = 0.0f;
#pragma unroll 16
    for (int i = threadIdx.x % 4; i < count; i += 4) sum += __ldcg(squares + i * pitch + row);
    sum = lane_sum(sum, 4);
    if (CANONICAL) return squares ? inverse_rms(sum, inverse_width, eps) : 1.0f;
    return squares ? rsqrtf(sum * inverse_width + eps) : 1.0f;
}
