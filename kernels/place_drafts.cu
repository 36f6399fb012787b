// Resolves the first positions of a step's rows and writes drafted tokens into the token buffer. A thread per row.
//
// A row with start -1 begins at its slot's last known token, by the counter of known tokens. Its drafts are the
// proposals before the first invalid id, cut so that the run stays within the row's limit, whatever the plan says. A row
// whose counter is beyond its limit has no position. This kernel and the gather wait before they release successors, so
// that later kernels may read `drafted` and the counters before they wait.

#include "vector.cuh"

extern "C" __global__ void place_drafts(
    const int* slots,     // [rows]
    const int* starts,    // [rows] first position, or -1
    const int* counts,    // [rows] positions; of a row with start -1, 1 + the most drafts
    const int* limits,    // [rows] greatest position that a token of the row may have
    const int* proposals, // [rows, stride], -1 behind a row's own; may be null if no row drafts
    const int* counters,  // [slots] known tokens
    int* token_buffer,    // [slots, context_length]
    int* firsts,          // [rows] out: first position of each row
    int* present,         // [rows] out: positions of each row that are computed
    int* drafted,         // [rows] out: drafts of each row
    int num_rows,
    int stride,
    int context_length,
    int vocab_size) {
    wait_for_predecessors();
    release_successors();
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= num_rows) return;
    int first = starts[row], count = counts[row], drafts = 0;
    if (first < 0) {
        const int slot = slots[row], known = counters[slot], limit = min(limits[row], context_length - 1);
        const bool fits = count > 0 && known >= 1 && known <= limit;
        first = fits ? known - 1 : 0;
        int* target = token_buffer + static_cast<long long>(slot) * context_length + known;
        const int most = fits && proposals ? min(min(count - 1, stride), limit - known) : 0;
        for (; drafts < most; ++drafts) {
            const int token = proposals[static_cast<long long>(row) * stride + drafts];
            if (static_cast<unsigned>(token) >= static_cast<unsigned>(vocab_size)) break;
            target[drafts] = token;
        }
        count = fits ? 1 + drafts : 0;
    }
    firsts[row] = first;
    present[row] = count;
    drafted[row] = drafts;
}
