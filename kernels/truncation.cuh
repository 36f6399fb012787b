// Truncation by top_k and top_p: the prefix of a row's ids to keep, ordered by descending `scaled`, then ascending id.
//
// A histogram over linear bins of `scaled` determines the bin in which the prefix ends. It has counts, and masses as
// integers, so that their sum does not depend on the order. If few ids are in the bins up to there, they are sorted in
// shared memory; otherwise only the ids of that bin are. A bin with too many ids (ties) is bisected.
//
// An id with scaled < LOWEST can't win: its score is below the least score of the largest logit, as the noise is
// between -2.82 and 22.9. Such ids are ignored everywhere.
#pragma once

#include "row_pass.cuh"

constexpr int BINS = 2048;     // two per thread
constexpr int CAPACITY = 4096; // maximum number of ids sorted in shared memory
constexpr float LOWEST = -26.0f;
constexpr float FIXED_ONE = 16777216.0f; // a weight of 1 relative to its bin, as an integer
constexpr uint64 EVERYTHING = ~0ull;

struct Shared {
    uint64 list[CAPACITY];    // sort_key of the gathered ids
    double mass_before[BINS]; // of earlier bins; during the histogram, the bins' two words of fixed-point mass
    unsigned counts[BINS];
    unsigned count_before[BINS];
    uint64 reduced[32];
    double scanned_mass[32];
    unsigned scanned_count[32];
    double total_mass;
    unsigned total_count, list_size, best_score;
    int cut_bin;
};

// Parameters of a row's scaled logits.
struct Scale {
    float largest, temperature, inverse_temperature;
    float bins_per_unit, bin_width;

    __device__ float scaled(float logit) const { return __fdiv_rn(logit - largest, temperature); }
    // The same without the division, to skip most ids.
    __device__ float roughly(float logit) const { return (logit - largest) * inverse_temperature; }
    // Lower bound of `roughly` for the ids of this bin and earlier ones.
    __device__ float floor(int bin) const { return -1.00001f * (bin + 1) * bin_width - 1e-5f; }
    // BINS or more for ids that can't win.
    __device__ int bin(float scaled) const { return static_cast<int>(-scaled * bins_per_unit); }
    // exp(scaled) relative to exp(-bin * bin_width), in fixed point; the exponent is within a bin's width of 0.
    __device__ unsigned fixed_weight(float scaled, int bin) const {
        const float x = __fmaf_rn(bin, bin_width, scaled);
        return static_cast<unsigned>((1.0f + x * (1.0f + x * (0.5f + x * (1.0f / 6.0f)))) * FIXED_ONE);
    }
    __device__ double bin_mass(int bin, uint64 fixed) const {
        return static_cast<double>(fixed) / FIXED_ONE * exp(-static_cast<double>(bin) * bin_width);
    }
};

__device__ Scale make_scale(float largest, float least, float temperature) {
    Scale scale{largest, temperature, 1.0f / temperature, 0.0f, 0.0f};
    const float span = -fmaxf(LOWEST, scale.scaled(least));
    if (span > 1e-30f) scale.bins_per_unit = (BINS - 1) / span;
    if (scale.bins_per_unit > 0.0f) scale.bin_width = 1.0f / scale.bins_per_unit;
    return scale;
}

// The kept prefix: the bins before `bin`, and the ids of `bin` up to `last_key`.
struct Cut {
    int bin;
    uint64 last_key;
};

// Ascends with descending `scaled` (which is never positive), then with ascending ids.
__device__ inline uint64 sort_key(float scaled, unsigned id) {
    return static_cast<uint64>(__float_as_uint(fabsf(scaled))) << 32 | id;
}

__device__ inline float key_scaled(uint64 key) { return -__uint_as_float(static_cast<unsigned>(key >> 32)); }

__device__ void build_histogram(const LOGIT* logits, const Scale& scale, Shared& shared) {
    unsigned* low_words = reinterpret_cast<unsigned*>(shared.mass_before);
    unsigned* high_words = low_words + BINS;
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared.counts[i] = low_words[i] = high_words[i] = 0;
    __syncthreads();
    const float floor = scale.floor(BINS - 1);
    for_each(logits, [&](float logit, unsigned) {
        if (scale.roughly(logit) < floor) return;
        const float scaled = scale.scaled(logit);
        const int bin = scale.bin(scaled);
        if (bin >= BINS) return;
        const unsigned weight = scale.fixed_weight(scaled, bin);
        atomicAdd(shared.counts + bin, 1u);
        if (atomicAdd(low_words + bin, weight) > ~weight) atomicAdd(high_words + bin, 1u);
    });
    __syncthreads();
    double masses[2];
    const int first = threadIdx.x * 2;
    for (int i = 0; i < 2; ++i) {
        const uint64 fixed = static_cast<uint64>(high_words[first + i]) << 32 | low_words[first + i];
        masses[i] = scale.bin_mass(first + i, fixed);
    }
    unsigned total_count;
    double total_mass;
    const unsigned own = shared.counts[first] + shared.counts[first + 1];
    const unsigned count = exclusive_scan(own, shared.scanned_count, total_count);
    const double mass = exclusive_scan(masses[0] + masses[1], shared.scanned_mass, total_mass); // synchronises
    shared.count_before[first] = count;
    shared.count_before[first + 1] = count + shared.counts[first];
    shared.mass_before[first] = mass;
    shared.mass_before[first + 1] = mass + masses[0];
    shared.total_count = total_count;
    shared.total_mass = total_mass;
    __syncthreads();
}

