// Scalars, vectors of up to 16 bytes, reductions over a block, and programmatic dependent launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T> __device__ inline T from_float(float value);
template <> __device__ inline float from_float<float>(float value) { return value; }
template <> __device__ inline __half from_float<__half>(float value) { return __float2half_rn(value); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

__device__ inline float infinity() { return __int_as_float(0x7f800000); } // NVRTC has no macro for it
__device__ inline bool is_finite(float value) { return fabsf(value) < infinity(); }

template <typename T> __device__ inline T lowest(); // the least finite value
template <> __device__ inline float lowest<float>() { return __int_as_float(0xff7fffff); }
template <> __device__ inline __half lowest<__half>() { return __ushort_as_half(0xfbff); }
template <> __device__ inline __nv_bfloat16 lowest<__nv_bfloat16>() { return __ushort_as_bfloat16(0xff7f); }

// N elements that are loaded and stored at once; addresses must be multiples of the vector's size.
template <typename T, int N> struct alignas(sizeof(T) * N) Vector {
    T values[N];
    __device__ T& operator[](int index) { return values[index]; }
    __device__ const T& operator[](int index) const { return values[index]; }
};

template <typename T, int N> __device__ inline Vector<T, N> load_vector(const T* address) {
    return *reinterpret_cast<const Vector<T, N>*>(address);
}

template <typename T, int N> __device__ inline void store_vector(T* address, const Vector<T, N>& vector) {
    *reinterpret_cast<Vector<T, N>*>(address) = vector;
}

// Sums over groups of `lanes` (a power of two, at most 32) adjacent lanes. All lanes of the warp must call it.
__device__ inline float lane_sum(float value, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

// Sums over the block; all threads get the result. `scratch` has 32 floats; synchronise before it is used again.
__device__ inline float block_sum(float value, float* scratch) {
    value = lane_sum(value, 32);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    const int num_warps = (blockDim.x + 31) / 32;
    return lane_sum(threadIdx.x % 32 < num_warps ? scratch[threadIdx.x % 32] : 0.0f, 32);
}

// A kernel launched with `overlap` (runner_svc/cuda/kernel.py) must not access memory that earlier kernels of the
// stream write before wait_for_predecessors(). Without that launch attribute, or before sm_90, this function and
// release_successors() do nothing.
__device__ inline void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start. Everything that the next kernel accesses before its own wait must have been written
// before this kernel's predecessors. A kernel may release before it waits only if the kernels that bring in a step's
// data (copy_words.cu, scatter_segments.cu, gather_inputs.cu, which release after their wait) precede it.
__device__ inline void release_successors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
