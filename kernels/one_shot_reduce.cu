// out = the sum of all ranks' `in`, added in order of ranks in float32 and rounded once: the same bits on every rank,
// and of an element whatever stands beside it.
//
// Macros: SCALAR; RANKS; THREADS.

#include "one_shot.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) one_shot_reduce(
    const SCALAR* in,   // [num_vectors * 16 bytes]
    SCALAR* out,        // the same; may be `in`
    int num_vectors,
    int rank,
    const unsigned long long* windows,
    unsigned* turns,
    unsigned* broken,
    const unsigned* abort,
    unsigned* fault,
    long long half_bytes,
    long long limit_ns) {
    __shared__ int stopped;
    constexpr int WIDTH = 16 / sizeof(SCALAR);
    const Places places{windows, turns, broken, abort, fault, half_bytes, limit_ns};
    release_successors();
    wait_for_predecessors();
    const unsigned turn = begin_turn(places, &stopped);
    if (!turn) return;
    const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    uint4* own = reinterpret_cast<uint4*>(half_of(places, rank, turn));
    for (int i = first; i < num_vectors; i += step) own[i] = reinterpret_cast<const uint4*>(in)[i];
    if (!meet(places, rank, turn, &stopped)) return;
    const uint4* parts[RANKS];
#pragma unroll
    for (int p = 0; p < RANKS; ++p) parts[p] = reinterpret_cast<const uint4*>(half_of(places, p, turn));
    for (int i = first; i < num_vectors; i += step) {
        union {
            uint4 words;
            SCALAR values[WIDTH];
        } held[RANKS];
#pragma unroll
        for (int p = 0; p < RANKS; ++p) held[p].words = __ldcg(parts[p] + i);
        float sums[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            sums[j] = to_float(held[0].values[j]);
#pragma unroll
            for (int p = 1; p < RANKS; ++p) sums[j] += to_float(held[p].values[j]);
        }
        Vector<SCALAR, WIDTH> sum;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) sum[j] = from_float<SCALAR>(sums[j]);
        store_vector(out + static_cast<long long>(i) * WIDTH, sum);
    }
    end_turn(places, turn);
}
