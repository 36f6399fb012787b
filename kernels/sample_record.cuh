// One sampling row, as packed by runner_svc/sampling/sample_records.py (SAMPLE_RECORD: same fields in the same order).
#pragma once

struct SampleRecord {
    unsigned long long seed;
    unsigned sample_index;
    int prompt_len;
    float temperature;  // 0 is greedy
    unsigned top_k;     // 0 keeps all
    float top_p;        // 1 keeps all
    float least_scaled; // log(min_p)
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    unsigned min_tokens;
    int slot;     // row of the token buffer
    int position; // of the token to draw
    int bias_start, bias_count; // range of the extra ids and values
    int stop_start, stop_count; // range of the extra ids
    int adjusted; // some penalty, bias or min_tokens is set
    int reserved;
};
