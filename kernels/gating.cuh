// What an expert makes of its gate and up: activation(gate) * up, or gpt-oss's clamped form.
//
// Macros: ACTIVATION, of activation.cuh; CLAMPED, 1 for the form below, whose ALPHA and LIMIT are floats.
#pragma once

#include "activation.cuh"

__device__ inline float gated(float gate, float up) {
#if CLAMPED
    gate = fminf(gate, LIMIT);
    up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return (up + 1.0f) * __fdividef(gate, 1.0f + __expf(-ALPHA * gate));
#else
    return ACTIVATION(gate) * up;
#endif
}
