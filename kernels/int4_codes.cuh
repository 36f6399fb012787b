// Pairs of 4-bit codes as pairs of 16-bit numbers, exactly: a code is the last bits of a power of two plus the code.
#pragma once

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

template <typename First, typename Second> constexpr bool kSame = false;
template <typename Type> constexpr bool kSame<Type, Type> = true;

// A pair of whole numbers times a scale, rounded once.
template <typename Scalar, typename Scale>
__device__ __forceinline__ unsigned times(unsigned pair, Scale scale) {
    unsigned product;
    if constexpr (kSame<Scalar, Scale>) {
        const unsigned twice = *reinterpret_cast<const unsigned short*>(&scale) * 0x10001u;
        if constexpr (kSame<Scalar, __half>) {
            asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(twice));
        } else {
            asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(twice));
        }
    } else {
        const auto numbers = *reinterpret_cast<const Vector<Scalar, 2>*>(&pair);
        const Vector<Scalar, 2> rounded{{from_float<Scalar>(to_float(numbers[0]) * to_float(scale)),
                                         from_float<Scalar>(to_float(numbers[1]) * to_float(scale))}};
        product = *reinterpret_cast<const unsigned*>(&rounded);
    }
    return product;
}
