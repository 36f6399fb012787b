// Products of a warpgroup with a matrix in shared memory: m64nNk16 for N from 8 to 256.
#pragma once

#include "hopper.cuh"

#define WIDE_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WIDE_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WIDE_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WIDE_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WIDE_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WIDE_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WIDE_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WIDE_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define REGISTERS_WIDE_4 "%0, %1, %2, %3"
#define REGISTERS_WIDE_8 REGISTERS_WIDE_4 ", %4, %5, %6, %7"
#define REGISTERS_WIDE_12 REGISTERS_WIDE_8 ", %8, %9, %10, %11"
#define REGISTERS_WIDE_16 WIDE_0
#define REGISTERS_WIDE_24 WIDE_0 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_WIDE_32 WIDE_0 ", " WIDE_1
#define REGISTERS_WIDE_40 REGISTERS_WIDE_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGISTERS_WIDE_48 REGISTERS_WIDE_32 ", " WIDE_2
#define REGISTERS_WIDE_56 REGISTERS_WIDE_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGISTERS_WIDE_64 REGISTERS_WIDE_48 ", " WIDE_3
#define REGISTERS_WIDE_68 REGISTERS_WIDE_64 ", %64, %65, %66, %67"
#define REGISTERS_WIDE_72 REGISTERS_WIDE_68 ", %68, %69, %70, %71"
#define REGISTERS_WIDE_80 REGISTERS_WIDE_64 ", " WIDE_4
#define REGISTERS_WIDE_96 REGISTERS_WIDE_80 ", " WIDE_5
#define REGISTERS_WIDE_112 REGISTERS_WIDE_96 ", " WIDE_6
#define REGISTERS_WIDE_128 REGISTERS_WIDE_112 ", " WIDE_7

#define ACCUMULATORS_8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ACCUMULATORS_16(d, i) ACCUMULATORS_8(d, i), ACCUMULATORS_8(d, i + 8)
#define ACCUMULATORS_FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACCUMULATORS_WIDE_4(d) ACCUMULATORS_FOUR(d, 0)
#define ACCUMULATORS_WIDE_8(d) ACCUMULATORS_8(d, 0)
#define ACCUMULATORS_WIDE_12(d) ACCUMULATORS_8(d, 0), ACCUMULATORS_FOUR(d, 8)
#define ACCUMULATORS_WIDE_16(d) ACCUMULATORS_16(d, 0)
#define ACCUMULATORS_WIDE_24(d) ACCUMULATORS_16(d, 0), ACCUMULATORS_8(d, 16)
#define ACCUMULATORS_WIDE_32(d) ACCUMULATORS_16(d, 0), ACCUMULATORS_16(d, 16)
#define ACCUMULATORS_WIDE_40(d) ACCUMULATORS_WIDE_32(d), ACCUMULATORS_8(d, 32)
#define ACCUMULATORS_WIDE_48(d) ACCUMULATORS_WIDE_32(d), ACCUMULATORS_16(d, 32)
#define ACCUMULATORS_WIDE_56(d) ACCUMULATORS_WIDE_48(d), ACCUMULATORS_8(d, 48)
#define ACCUMULATORS_WIDE_64(d) ACCUMULATORS_WIDE_48(d), ACCUMULATORS_16(d, 48)
#define ACCUMULATORS_WIDE_68(d) ACCUMULATORS_WIDE_64(d), ACCUMULATORS_FOUR(d, 64)
#define ACCUMULATORS_WIDE_72(d) ACCUMULATORS_WIDE_64(d), ACCUMULATORS_8(d, 64)
#define ACCUMULATORS_WIDE_80(d) ACCUMULATORS_WIDE_64(d), ACCUMULATORS_16(d, 64)
#define ACCUMULATORS_WIDE_96(d) ACCUMULATORS_WIDE_80(d), ACCUMULATORS_16(d, 80)
#define ACCUMULATORS_WIDE_112(d) ACCUMULATORS_WIDE_96(d), ACCUMULATORS_16(d, 96)
#define ACCUMULATORS_WIDE_128(d) ACCUMULATORS_WIDE_112(d), ACCUMULATORS_16(d, 112)

