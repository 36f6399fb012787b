// Activations of gated MLPs, with the names of runner_svc/cuda/activation.py.
#pragma once

// The division's error of two units is far below 16-bit precision; for denominators beyond 2^126 it gives zero.
__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
__device__ inline float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
__device__ inline float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}
__device__ inline float relu(float x) { return fmaxf(x, 0.0f); }
