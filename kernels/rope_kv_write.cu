// A layer's work between QKV product and attention in one pass: norm of queries and keys (if the model has it), rotation
// of the first ROTARY_DIM dimensions of both, and the write of keys and values into the paged cache.
//
// There is a block per token. LANES lanes share a head, and a lane has two vectors of it: dimensions i and
// i + ROTARY_DIM / 2, which rotate together, or two vectors that do not rotate.
// Macros: SCALAR; HEADS, KV_HEADS, HEAD_DIM; ROTARY_DIM, even, 0 for no rotation; VECTOR, elements of a vector, a
// divisor of ROTARY_DIM / 2 and (HEAD_DIM - ROTARY_DIM) / 2; LANES, a power of two, >= HEAD_DIM / (2 * VECTOR);
// QK_NORM, 1 for an RMS norm of each head, 2 for one of all query heads together and one of all key heads, 3 for a layer
// norm of each head, without bias; QK_PLUS_ONE, for factors of 1 + weight; FP8_CACHE, to store e4m3, divided by a scale
// per head; SCALED, for sums that are yet to be multiplied by scales (fp8_scale.cu), not with QK_NORM 2.

#include "vector.cuh"

#ifndef QK_PLUS_ONE
#define QK_PLUS_ONE 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#if FP8_CACHE
#include <cuda_fp8.h>
using CACHED = __nv_fp8_e4m3;
#else
using CACHED = SCALAR;
#endif

using Elements = Vector<SCALAR, VECTOR>;

__device__ inline void store_cached(CACHED* address, const Elements& elements, float inverse_scale) {
#if FP8_CACHE
    Vector<CACHED, VECTOR> cached;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) cached[j] = CACHED(to_float(elements[j]) * inverse_scale); // saturates
    store_vector(address, cached);
#else
    store_vector(address, elements);
#endif
}

#if SCALED
#if QK_NORM == 2
#error "an RMS norm of all heads takes no sums"
#endif
__device__ inline void scale_sums(Elements& elements, float factor, const float* scales) {
    constexpr int PART = VECTOR < 4 ? VECTOR : 4;
#pragma unroll
    for (int i = 0; i < VECTOR; i += PART) {
        const auto part = load_vector<float, PART>(scales + i);
#pragma unroll
        for (int j = 0; j < PART; ++j) elements[i + j] = from_float<SCALAR>(to_float(elements[i + j]) * factor * part[j]);
    }
}
#endif

__device__ inline float sum_of_squares(const Elements& elements) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) sum += to_float(elements[j]) * to_float(elements[j]);
    return sum;
}

__device__ inline float factor(SCALAR weight) {
#if QK_PLUS_ONE
    return 1.0f + to_float(weight);
#else
    return to_float(weight);
#endif
}

__device__ inline void normalise(Elements& elements, const SCALAR* weight, float scale) {
    const auto weights = load_vector<SCALAR, VECTOR>(weight);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        elements[j] = from_float<SCALAR>(to_float(elements[j]) * scale * factor(weights[j]));
    }
}

#if QK_NORM == 2
// 1 / rms of `width` elements that lie side by side, for all threads of the block.
__device__ inline float projection_scale(const SCALAR* row, int width, float* scratch, float eps) {
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width / VECTOR; i += blockDim.x) {
        squares += sum_of_squares(load_vector<SCALAR, VECTOR>(row + i * VECTOR));
    }
    return rsqrtf(block_sum(squares, scratch) / width + eps);
}
#endif

#if QK_NORM == 3
__device__ inline float sum(const Elements& elements) {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) total += to_float(elements[j]);
    return total;
}

__device__ inline float sum_of_squares(const Elements& elements, float mean) {
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        const float centred = to_float(elements[j]) - mean;
        total += centred * centred;
    }
    return total;
}

__device__ inline void normalise(Elements& elements, const SCALAR* weight, float mean, float scale) {
    const auto weights = load_vector<SCALAR, VECTOR>(weight);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
        elements[j] = from_float<SCALAR>((to_float(elements[j]) - mean) * scale * to_float(weights[j]));
    }
}
#endif

__device__ inline void rotate(Elements& first, Elements& second, const float* cosines, const float* sines) {
    // Float vectors of more than 16 bytes are loaded in parts of 16.
    constexpr int PART = VECTOR < 4 ? VECTOR : 4;
#pragma unroll
    for (int i = 0; i < VECTOR; i += PART) {
        const auto cosine = load_vector<float, PART>(cosines + i);
        const auto sine = load_vector<float, PART>(sines + i);
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            const float x = to_float(first[i + j]), y = to_float(second[i + j]);
            first[i + j] = from_float<SCALAR>(x * cosine[j] - y * sine[j]);
            second[i + j] = from_float<SCALAR>(y * cosine[j] + x * sine[j]);
        }
    }
}

