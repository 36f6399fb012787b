// out = all ranks' rows side by side in order of ranks, cut to `width` columns: logits of a head that is divided by
// vocabulary. Elements have 4 bytes.
//
// Macros: VECTOR, words that are copied at once (4, 2 or 1), which divide all widths; RANKS; THREADS.

#include "one_shot.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) one_shot_gather(
    const unsigned* in,  // [rows, columns]
    unsigned* out,       // [rows, width]
    int rows,
    int columns,
    int width,
    int rank,
    const unsigned long long* windows,
    unsigned* turns,
    unsigned* broken,
    const unsigned* abort,
    unsigned* fault,
    long long half_bytes,
    long long limit_ns) {
    using Piece = Vector<unsigned, VECTOR>;
    __shared__ int stopped;
    const Places places{windows, turns, broken, abort, fault, half_bytes, limit_ns};
    release_successors();
    wait_for_predecessors();
    const unsigned turn = begin_turn(places, &stopped);
    if (!turn) return;
    const int pieces = columns / VECTOR, count = rows * pieces;
    const int first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    Piece* own = reinterpret_cast<Piece*>(half_of(places, rank, turn));
    for (int i = first; i < count; i += step) own[i] = reinterpret_cast<const Piece*>(in)[i];
    if (!meet(places, rank, turn, &stopped)) return;
#pragma unroll
    for (int p = 0; p < RANKS; ++p) {
        const unsigned* part = reinterpret_cast<const unsigned*>(half_of(places, p, turn));
        for (int i = first; i < count; i += step) {
            const int row = i / pieces, column = p * columns + i % pieces * VECTOR;
            if (column >= width) continue;
            Piece piece;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) piece[j] = __ldcg(part + static_cast<long long>(i) * VECTOR + j);
            store_vector(out + static_cast<long long>(row) * width + column, piece);
        }
    }
    end_turn(places, turn);
}
