// Computes a step's token ids, positions and cache positions from the plan's extents and the device's slots.
// A thread per position; its row is found by bisection over the rows' offsets.

#include "step_places.cuh"

extern "C" __global__ void gather_inputs(
    const int* slots,        // [rows]
    const int* starts,       // [rows] first position of each row
    const int* offsets,      // [rows + 1] index of each row's first position in the step, then the number of positions
    const int* token_buffer, // [slots, context_length]
    const int* block_tables, // [slots, max_blocks]
    int* tokens,             // [num_tokens] out
    int* positions,          // [num_tokens] out
    int* slot_mapping,       // [num_tokens] out: block * block_size + offset
    int num_rows,
    int num_tokens,          // indices from offsets[rows] on are padding: token 0 at position 0 of the dummy block 0
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
        const long long slot = slots[row];
        position = starts[row] + index - offsets[row];
        token = tables.token(slot, position);
        mapped = tables.cached_at(slot, position);
    }
    tokens[index] = token;
    positions[index] = position;
    slot_mapping[index] = mapped;
}
