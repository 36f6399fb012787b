// Draws a token per row of logits: a block per row, a few passes over it, no sort of the vocabulary.
//
// Greedy rows end after the first pass (argmax, finiteness). For other rows the token is argmax(scaled + noise) over
// the ids that top_k, top_p and min_p keep, where scaled = (logit - largest) / temperature. Tokens equal those of
// runner_svc/sampling/sampler.py up to rounding of logarithms and exponentials. Macros: LOGIT; VOCAB.

#include "gumbel.cuh"
#include "sample_record.cuh"
#include "truncation.cuh"

// Returns the largest logit's key; sets `least` to the least logit and `finite` if no logit is NaN or infinite and some
// id is allowed.
__device__ uint64 find_largest(const LOGIT* logits, Shared& shared, float& least, bool& finite) {
    float best = -infinity(), low = infinity();
    unsigned best_id = 0;
    bool ordered = true;
    for_each(logits, [&](float logit, unsigned id) {
        ordered &= logit == logit;
        low = fminf(low, logit);
        if (logit > best) {
            best = logit;
            best_id = id;
        }
    });
    const uint64 key = block_reduce(best_key(best, best_id), shared.reduced, Max());
    least = from_ordered_bits(~static_cast<unsigned>(block_reduce(~ordered_bits(low), shared.reduced, Max())));
    const float largest = from_ordered_bits(key >> 32);
    finite = __syncthreads_and(ordered) && least > -infinity() && largest < infinity();
    finite &= largest > to_float(lowest<LOGIT>()); // some id is not forbidden
    return key;
}

// Returns the best score among the first `size` ids of the list.
__device__ uint64 draw_from_list(unsigned size, float least_scaled, uint64 key, Shared& shared) {
    uint64 best = 0;
    for (unsigned i = threadIdx.x; i < size; i += THREADS) {
        const float scaled = key_scaled(shared.list[i]);
        const unsigned id = static_cast<unsigned>(shared.list[i]);
        if (scaled >= least_scaled) best = Max()(best, best_key(__fadd_rn(scaled, gumbel(noise_bits(key, id))), id));
    }
    return block_reduce(best, shared.reduced, Max());
}

// Returns the best score among all ids within the cut. Noise is computed only for ids that could beat the best score so
// far. Since noise >= n implies uniform <= exp(-n), one exponential for the largest of a few logits excludes nearly all
// of them.
__device__ uint64 draw_from_row(
    const LOGIT* logits, const Scale& scale, Cut cut, float least_scaled, uint64 key, unsigned largest_id,
    Shared& shared) {
    const float first_score = gumbel(noise_bits(key, largest_id));
    uint64 best = best_key(first_score, largest_id);
    __syncthreads();
    if (threadIdx.x == 0) shared.best_score = ordered_bits(first_score);
    __syncthreads();
    volatile unsigned* best_score = &shared.best_score; // a stale value only costs time
    const auto score = [&](float logit, unsigned id, unsigned bits) {
        const float scaled = scale.scaled(logit);
        if (!(scaled >= least_scaled)) return;
        const int bin = scale.bin(scaled);
        if (bin > cut.bin || (bin == cut.bin && sort_key(scaled, id) > cut.last_key)) return;
        const float sum = __fadd_rn(scaled, gumbel(bits));
        best = Max()(best, best_key(sum, id));
        if (ordered_bits(sum) > *best_score) atomicMax(&shared.best_score, ordered_bits(sum));
    };
    for_each_group(logits, [&](auto& values, unsigned id) {
        constexpr int SIZE = sizeof(values) / sizeof(float);
        float largest = values[0];
#pragma unroll
        for (int j = 1; j < SIZE; ++j) largest = fmaxf(largest, values[j]);
        const float lead = scale.roughly(largest) - from_ordered_bits(*best_score);
        const float most = 1.001f * 0x1p32f * __expf(lead);
        if (most < 0.5f) return; // the least uniform is 2 ** -33
        const unsigned most_bits = __float2uint_ru(most); // saturates
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
            const unsigned bits = noise_bits(key, id + j);
            if (bits <= most_bits) score(values[j], id + j, bits);
        }
    });
    return block_reduce(best, shared.reduced, Max());
}

// Returns the token of a row with a temperature.
__device__ unsigned draw(const LOGIT* logits, const SampleRecord& record, float largest, unsigned largest_id,
    float least, Shared& shared) {
    constexpr double UNLIMITED = 1e300;
    const Scale scale = make_scale(largest, least, record.temperature);
    const uint64 key = draw_key(record.seed, record.sample_index, record.position);
    const bool by_count = record.top_k > 0 && record.top_k < VOCAB, by_mass = record.top_p < 1.0f;
    Cut cut{BINS, EVERYTHING};
    unsigned listed = 0;
    if (by_count || by_mass) {
        build_histogram(logits, scale, shared);
        unsigned limit = shared.total_count;
        double mass = shared.total_mass;
        if (by_count) {
            limit = min(limit, record.top_k);
            cut = find_cut(logits, scale, limit, UNLIMITED, mass, listed, shared);
        }
        if (by_mass) cut = find_cut(logits, scale, limit, record.top_p * mass, mass, listed, shared);
    }
    const uint64 best = listed
        ? draw_from_list(listed, record.least_scaled, key, shared)
        : draw_from_row(logits, scale, cut, record.least_scaled, key, largest_id, shared);
    return ~static_cast<unsigned>(best);
}

extern "C" __global__ void __launch_bounds__(THREADS) sample(
    const LOGIT* all_logits,     // [rows, VOCAB]
    const SampleRecord* records, // [rows]
    int* token_buffer,           // [slots, context_length]; the token of a finite row is written at slot and position
    int* tokens,                 // [rows] out; -1 if not finite
    unsigned char* finite,       // [rows] out
    int context_length) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const SampleRecord record = records[blockIdx.x];
    const LOGIT* logits = all_logits + static_cast<long long>(blockIdx.x) * VOCAB;
    float least;
    bool finite_row;
    const uint64 largest_key = find_largest(logits, shared, least, finite_row);
    const float largest = from_ordered_bits(largest_key >> 32);
    unsigned token = ~static_cast<unsigned>(largest_key);
    if (finite_row && record.temperature > 0.0f) token = draw(logits, record, largest, token, least, shared);
    if (threadIdx.x != 0) return;
    tokens[blockIdx.x] = finite_row ? static_cast<int>(token) : -1;
    finite[blockIdx.x] = finite_row;
    if (finite_row && record.position < context_length) {
        token_buffer[static_cast<long long>(record.slot) * context_length + record.position] = token;
    }
}
