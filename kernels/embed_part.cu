// Embeddings of tokens from a rank's part of the vocabulary; rows of other ranks' tokens are zeros. A block per token.
//
// Macros: SCALAR; WIDTH, elements of a row, a multiple of 8.

#include "vector.cuh"

extern "C" __global__ void embed_part(
    const int* tokens,         // [tokens]
    const SCALAR* embeddings,  // [count, WIDTH], of tokens from `begin` on
    SCALAR* out,               // [tokens, WIDTH]
    int begin,
    int count) {
    release_successors();
    wait_for_predecessors();
    const int place = tokens[blockIdx.x] - begin;
    const bool is_ours = place >= 0 && place < count;
    const SCALAR* source = embeddings + static_cast<long long>(is_ours ? place : 0) * WIDTH;
    SCALAR* target = out + blockIdx.x * static_cast<long long>(WIDTH);
    for (int vector = threadIdx.x; vector < WIDTH / 8; vector += blockDim.x) {
        Vector<SCALAR, 8> values;
        if (is_ours) {
            values = load_vector<SCALAR, 8>(source + vector * 8);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) values[j] = from_float<SCALAR>(0.0f);
        }
        store_vector(target + vector * 8, values);
    }
}
