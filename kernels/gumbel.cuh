// Noise of a draw, bit-identical, up to logarithms, to runner_svc/sampling/noise.py (splitmix64 keys) and
// runner_svc/sampling/gumbel.py.
#pragma once

__device__ inline unsigned long long mix64(unsigned long long value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

__device__ inline unsigned long long draw_key(unsigned long long seed, unsigned sample_index, int position) {
    constexpr unsigned long long GOLDEN = 0x9E3779B97F4A7C15ull;
    const unsigned long long mixed = mix64(seed + GOLDEN * (static_cast<unsigned long long>(position) + 1));
    return mix64(mixed ^ (GOLDEN * (static_cast<unsigned long long>(sample_index) + 1)));
}

__device__ inline unsigned lowbias32(unsigned value) {
    value = (value ^ (value >> 16)) * 0x7FEB352Du;
    value = (value ^ (value >> 15)) * 0x846CA68Bu;
    return value ^ (value >> 16);
}

// 32 uniform bits of a token id; small values give large noise.
__device__ inline unsigned noise_bits(unsigned long long key, unsigned id) {
    return lowbias32(lowbias32(id + static_cast<unsigned>(key)) ^ static_cast<unsigned>(key >> 32));
}

__device__ inline float noise_uniform(unsigned bits) {
    const float uniform = __fadd_rn(__fmul_rn(__uint2float_rn(bits), 0x1p-32f), 0x1p-33f);
    return fminf(uniform, 1.0f - 0x1p-24f);
}

// Standard Gumbel noise. Not inlined: the code is long, and few ids reach it.
__device__ __noinline__ float gumbel(unsigned bits) { return -logf(-log1pf(-noise_uniform(bits))); }
