// out = activation(gate) * up, from rows that hold gate and up side by side; 8 elements a thread.
//
// Macros: SCALAR; SIZE, elements of a row of `out`, a multiple of 8; ACTIVATION, one of the functions below.

#include "vector.cuh"

__device__ inline float silu(float x) { return x / (1.0f + __expf(-x)); }
__device__ inline float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
__device__ inline float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}
__device__ inline float relu(float x) { return fmaxf(x, 0.0f); }

extern "C" __global__ void activation_mul(
    const SCALAR* gate_up, // [tokens, 2 * SIZE]
    SCALAR* out,           // [tokens, SIZE]
    int num_tokens) {
    wait_for_predecessors();
    release_successors();
    constexpr int NUM_VECTORS = SIZE / 8;
    const long long total = static_cast<long long>(num_tokens) * NUM_VECTORS;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    for (long long index = first; index < total; index += step) {
        const long long row = index / NUM_VECTORS;
        const SCALAR* gate_address = gate_up + row * (2 * SIZE) + (index - row * NUM_VECTORS) * 8;
        const auto gate = load_vector<SCALAR, 8>(gate_address);
        const auto up = load_vector<SCALAR, 8>(gate_address + SIZE);
        Vector<SCALAR, 8> result;
#pragma unroll
        for (int j = 0; j < 8; ++j) result[j] = from_float<SCALAR>(ACTIVATION(to_float(gate[j])) * to_float(up[j]));
        store_vector(out + index * 8, result);
    }
}
