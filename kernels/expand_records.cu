// Makes the sampler's record of each draw from the record of its row: `stride` draws a row, one after each position.
// A thread per draw. A draw without a position is greedy and not adjusted, so that it costs one pass over its logits.

#include "sample_record.cuh"

extern "C" __global__ void expand_records(
    const SampleRecord* records, // [rows of `rows`]; if its position is not negative, that of its only draw
    const int* rows,             // row of the step of each record
    const int* firsts,           // by row of the step: first position
    const int* present,          // by row of the step: positions
    SampleRecord* expanded,      // [draws] out; position 0: the draw is absent
    int num_draws,
    int stride) {
    const int draw = blockIdx.x * blockDim.x + threadIdx.x;
    if (draw >= num_draws) return;
    SampleRecord record = records[draw / stride];
    const int row = rows[draw / stride], place = draw % stride;
    const bool has_start = record.position >= 0;
    if (place > 0 || !has_start) {
        const bool is_here = !has_start && place < present[row];
        record.position = is_here ? firsts[row] + place + 1 : 0;
        if (!is_here) {
            record.temperature = 0.0f;
            record.adjusted = 0;
        }
    }
    expanded[draw] = record;
}
