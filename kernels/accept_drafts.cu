// Keeps the draws of each row up to and including the first one that differs from the draft at its position, writes them
// into the token buffer, and sets the slot's counter of known tokens. Nothing else writes these. A thread per row.
//
// Logits that are not finite end the run before them. A row's outcome is kept | drafted << 8 | status << 16, with the
// RowStatus of protos/plan.proto: 1 if its first logits are not finite, 2 if it has no position.

#include "sample_record.cuh"

constexpr int NOT_FINITE = 1, FAILED = 2;

extern "C" __global__ void accept_drafts(
    const SampleRecord* records, // [rows * stride] by draw: position 0 is absent; `reserved`: the row is drawn again later
    const int* draws,            // [rows * stride]
    const unsigned char* finite, // [rows * stride]
    int* token_buffer,           // [slots, context_length]: a draft is where its draw will be
    int* counters,               // [slots] known tokens
    int* outcomes,               // [rows] out
    int num_rows,
    int stride,
    int context_length) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= num_rows) return;
    const int begin = row * stride;
    const SampleRecord record = records[begin];
    int drafted = 0;
    while (drafted + 1 < stride && records[begin + drafted + 1].position > 0) ++drafted;
    int* target = token_buffer + static_cast<long long>(record.slot) * context_length + record.position;
    int kept = 0;
    if (record.position > 0) {
        for (bool equal = true; equal && kept <= drafted && finite[begin + kept]; ++kept) {
            equal = kept < drafted && draws[begin + kept] == target[kept];
        }
    }
    outcomes[row] = kept | drafted << 8 | (kept ? 0 : record.position > 0 ? NOT_FINITE : FAILED) << 16;
    if (!kept || record.reserved) return;
    for (int i = 0; i < kept && record.position + i < context_length; ++i) target[i] = draws[begin + i];
    counters[record.slot] = min(record.position + kept, context_length);
}
