// Proposes what followed the longest recent match of a row's last tokens. The device's version of
// runner_svc/drafting/ngram.py, whose proposals it has bit by bit. A block per row.
//
// The match that ends before position e has as many tokens as `tokens[:e]` and the known tokens share at their ends, at
// most MOST. The longest wins, of equal ones the latest. Only the last WINDOW known tokens are searched, and nothing at
// or beyond the counter is read. Macros: THREADS; MOST, at most 32; WINDOW.

#include "vector.cuh"

constexpr int PLACE_BITS = 26; // of a position; the matched length is above them

extern "C" __global__ void ngram_draft(
    const int* slots,        // [rows]
    const int* starts,       // [rows] -1 where the row drafts
    const int* counts,       // [rows] 1 + the most drafts of such a row
    const int* counters,     // [slots] known tokens
    const int* token_buffer, // [slots, context_length]
    int* proposals,          // [rows, stride] out, -1 behind a row's own
    int stride,
    int context_length) {
    __shared__ int suffix[MOST];
    __shared__ unsigned best;
    wait_for_predecessors();
    release_successors();
    const int row = blockIdx.x;
    const int wanted = starts[row] < 0 ? min(counts[row] - 1, stride) : 0;
    const long long slot = slots[row];
    const int known = wanted > 0 ? max(0, min(counters[slot], context_length)) : 0;
    const int* tokens = token_buffer + slot * context_length;
    const int begin = max(0, known - WINDOW);
    if (threadIdx.x == 0) best = 0;
    if (threadIdx.x < min(MOST, known - begin)) suffix[threadIdx.x] = tokens[known - 1 - threadIdx.x];
    __syncthreads();
    unsigned mine = 0;
    for (int end = begin + threadIdx.x + 1; end < known; end += THREADS) {
        const int most = min(MOST, end - begin);
        int matched = 0;
        while (matched < most && tokens[end - 1 - matched] == suffix[matched]) ++matched;
        if (matched) mine = max(mine, static_cast<unsigned>(matched) << PLACE_BITS | end);
    }
    if (mine) atomicMax(&best, mine);
    __syncthreads();
    const int end = static_cast<int>(best & ((1u << PLACE_BITS) - 1));
    for (int i = threadIdx.x; i < stride; i += THREADS) {
        const bool proposes = best && i < wanted;
        proposals[static_cast<long long>(row) * stride + i] = proposes ? tokens[end + i % (known - end)] : -1;
    }
}
