// The part of CUDA that the tested kernels need, on a CPU: one block at a time, each thread a fiber.
//
// Fibers run in random order, tensor copies complete later and in any order, and products are computed when they are
// waited for: operations that a kernel does not order run in a different order with each seed. Shared memory starts as
// NaN. Not emulated: caches, the proxies that fences order, registers, time.
#pragma once

#include "fragments.hpp"
#include "launch.hpp"

#define threadIdx (emulator::current->index)
struct dim3 { unsigned x; };
#define blockIdx (dim3{emulator::block->index})
#define blockDim (dim3{static_cast<unsigned>(emulator::block->threads.size())})
#define gridDim (dim3{emulator::block->grid})
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __half2float(__half value) { return emulator::from_f16(value.bits); }
inline float __bfloat162float(__nv_bfloat16 value) { return emulator::from_bf16(value.bits); }
inline __half __float2half_rn(float value) { return {emulator::to_f16(value)}; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {emulator::to_bf16(value)}; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline float __int_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(bits); }
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
template <typename T> inline T __ldg(const T* address) { return *address; }
template <typename T> inline T __ldcg(const T* address) { return *address; }
template <typename T> inline T __ldcs(const T* address) { return *address; }
template <typename T> inline void __stcs(T* address, T value) { *address = value; }
inline int atomicAdd(int* address, int value) { return (*address += value) - value; }
inline unsigned atomicMax(unsigned* address, unsigned value) {
    unsigned old = *address;
    *address = std::max(old, value);
    return old;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffffu, b & 0xffffu);
}
inline void __threadfence() {}
template <typename T> inline T __shfl_sync(unsigned mask, T value, int lane) {
    return emulator::exchanged(mask, value, lane);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return emulator::exchanged(mask, value, emulator::lane() ^ distance);
}
inline bool __any_sync(unsigned mask, bool value) {
    emulator::check_whole(mask);
    bool any = false;
    unsigned turn = emulator::meet({value});
    for (auto& words : emulator::warp().values[turn]) any |= words[0] != 0;
    return any;
}
template <typename Combine> inline unsigned reduced(unsigned mask, unsigned value, Combine combine) {
    emulator::check_whole(mask);
    unsigned turn = emulator::meet({value}), result = value;
    for (auto& words : emulator::warp().values[turn]) result = combine(result, static_cast<unsigned>(words[0]));
    return result;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return reduced(mask, value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    return reduced(mask, value, [](unsigned a, unsigned b) { return std::min(a, b); });
}
inline void __syncwarp() { emulator::meet({}); }
inline void __syncthreads() { emulator::meet_named(0, static_cast<int>(emulator::block->threads.size())); }
inline size_t __cvta_generic_to_shared(const void* address) {
    return static_cast<const char*>(address) - emulator::block->shared + emulator::kSharedBase;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}
using std::max;
using std::min;