// Returns the last non-empty bin with fewer than `limit` ids and less than `target` mass in the bins before it.
__device__ int find_bin(unsigned limit, double target, Shared& shared) {
    __syncthreads();
    if (threadIdx.x == 0) shared.cut_bin = 0;
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        if (shared.counts[bin] && shared.count_before[bin] < limit && shared.mass_before[bin] < target) {
            atomicMax(&shared.cut_bin, bin);
        }
    }
    __syncthreads();
    return shared.cut_bin;
}

// Collects the ids of these bins, at most CAPACITY, in the list and sorts it.
__device__ void gather(const LOGIT* logits, const Scale& scale, int first_bin, int last_bin, Shared& shared) {
    __syncthreads();
    if (threadIdx.x == 0) shared.list_size = 0;
    __syncthreads();
    const float floor = scale.floor(last_bin);
    for_each(logits, [&](float logit, unsigned id) {
        if (scale.roughly(logit) < floor) return;
        const float scaled = scale.scaled(logit);
        const int bin = scale.bin(scaled);
        if (bin >= first_bin && bin <= last_bin) shared.list[atomicAdd(&shared.list_size, 1u)] = sort_key(scaled, id);
    });
    __syncthreads();
    const int size = shared.list_size;
    int padded = 1;
    while (padded < size) padded *= 2;
    for (int i = size + threadIdx.x; i < padded; i += THREADS) shared.list[i] = EVERYTHING;
    __syncthreads();
    for (int run = 2; run <= padded; run *= 2) { // bitonic
        for (int distance = run / 2; distance > 0; distance /= 2) {
            for (int i = threadIdx.x; i < padded / 2; i += THREADS) {
                const int low = 2 * i - i % distance, high = low + distance;
                const uint64 a = shared.list[low], b = shared.list[high];
                if ((a > b) == ((low & run) == 0)) {
                    shared.list[low] = b;
                    shared.list[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

// Returns how many of the first `limit` ids of the list have less than `target` mass before them; `mass` is the mass
// before the list. Sets `total` to the mass of these `limit` ids plus `mass`.
__device__ unsigned measure_list(unsigned limit, double mass, double target, double& total, Shared& shared) {
    constexpr int OWN = CAPACITY / THREADS;
    const unsigned first = threadIdx.x * OWN;
    double weights[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        weights[i] = first + i < limit ? static_cast<double>(expf(key_scaled(shared.list[first + i]))) : 0.0;
        own += weights[i];
    }
    double before = mass + exclusive_scan(own, shared.scanned_mass, total);
    total += mass;
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        kept += first + i < limit && before < target;
        before += weights[i];
    }
    return static_cast<unsigned>(block_reduce(kept, shared.reduced, Sum()));
}

// Returns the count and sets `mass` to the mass of the ids of `bin` whose key is below `key`.
__device__ unsigned measure_bin(
    const LOGIT* logits, const Scale& scale, int bin, uint64 key, double& mass, Shared& shared) {
    uint64 count = 0, fixed = 0;
    const float floor = scale.floor(bin);
    for_each(logits, [&](float logit, unsigned id) {
        if (scale.roughly(logit) < floor) return;
        const float scaled = scale.scaled(logit);
        if (scale.bin(scaled) != bin || sort_key(scaled, id) >= key) return;
        ++count;
        fixed += scale.fixed_weight(scaled, bin);
    });
    mass = scale.bin_mass(bin, block_reduce(fixed, shared.reduced, Sum()));
    return static_cast<unsigned>(block_reduce(count, shared.reduced, Sum()));
}

// Returns the greatest key with fewer than `limit` ids of the bin, and less than `target` mass of all ids, below it.
__device__ uint64 bisect_bin(
    const LOGIT* logits, const Scale& scale, int bin, unsigned limit, double target, Shared& shared) {
    uint64 low = 0, high = sort_key(LOWEST - 1.0f, 0); // low is within, high is not
    while (high - low > 1) {
        const uint64 middle = low + (high - low) / 2;
        double mass;
        const unsigned count = measure_bin(logits, scale, bin, middle, mass, shared);
        if (count < limit && shared.mass_before[bin] + mass < target) low = middle;
        else high = middle;
    }
    return low;
}

// Returns the end of the prefix of at most `limit` ids that have less than `target` mass before them. Sets `mass` to
// the mass of the prefix with only the limit applied. If the list has the whole prefix, sets `listed` to its size. If
// it is already set, by a call with the same limit, the list's prefix is only shortened.
__device__ Cut find_cut(
    const LOGIT* logits, const Scale& scale, unsigned limit, double target, double& mass, unsigned& listed,
    Shared& shared) {
    if (listed) {
        listed = max(1u, measure_list(listed, 0.0, target, mass, shared));
        return {0, 0};
    }
    const int bin = find_bin(limit, target, shared);
    const unsigned through = shared.count_before[bin] + shared.counts[bin];
    const int first_bin = through <= CAPACITY ? 0 : bin;
    if (shared.counts[bin] > CAPACITY) {
        const unsigned limit_in_bin = limit - shared.count_before[bin];
        const uint64 key = bisect_bin(logits, scale, bin, limit_in_bin, target, shared);
        measure_bin(logits, scale, bin, key + 1, mass, shared);
        mass += shared.mass_before[bin];
        return {bin, key};
    }
    gather(logits, scale, first_bin, bin, shared);
    const unsigned in_list = min(limit - shared.count_before[first_bin], shared.list_size);
    const double before = shared.mass_before[first_bin];
    const unsigned kept = max(1u, measure_list(in_list, before, target, mass, shared));
    if (first_bin == 0) listed = kept;
    return {bin, shared.list[kept - 1]};
}
