// Moves whole KV blocks between the cache, where a block has a piece in each of several parts (the keys or the values of
// a layer), and a staging buffer, where its pieces follow each other as in the host pool. A copy engine moves them
// between that and the host. A warp moves a piece, UNROLL vectors of 16 bytes a lane at once; few thread blocks suffice
// for a host's bandwidth and leave the others to the steps that compute meanwhile. GATHER 1: cache to staging; 0: back.

#include "vector.cuh"

#define LANES 32

extern "C" __global__ void __launch_bounds__(THREADS) move_blocks(
    int4* cache,             // the first part
    int4* staging,           // the first block's first piece of this region
    const int* ids,          // [num_blocks] blocks of the cache; may be page-locked host memory
    int num_blocks,
    int num_parts,
    int piece_vectors,
    long long part_vectors,  // from a part to the next, in the cache
    int stride_vectors) {    // from a block to the next, in the staging buffer
    const int lane = threadIdx.x % LANES, warps = THREADS / LANES;
    const int num_pieces = num_blocks * num_parts;
    for (int piece = blockIdx.x * warps + threadIdx.x / LANES; piece < num_pieces; piece += gridDim.x * warps) {
        const int block = piece / num_parts, part = piece % num_parts;
        int4* cached = cache + part * part_vectors + static_cast<long long>(ids[block]) * piece_vectors;
        int4* staged = staging + static_cast<long long>(block) * stride_vectors + static_cast<long long>(part) * piece_vectors;
        const int4* from = GATHER ? cached : staged;
        int4* to = GATHER ? staged : cached;
        for (int first = lane; first < piece_vectors; first += LANES * UNROLL) {
            int4 held[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                if (first + i * LANES < piece_vectors) held[i] = __ldcs(from + first + i * LANES);
            }
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                if (first + i * LANES < piece_vectors) __stcs(to + first + i * LANES, held[i]);
            }
        }
    }
}
