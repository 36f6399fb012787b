// A pass of a block over one row of logits, and reductions over the block.
//
// Macros: LOGIT; VOCAB, elements of a row.
#pragma once

#include "vector.cuh"

typedef unsigned long long uint64;

constexpr int THREADS = 1024;
constexpr int PER_LOAD = 16 / sizeof(LOGIT);
constexpr int LOADS = 4; // in flight per thread

// Maps floats to unsigned integers of the same order.
__device__ inline unsigned ordered_bits(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f); // -0 and 0 are equal
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float from_ordered_bits(unsigned bits) {
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// A key that is greater for greater values and, for equal values, for smaller ids.
__device__ inline uint64 best_key(float value, unsigned id) {
    return static_cast<uint64>(ordered_bits(value)) << 32 | ~id;
}

// Calls visit(logits, id) for the thread's share of the row; `logits` are those of ids from `id` on. Ids ascend.
template <typename Visit> __device__ inline void for_each_vector(const LOGIT* logits, Visit visit) {
    constexpr int NUM_VECTORS = VOCAB / PER_LOAD;
    for (int base = threadIdx.x; base < NUM_VECTORS; base += THREADS * LOADS) {
        Vector<LOGIT, PER_LOAD> loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int vector = base + i * THREADS;
            if (vector < NUM_VECTORS) loaded[i] = load_vector<LOGIT, PER_LOAD>(logits + vector * PER_LOAD);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int vector = base + i * THREADS;
            if (vector >= NUM_VECTORS) break;
            float values[PER_LOAD];
#pragma unroll
            for (int j = 0; j < PER_LOAD; ++j) values[j] = to_float(loaded[i][j]);
            visit(values, vector * PER_LOAD);
        }
    }
}

// The same for rows that are not aligned to vectors, one id at a time.
template <typename Visit> __device__ inline void for_each_single(const LOGIT* logits, Visit visit) {
#pragma unroll 4
    for (int id = threadIdx.x; id < VOCAB; id += THREADS) {
        float values[1] = {to_float(logits[id])};
        visit(values, id);
    }
}

template <typename Visit> __device__ inline void for_each_group(const LOGIT* logits, Visit visit) {
    if constexpr (VOCAB % PER_LOAD == 0) for_each_vector(logits, visit);
    else for_each_single(logits, visit);
}

// Calls visit(logit, id) for the thread's share of the row. Ids ascend.
template <typename Visit> __device__ inline void for_each(const LOGIT* logits, Visit visit) {
    for_each_group(logits, [&](auto& values, unsigned id) {
#pragma unroll
        for (int j = 0; j < sizeof(values) / sizeof(float); ++j) visit(values[j], id + j);
    });
}

struct Max {
    __device__ uint64 operator()(uint64 a, uint64 b) const { return a > b ? a : b; }
};
struct Sum {
    __device__ uint64 operator()(uint64 a, uint64 b) const { return a + b; }
};

// Combines the values of all threads; all threads get the result. `warp_values` has 32 elements.
template <typename Combine> __device__ uint64 block_reduce(uint64 value, uint64* warp_values, Combine combine) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(~0u, value, distance));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_values[threadIdx.x % 32];
    for (int distance = 16; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(~0u, value, distance));
    }
    return value;
}

// Sums the values of all threads before this one, in a fixed order; `total` is the sum of all. `warp_sums` has 32
// elements.
template <typename T> __device__ T exclusive_scan(T value, T* warp_sums, T& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T inclusive = value;
    for (int distance = 1; distance < 32; distance *= 2) {
        const T below = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += below;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i == warp) before = total;
        total += warp_sums[i];
    }
    T exclusive = __shfl_up_sync(~0u, inclusive, 1);
    return before + (lane ? exclusive : T(0));
}