// Products in which each thread has Count sums of d [64, 2 * Count].
template <typename Scalar, int Count>
struct Wgmma;

// `multiply`: d (+)= a [64, 16] * b [2 * Count, 16]^T, both in shared memory with k along the rows.
// `mix`: d (+)= a [64, 16] in registers * b [16, 2 * Count] in shared memory with k across the rows.
// `pin` prevents the compiler from moving uses of the sums above a wait.
// I0 to I5 are the numbers of the operands after the sums.
#define DEFINE_WGMMA(TYPE, NAME, COUNT, N, I0, I1, I2, I3, I4, I5)                                                   \
    template <>                                                                                                      \
    struct Wgmma<TYPE, COUNT> {                                                                                      \
        static __device__ __forceinline__ void multiply(float (&d)[COUNT], unsigned a, unsigned b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I2 ", 0;\n"                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                             \
                         " {" REGISTERS_WIDE_##COUNT "}, %" #I0 ", %" #I1 ", p, 1, 1, 0, 0;\n}"                      \
                         : ACCUMULATORS_WIDE_##COUNT(d)                                                              \
                         : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate));                     \
        }                                                                                                            \
        static __device__ __forceinline__ void mix(                                                                  \
            float (&d)[COUNT], const unsigned* a, unsigned b, int accumulate) {                                      \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #I5 ", 0;\n"                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                             \
                         " {" REGISTERS_WIDE_##COUNT "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4            \
                         ", p, 1, 1, 1;\n}"                                                                          \
                         : ACCUMULATORS_WIDE_##COUNT(d)                                                              \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole_descriptor(b)), "r"(accumulate));   \
        }                                                                                                            \
        static __device__ __forceinline__ void pin(float (&d)[COUNT]) {                                              \
            asm volatile("" : ACCUMULATORS_WIDE_##COUNT(d)::"memory");                                               \
        }                                                                                                            \
    };

#define DEFINE_WGMMAS(COUNT, N, ...)                             \
    DEFINE_WGMMA(__nv_bfloat16, "bf16", COUNT, N, __VA_ARGS__)   \
    DEFINE_WGMMA(__half, "f16", COUNT, N, __VA_ARGS__)

DEFINE_WGMMAS(4, 8, 4, 5, 6, 7, 8, 9)
DEFINE_WGMMAS(8, 16, 8, 9, 10, 11, 12, 13)
DEFINE_WGMMAS(12, 24, 12, 13, 14, 15, 16, 17)
DEFINE_WGMMAS(16, 32, 16, 17, 18, 19, 20, 21)
DEFINE_WGMMAS(24, 48, 24, 25, 26, 27, 28, 29)
DEFINE_WGMMAS(32, 64, 32, 33, 34, 35, 36, 37)
DEFINE_WGMMAS(40, 80, 40, 41, 42, 43, 44, 45)
DEFINE_WGMMAS(48, 96, 48, 49, 50, 51, 52, 53)
DEFINE_WGMMAS(56, 112, 56, 57, 58, 59, 60, 61)
DEFINE_WGMMAS(64, 128, 64, 65, 66, 67, 68, 69)
DEFINE_WGMMAS(68, 136, 68, 69, 70, 71, 72, 73)
DEFINE_WGMMAS(72, 144, 72, 73, 74, 75, 76, 77)
DEFINE_WGMMAS(80, 160, 80, 81, 82, 83, 84, 85)
DEFINE_WGMMAS(96, 192, 96, 97, 98, 99, 100, 101)
DEFINE_WGMMAS(112, 224, 112, 113, 114, 115, 116, 117)
DEFINE_WGMMAS(128, 256, 128, 129, 130, 131, 132, 133)
