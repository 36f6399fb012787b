// out = activation(gate) * up, from rows with gate and up side by side; or activation(up); 8 elements per thread.
//
// Macros: SCALAR; SIZE, elements of a row of `out`, a multiple of 8; ACTIVATION, one of the functions of
// activation.cuh; GATED, 0 for rows of up alone.

#include "activation.cuh"
#include "vector.cuh"

#ifndef GATED
#define GATED 1
#endif

extern "C" __global__ void activation_mul(
    const SCALAR* gate_up, // [tokens, 2 * SIZE], or [tokens, SIZE]
    SCALAR* out,           // [tokens, SIZE]
    int num_tokens) {
    release_successors();
    wait_for_predecessors();
    constexpr int NUM_VECTORS = SIZE / 8;
    const long long total = static_cast<long long>(num_tokens) * NUM_VECTORS;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    for (long long index = first; index < total; index += step) {
        const long long row = index / NUM_VECTORS;
        const SCALAR* gate_address = gate_up + row * ((1 + GATED) * SIZE) + (index - row * NUM_VECTORS) * 8;
        const auto gate = load_vector<SCALAR, 8>(gate_address);
#if GATED
        const auto up = load_vector<SCALAR, 8>(gate_address + SIZE);
#endif
        Vector<SCALAR, 8> result;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float activated = ACTIVATION(to_float(gate[j]));
#if GATED
            result[j] = from_float<SCALAR>(activated * to_float(up[j]));
#else
            result[j] = from_float<SCALAR>(activated);
#endif
        }
        store_vector(out + index * 8, result);
    }
}
