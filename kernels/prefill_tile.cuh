// The pieces of work of a prefill launch, as packed by runner_svc/attention/prefill_plan.py.
#pragma once

// Adjacent queries of one row, at most the kernel's tile size; each query head of a tile is one piece of work.
struct __align__(16) PrefillTile {
    int query;     // first row of the queries and the output
    int rows;
    int position;  // of the first query
    int first;     // first position that it sees
    int length;    // positions of the row, this step's included
    int table;     // row of the block tables
    int reserved[2];
};

__device__ __forceinline__ PrefillTile load_prefill_tile(const int* __restrict__ plan, int tile) {
    const int4* words = reinterpret_cast<const int4*>(plan + 8) + 2 * tile;
    int4 a = __ldg(words), b = __ldg(words + 1);
    return PrefillTile{a.x, a.y, a.z, a.w, b.x, b.y, {b.z, b.w}};
}

// The piece of work of one of `workers` in a round: pieces are sorted by work and dealt in alternating directions.
__device__ __forceinline__ int dealt_piece(int round, int worker, int workers) {
    int seat = round & 1 ? workers - 1 - worker : worker;
    return round * workers + seat;
}
