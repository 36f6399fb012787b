// Pairs of 4-bit codes as pairs of 16-bit numbers, exactly: a code is the last bits of a power of two plus the code.
#pragma once

#include "attention.cuh"
#include "vector.cuh"

// That power of two: 128 or 1024.
template <typename Scalar> constexpr unsigned kPower = 0x4300;
template <> constexpr unsigned kPower<__half> = 0x6400;

// The codes at bits 0 and 16 of a word, added to the power. In C++, the compiler would make two instructions of it.
template <typename Scalar>
__device__ __forceinline__ unsigned raised(unsigned word) {
    unsigned pair;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(0x000f000f), "r"(kPower<Scalar> * 0x10001));
    return pair;
}

// A code, twice, added to the power.
template <typename Scalar>
__device__ __forceinline__ unsigned raised_twice(unsigned code) {
    return (code | kPower<Scalar>) * 0x10001;
}

template <typename Scalar>
__device__ __forceinline__ unsigned minus(unsigned pair, unsigned other) {
    unsigned difference;
    if constexpr (kPower<Scalar> == kPower<__half>) {
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(pair), "r"(other));
    } else {
        asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(pair), "r"(other));
    }
    return difference;
}

// 128 or 1024, to which codes are added, and a pair of ones.
template <typename Scalar> constexpr float kBase = 128.0f;
template <> constexpr float kBase<__half> = 1024.0f;
template <typename Scalar> constexpr unsigned kOnes = 0x3f803f80;
template <> constexpr unsigned kOnes<__half> = 0x3c003c00;

// A pair of codes that are added to the power, as (code - zero) * scale, rounded once.
template <typename Scalar, typename Scale>
__device__ __forceinline__ unsigned scaled(unsigned pair, unsigned char zero, Scale scale) {
    const auto codes = *reinterpret_cast<const Vector<Scalar, 2>*>(&pair);
    const float offset = kBase<Scalar> + zero, factor = to_float(scale);
    float numbers[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (sizeof(Scale) == 2) {  // offset * factor has few bits, and is exact
            numbers[i] = fmaf(to_float(codes[i]), factor, -offset * factor);
        } else {
            numbers[i] = (to_float(codes[i]) - offset) * factor;
        }
    }
    return Tensor16<Scalar>::pack(numbers[0], numbers[1]);
}
