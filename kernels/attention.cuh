// Shared parts of the attention kernels: scalar types, tensor-core fragments, asynchronous copies, softmax functions.
//
// Shapes and types are preprocessor macros (see runner_svc/attention/cuda_kernels.py); SCALAR is __nv_bfloat16 or
// __half. Scores are kept in log2 units, so that the exponential is one ex2 instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Replaces minus infinity in running maxima: its differences are finite or overflow to minus infinity, never NaN.
constexpr float kLowest = -1e30f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cap * tanh(score / cap) in log2 units; `scale` is the score's factor, without log2(e).
__device__ __forceinline__ float soft_capped(float score, float scale, float cap) {
    float doubled = exp2_approx(score * (2.0f * kLog2E * scale / cap));
    return cap * kLog2E * (1.0f - __fdividef(2.0f, 1.0f + doubled));
}

// A sink's weight in a softmax relative to `maximum`: it has a score, in log2 units, and no value.
__device__ __forceinline__ float sink_weight(const float* __restrict__ sinks, int head, float maximum) {
#if SINKS
    return exp2_approx(__ldg(sinks + head) - maximum);
#else
    return 0.0f;
#endif
}

template <typename Scalar>
struct Tensor16;  // tensor-core operations of a 16-bit type

template <>
struct Tensor16<__nv_bfloat16> {
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        unsigned packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    // c [16, 8] += a [16, 16] * b [16, 8]
    static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

template <>
struct Tensor16<__half> {
    static __device__ __forceinline__ unsigned pack(float low, float high) {
        unsigned packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&m)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// Transposes an 8x8 matrix held in fragments.
__device__ __forceinline__ unsigned transpose_matrix(unsigned m) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
    return transposed;
}

// An L2 policy for data that is read once.
__device__ __forceinline__ unsigned long long evict_first_policy() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ unsigned long long evict_normal_policy() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Arrives at a barrier of shared memory once the thread's copies so far are complete.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies 16 bytes; those beyond `valid_bytes` are not read and become zero.
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, int valid_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid_bytes) : "memory");
}

__device__ __forceinline__ void copy_async(
    unsigned shared, const void* global, int valid_bytes, unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
                 "l"(global),
                 "r"(valid_bytes),
                 "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of the committed groups are in flight.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Rows in shared memory, in 16-byte chunks swizzled such that the eight rows of a matrix are in different banks.
template <int RowBytes>
struct SwizzledRows {
    static_assert(RowBytes % 32 == 0, "chunks are exchanged within groups of at least two");
    static constexpr int kChunks = RowBytes / 16;
    static constexpr int kRowBytes = RowBytes;

    static __device__ __forceinline__ int offset(int row, int chunk) {
        int swizzle = RowBytes % 128 == 0 ? row & 7 : RowBytes % 64 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
        return row * kRowBytes + ((chunk ^ swizzle) << 4);
    }
};
