// A warpgroup's product of e4m3 in shared memory, m64nNk32: rows of 128 bytes with 128-byte swizzle.
#pragma once

#include "wgmma.cuh"

// d [64, N] (+)= a [64, 32] * b [N, 32]^T, where `a`, `b` and `accumulate` are variables; A, B and P their numbers after
// the sums.
#define WGMMA_E4M3(SHAPE, REGISTERS, A, B, P, ...)                                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE               \
                 ".f32.e4m3.e4m3 {" REGISTERS "}, " A ", " B ", p, 1, 1;\n}"                                     \
                 : __VA_ARGS__                                                                                   \
                 : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate))
