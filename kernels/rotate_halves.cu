// Rotary position embedding of queries and keys whose cosines and sines were computed elsewhere, in one launch.
//
// out[i] = x[i] * cos[i] - x[i + half] * sin[i] for the first half of a head, and
// out[i] = x[i] * cos[i] + x[i - half] * sin[i] for the second. Eight elements of each half per thread.
//
// Macros: SCALAR; HEADS, KV_HEADS; HEAD_DIM, a multiple of 16, all of which rotates.

#include "vector.cuh"

using Eight = Vector<SCALAR, 8>;

extern "C" __global__ void rotate_halves(
    const SCALAR* queries, long long query_token, long long query_head,  // strides in elements
    const SCALAR* keys, long long key_token, long long key_head,
    const SCALAR* cosines, const SCALAR* sines,  // [tokens, HEAD_DIM]
    SCALAR* out_queries,                         // [tokens, HEADS, HEAD_DIM]
    SCALAR* out_keys,                            // [tokens, KV_HEADS, HEAD_DIM]
    int num_tokens) {
    release_successors();
    wait_for_predecessors();
    constexpr int kHalf = HEAD_DIM / 2, kVectors = kHalf / 8, kAll = HEADS + KV_HEADS;
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= num_tokens * kAll * kVectors) return;
    const int element = index % kVectors * 8, head = index / kVectors % kAll, token = index / (kVectors * kAll);
    const bool is_query = head < HEADS;
    const SCALAR* source = is_query ? queries + token * query_token + head * query_head
                                    : keys + token * key_token + (head - HEADS) * key_head;
    SCALAR* target = is_query ? out_queries + (static_cast<long long>(token) * HEADS + head) * HEAD_DIM
                              : out_keys + (static_cast<long long>(token) * KV_HEADS + head - HEADS) * HEAD_DIM;
    const SCALAR* cosine = cosines + static_cast<long long>(token) * HEAD_DIM + element;
    const SCALAR* sine = sines + static_cast<long long>(token) * HEAD_DIM + element;
    const Eight low = load_vector<SCALAR, 8>(source + element), high = load_vector<SCALAR, 8>(source + element + kHalf);
    const Eight low_cosine = load_vector<SCALAR, 8>(cosine), high_cosine = load_vector<SCALAR, 8>(cosine + kHalf);
    const Eight low_sine = load_vector<SCALAR, 8>(sine), high_sine = load_vector<SCALAR, 8>(sine + kHalf);
    Eight low_out, high_out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float a = to_float(low[i]), b = to_float(high[i]);
        low_out[i] = from_float<SCALAR>(a * to_float(low_cosine[i]) - b * to_float(low_sine[i]));
        high_out[i] = from_float<SCALAR>(b * to_float(high_cosine[i]) + a * to_float(high_sine[i]));
    }
    store_vector(target + element, low_out);
    store_vector(target + element + kHalf, high_out);
}
