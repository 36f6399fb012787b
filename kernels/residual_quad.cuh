// The end of a product that is added to the residual stream.

#pragma once

#include "vector.cuh"

// Adds `values` to four elements of the residual stream, which are rounded; `values` become them times the next norm's
// weight. Returns the sum of their squares.
template <typename Scalar>
__device__ __forceinline__ float add_to_residual(
    Vector<float, 4>& values, Scalar* residual_place, const Scalar* norm_weight) {
    auto residual = load_vector<Scalar, 4>(residual_place);
    const auto weight = load_vector<Scalar, 4>(norm_weight);
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        residual[j] = from_float<Scalar>(to_float(residual[j]) + values[j]);
        const float rounded = to_float(residual[j]);
        squares += rounded * rounded;
        values[j] = rounded * to_float(weight[j]);
    }
    store_vector(residual_place, residual);
    return squares;
}
