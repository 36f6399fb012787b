// out = activation(gate) * up, from rows with gate and up side by side; 8 elements per thread.
//
// Macros: SCALAR; SIZE, elements of a row of `out`, a multiple of 8; ACTIVATION, one of the functions of
// activation.cuh.

#include "activation.cuh"
#include "vector.cuh"

extern "C" __global__ void activation_mul(
    const SCALAR* gate_up, // [tokens, 2 * SIZE]
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
        const SCALAR* gate_address = gate_up + row * (2 * SIZE) + (index - row * NUM_VECTORS) * 8;
        const auto gate = load_vector<SCALAR, 8>(gate_address);
        const auto up = load_vector<SCALAR, 8>(gate_address + SIZE);
        Vector<SCALAR, 8> result;
#pragma unroll
        for (int j = 0; j < 8; ++j) result[j] = from_float<SCALAR>(ACTIVATION(to_float(gate[j])) * to_float(up[j]));
        store_vector(out + index * 8, result);
    }
}
