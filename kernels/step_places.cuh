// Places of a step: which row a place belongs to, and the token and cache position of a position of a slot.
#pragma once

#include "vector.cuh"

// Returns the row with offsets[row] <= place < offsets[row + 1], by bisection; place < offsets[num_rows].
__device__ __forceinline__ int row_of(int place, const int* offsets, int num_rows) {
    int row = 0, end = num_rows;
    while (end - row > 1) {
        const int middle = (row + end) / 2;
        if (offsets[middle] <= place) row = middle;
        else end = middle;
    }
    return row;
}

// Tokens and block tables by slot: [slots, context_length] and [slots, max_blocks].
struct SlotTables {
    const int* token_buffer;
    const int* block_tables;
    int context_length;
    int max_blocks;
    int block_size;

    __device__ __forceinline__ int token(long long slot, int position) const {
        return token_buffer[slot * context_length + position];
    }

    // block * block_size + offset
    __device__ __forceinline__ int cached_at(long long slot, int position) const {
        return block_tables[slot * max_blocks + position / block_size] * block_size + position % block_size;
    }
};
