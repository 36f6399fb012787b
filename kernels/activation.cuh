// Activations of gated MLPs, with the names of runner_svc/cuda/activation.py.
#pragma once

// The division's error of two units is far below 16-bit precision; for denominators beyond 2^126 it gives zero.
__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
__device__ inline float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
__device__ inline float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}
__device__ inline float quick_gelu(float x) { return __fdividef(x, 1.0f + __expf(-1.702f * x)); }
__device__ inline float relu(float x) { return fmaxf(x, 0.0f); }
__device__ inline float relu2(float x) { return relu(x) * relu(x); }
// x tanh(log(1 + e^x)).
__device__ inline float mish(float x) {
    const float e = expf(fminf(x, 20.0f)), grown = e * (e + 2.0f);
    return x * (grown / (grown + 2.0f));
}
