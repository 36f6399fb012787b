// Embeddings of a step's tokens as input of skinny_product.cu: the residual stream, its product with the first norm's
// weight, and its sum of squares. A block per token.
//
// Macros: SCALAR; WIDTH, elements of a row, a multiple of 8.

#include "vector.cuh"

extern "C" __global__ void embed(
    const int* tokens,          // [tokens]
    const SCALAR* embeddings,   // [vocabulary, WIDTH]
    const SCALAR* norm_weight,  // [WIDTH]
    SCALAR* residual,           // [tokens, WIDTH] out
    SCALAR* out,                // [tokens, WIDTH] out
    float* squares) {           // [tokens] out
    __shared__ float scratch[32];
    release_successors();
    wait_for_predecessors();
    const SCALAR* source = embeddings + static_cast<long long>(tokens[blockIdx.x]) * WIDTH;
    const long long target = blockIdx.x * static_cast<long long>(WIDTH);
    float sum = 0.0f;
    for (int vector = threadIdx.x; vector < WIDTH / 8; vector += blockDim.x) {
        const auto values = load_vector<SCALAR, 8>(source + vector * 8);
        const auto weights = load_vector<SCALAR, 8>(norm_weight + vector * 8);
        Vector<SCALAR, 8> normed;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float value = to_float(values[j]);
            sum += value * value;
            normed[j] = from_float<SCALAR>(value * to_float(weights[j]));
        }
        store_vector(residual + target + vector * 8, values);
        store_vector(out + target + vector * 8, normed);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}