extern "C" __global__ void rope_kv_write(
    const SCALAR* qkv,       // [tokens, HEADS + 2 * KV_HEADS, HEAD_DIM]
    SCALAR* queries,         // [tokens, HEADS, HEAD_DIM] with a row stride; may be `qkv` itself
    CACHED* cache,           // the layer's [2, positions, KV_HEADS, HEAD_DIM]
    const float* rotations,  // [rows, ROTARY_DIM]: cosines of the pairs, then their sines
    const int* rotation_rows, // [tokens] row of `rotations`: the position if that is a table over positions
    const int* slot_mapping, // [tokens] position in the cache
    const SCALAR* q_norm,    // [HEAD_DIM], or [HEADS, HEAD_DIM] with QK_NORM 2 and 3
    const SCALAR* k_norm,    // [HEAD_DIM], or [KV_HEADS, HEAD_DIM]
    const float* cache_scales, // [2, KV_HEADS] of keys and of values; FP8 elements are multiplied by it when read
    const float* factors,    // [tokens] of the sums, only if SCALED
    const float* scales,     // [HEADS + 2 * KV_HEADS, HEAD_DIM] of the sums, only if SCALED
    long long queries_stride, // elements between rows of `queries`
    long long values_offset, // elements from the cache's keys to its values
    float eps) {
    release_successors();
    wait_for_predecessors();
    constexpr int ROTATING = ROTARY_DIM / (2 * VECTOR);  // lanes of a head whose vectors rotate
    constexpr int ACTIVE = HEAD_DIM / (2 * VECTOR);      // lanes of a head that have vectors
    const long long token = blockIdx.x;
    const int lane = threadIdx.x % LANES;
    const bool active = lane < ACTIVE;
    // Dimensions of the lane's two vectors. An idle lane reads the same as lane 0 and stores nothing.
    const int pair = active ? lane : 0;
    const int first_dim = pair < ROTATING ? pair * VECTOR : ROTARY_DIM + (pair - ROTATING) * 2 * VECTOR;
    const int second_dim = first_dim + (pair < ROTATING ? ROTARY_DIM / 2 : VECTOR);
    const float* cosines = rotations + static_cast<long long>(ROTARY_DIM ? rotation_rows[token] : 0) * ROTARY_DIM;
    const long long position = slot_mapping[token];
#if SCALED
    const float factor_of_sums = factors[token];
#endif

#if QK_NORM == 2
    __shared__ float scratch[2][32];
    const SCALAR* row = qkv + token * (HEADS + 2 * KV_HEADS) * HEAD_DIM;
    const float query_scale = projection_scale(row, HEADS * HEAD_DIM, scratch[0], eps);
    const float key_scale = projection_scale(row + HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, scratch[1], eps);
#endif
    const int heads_at_once = blockDim.x / LANES;
    // All lanes of a warp take part: a head beyond the last repeats the last and is not stored.
    for (int base = 0; base < HEADS + 2 * KV_HEADS; base += heads_at_once) {
        const int index = base + threadIdx.x / LANES;
        const int head = min(index, HEADS + 2 * KV_HEADS - 1);
        const SCALAR* source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM;
        Elements first = load_vector<SCALAR, VECTOR>(source + first_dim);
        Elements second = load_vector<SCALAR, VECTOR>(source + second_dim);
#if SCALED
        scale_sums(first, factor_of_sums, scales + head * HEAD_DIM + first_dim);
        scale_sums(second, factor_of_sums, scales + head * HEAD_DIM + second_dim);
#endif
        const bool is_value = head >= HEADS + KV_HEADS;
#if QK_NORM == 2
        if (!is_value) {
            const SCALAR* weight = head < HEADS ? q_norm + head * HEAD_DIM : k_norm + (head - HEADS) * HEAD_DIM;
            const float scale = head < HEADS ? query_scale : key_scale;
            normalise(first, weight + first_dim, scale);
            normalise(second, weight + second_dim, scale);
        }
#elif QK_NORM == 3
        const float mean = lane_sum(active ? sum(first) + sum(second) : 0.0f, LANES) / HEAD_DIM;
        const float squares = active ? sum_of_squares(first, mean) + sum_of_squares(second, mean) : 0.0f;
        const float scale = rsqrtf(lane_sum(squares, LANES) / HEAD_DIM + eps);
        if (!is_value) {
            const SCALAR* weight = head < HEADS ? q_norm + head * HEAD_DIM : k_norm + (head - HEADS) * HEAD_DIM;
            normalise(first, weight + first_dim, mean, scale);
            normalise(second, weight + second_dim, mean, scale);
        }
#elif QK_NORM
        const float squares = active ? sum_of_squares(first) + sum_of_squares(second) : 0.0f;
        const float scale = rsqrtf(lane_sum(squares, LANES) / HEAD_DIM + eps);
        if (!is_value) {
            const SCALAR* weight = head < HEADS ? q_norm : k_norm;
            normalise(first, weight + first_dim, scale);
            normalise(second, weight + second_dim, scale);
        }
#endif
        if (!is_value && pair < ROTATING) {
            rotate(first, second, cosines + first_dim, cosines + ROTARY_DIM / 2 + first_dim);
        }
        if (index != head || !active) continue;
        if (head < HEADS) {
            SCALAR* target = queries + token * queries_stride + head * HEAD_DIM;
            store_vector(target + first_dim, first);
            store_vector(target + second_dim, second);
        } else {
            const int kv_head = (head - HEADS) % KV_HEADS;
            CACHED* target = cache + (is_value ? values_offset : 0) + (position * KV_HEADS + kv_head) * HEAD_DIM;
#if FP8_CACHE
            const float inverse_scale = 1.0f / cache_scales[head - HEADS];
#else
            const float inverse_scale = 1.0f;
#endif
            store_cached(target + first_dim, first, inverse_scale);
            store_cached(target + second_dim, second, inverse_scale);
        }
    }
}
