// Applies penalties, bias, min_tokens and masks in place, to the rows that have any.
// The device's version of runner_svc/sampling/logit_adjustments.py.
//
// Occurrences of tokens are counted from the token buffer at each step, in a scratch row of the vocabulary that is zero
// before and after. The cost is proportional to the sequence's length, and no counts are kept or rebuilt between steps.
// The thread that resets a token's count adjusts its logit, so each occurring token is adjusted once. A forbidden id
// gets the lowest finite value, so that an infinity still indicates a broken forward pass.
// Macros: LOGIT; VOCAB.

#include "sample_record.cuh"
#include "vector.cuh"

constexpr unsigned IN_PROMPT = 1u << 31; // the other bits count the token in the output

__device__ void count_tokens(const SampleRecord& record, const int* tokens, unsigned* counts) {
    for (int i = threadIdx.x; i < record.position; i += blockDim.x) {
        if (static_cast<unsigned>(tokens[i]) >= VOCAB) continue;
        if (i < record.prompt_len) atomicOr(counts + tokens[i], IN_PROMPT);
        else atomicAdd(counts + tokens[i], 1u);
    }
}

__device__ float penalised(float logit, unsigned count, const SampleRecord& record) {
    if (record.repetition_penalty != 1.0f) {
        logit = logit > 0.0f ? logit / record.repetition_penalty : logit * record.repetition_penalty;
    }
    const unsigned outputs = count & ~IN_PROMPT;
    if (outputs == 0) return logit;
    // Rounded after each operation, as on the CPU.
    return __fsub_rn(logit, __fadd_rn(__fmul_rn(outputs, record.frequency_penalty), record.presence_penalty));
}

__device__ void apply_penalties(const SampleRecord& record, const int* tokens, unsigned* counts, LOGIT* logits) {
    for (int i = threadIdx.x; i < record.position; i += blockDim.x) {
        if (static_cast<unsigned>(tokens[i]) >= VOCAB) continue;
        const unsigned count = atomicExch(counts + tokens[i], 0u);
        if (count) logits[tokens[i]] = from_float<LOGIT>(penalised(to_float(logits[tokens[i]]), count, record));
    }
}

// No atomics: the ids of a row's bias are distinct.
__device__ void apply_bias(const SampleRecord& record, const int* ids, const float* values, LOGIT* logits) {
    for (int i = threadIdx.x; i < record.bias_count; i += blockDim.x) {
        const int id = ids[record.bias_start + i];
        logits[id] = from_float<LOGIT>(to_float(logits[id]) + values[record.bias_start + i]);
    }
}

__device__ void forbid(LOGIT& logit) {
    if (is_finite(to_float(logit))) logit = lowest<LOGIT>();
}

__device__ void forbid_stop_ids(const SampleRecord& record, const int* ids, LOGIT* logits) {
    for (int i = threadIdx.x; i < record.stop_count; i += blockDim.x) forbid(logits[ids[record.stop_start + i]]);
}

// A warp reads one word of the mask for its 32 logits.
__device__ void forbid_excluded(const unsigned* mask, LOGIT* logits) {
    for (int id = threadIdx.x; id < VOCAB; id += blockDim.x) {
        if (!(mask[id / 32] >> (id % 32) & 1u)) forbid(logits[id]);
    }
}

__device__ void adjust(const SampleRecord& record, const int* extra_ids, const float* extra_values, const int* tokens,
    unsigned* counts, LOGIT* logits) {
    if (record.repetition_penalty != 1.0f || record.presence_penalty != 0.0f || record.frequency_penalty != 0.0f) {
        count_tokens(record, tokens, counts);
        __syncthreads();
        apply_penalties(record, tokens, counts, logits);
        __syncthreads();
    }
    apply_bias(record, extra_ids, extra_values, logits);
    __syncthreads();
    if (record.position - record.prompt_len < static_cast<int>(record.min_tokens)) {
        forbid_stop_ids(record, extra_ids, logits);
    }
    __syncthreads();
}

extern "C" __global__ void adjust_logits(
    LOGIT* all_logits,           // [rows, VOCAB]
    const SampleRecord* records, // [rows]
    const int* extra_ids,
    const float* extra_values,
    const int* token_buffer,     // [slots, context_length]
    unsigned* scratch,           // [grid, VOCAB], zero
    const unsigned* masks,       // [rows, (VOCAB + 31) / 32], a bit per id, set where it is allowed; or null
    int num_rows,
    int context_length) {
    unsigned* counts = scratch + static_cast<long long>(blockIdx.x) * VOCAB;
    for (int row = blockIdx.x; row < num_rows; row += gridDim.x) {
        const SampleRecord record = records[row];
        LOGIT* logits = all_logits + static_cast<long long>(row) * VOCAB;
        const int* tokens = token_buffer + static_cast<long long>(record.slot) * context_length;
        if (record.adjusted) adjust(record, extra_ids, extra_values, tokens, counts, logits);
        if (masks) forbid_excluded(masks + static_cast<long long>(row) * ((VOCAB + 31) / 32), logits);
    }
}
