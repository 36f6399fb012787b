// gather_inputs.cu for rows that place_drafts.cu has resolved: a row may have fewer positions than places in the step.
// A thread per place; its row is found by bisection over the rows' offsets. A place without a position, like padding, has
// token 0 at position 0 of the dummy block 0.

#include "step_places.cuh"

extern "C" __global__ void gather_drafted(
    const int* slots,        // [rows]
    const int* firsts,       // [rows] first position of each row
    const int* present,      // [rows] positions of each row
    const int* offsets,      // [rows + 1] index of each row's first place in the step, then the number of places
    const int* token_buffer, // [slots, context_length]
    const int* block_tables, // [slots, max_blocks]
    int* tokens,             // [num_tokens] out
    int* positions,          // [num_tokens] out
    int* slot_mapping,       // [num_tokens] out: block * block_size + offset
    int num_rows,
    int num_tokens,
    int context_length,
    int max_blocks,
    int block_size) {
    wait_for_predecessors();
    release_successors();
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= num_tokens) return;
    const SlotTables tables{token_buffer, block_tables, context_length, max_blocks, block_size};
    int token = 0, position = 0, mapped = 0;
    if (index < offsets[num_rows]) {
        const int row = row_of(index, offsets, num_rows);
        const int place = index - offsets[row];
        if (place < present[row]) {
            const long long slot = slots[row];
            position = firsts[row] + place;
            token = tables.token(slot, position);
            mapped = tables.cached_at(slot, position);
        }
    }
    tokens[index] = token;
    positions[index] = position;
    slot_mapping[index] = mapped;
}
