// Draws a token per row of logits: a block a row, a handful of passes over it, no sort of the vocabulary.
//
// Greedy rows end after the first pass (argmax, finiteness). The others are argmax(scaled + noise) over the ids that
// top_k, top_p and min_p keep, where scaled = (logit - largest) / temperature: see runner_svc/sampler.py, whose tokens
// these are up to rounding of logarithms and exponentials.
//
// Truncation keeps a prefix of the ids in the order of falling `scaled`, then rising id. A histogram over linear bins of
// `scaled` (counts, and masses as integers so that their sum does not depend on the order) says in which bin the prefix
// ends. If few ids lie up to there, they are sorted in shared memory and all is decided among them; otherwise only the
// ids of that bin are, and one more pass draws from all that are kept. A bin with too many ids (ties) is bisected.
//
// An id with scaled < LOWEST can't win: its score is below the least score of the largest logit, as the noise lies
// between -2.82 and 22.9. Such ids are left out everywhere.
// Macros: LOGIT; VOCAB.

#include "gumbel.cuh"
#include "sample_record.cuh"
#include "vector.cuh"

typedef unsigned long long uint64;

constexpr int THREADS = 1024;
constexpr int BINS = 2048;       // two a thread
constexpr int CAPACITY = 4096;   // ids that are sorted in shared memory
constexpr float LOWEST = -26.0f;
constexpr float FIXED_ONE = 16777216.0f; // a weight of 1 relative to its bin, as an integer
constexpr int PER_LOAD = 16 / sizeof(LOGIT);
constexpr int LOADS = 4;         // in flight a thread
constexpr uint64 EVERYTHING = ~0ull;

struct Shared {
    uint64 list[CAPACITY];    // sort_key of the gathered ids
    double mass_before[BINS]; // of bins before; while the histogram grows, its two words of fixed-point mass
    unsigned counts[BINS];
    unsigned count_before[BINS];
    uint64 reduced[32];
    double scanned_mass[32];
    unsigned scanned_count[32];
    double total_mass;
    unsigned total_count, list_size, best_score;
    int cut_bin;
};

// What a row's scaled logits are made of.
struct Scale {
    float largest, temperature, inverse_temperature;
    float bins_per_unit, bin_width;

    __device__ float scaled(float logit) const { return __fdiv_rn(logit - largest, temperature); }
    // The same without the division, to pass over most ids.
    __device__ float roughly(float logit) const { return (logit - largest) * inverse_temperature; }
    // What `roughly` is at least for the ids of this bin and those before.
    __device__ float floor(int bin) const { return -1.00001f * (bin + 1) * bin_width - 1e-5f; }
    // BINS and more for ids that can't win.
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

// The kept prefix: bins before `bin`, and of `bin` the ids up to `last_key`.
struct Cut {
    int bin;
    uint64 last_key;
};

__device__ inline unsigned ordered_bits(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f); // -0 and 0 are equal
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float from_ordered_bits(unsigned bits) {
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// Greater for greater values, then for smaller ids.
__device__ inline uint64 best_key(float value, unsigned id) {
    return static_cast<uint64>(ordered_bits(value)) << 32 | ~id;
}

// Rising with falling `scaled` (which is never positive), then with rising ids.
__device__ inline uint64 sort_key(float scaled, unsigned id) {
    return static_cast<uint64>(__float_as_uint(fabsf(scaled))) << 32 | id;
}

__device__ inline float key_scaled(uint64 key) { return -__uint_as_float(static_cast<unsigned>(key >> 32)); }

// visit(logits, id) for the thread's share of the row: `logits` are those of ids from `id` on; ids rise.
template <typename Visit> __device__ inline void for_each_vector(const LOGIT* logits, Visit visit) {
    constexpr int NUM_VECTORS = VOCAB / PER_LOAD;
    for (int base = threadIdx.x; base < NUM_VECTORS; base += THREADS * LOADS) {
        Vector<LOGIT, PER_LOAD> loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int vector = base + i * THREADS;
            if (vector < NUM_VECTORS) loaded[i] = load_vector<LOGIT, PER_LOAD>(logits + vector * PER_LOAD);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int vector = base + i * THREADS;
            if (vector >= NUM_VECTORS) break;
            float values[PER_LOAD];
#pragma unroll
            for (int j = 0; j < PER_LOAD; ++j) values[j] = to_float(loaded[i][j]);
            visit(values, vector * PER_LOAD);
        }
    }
}

// Rows that are not aligned to vectors: the same, one id at a time.
template <typename Visit> __device__ inline void for_each_single(const LOGIT* logits, Visit visit) {
#pragma unroll 4
    for (int id = threadIdx.x; id < VOCAB; id += THREADS) {
        float values[1] = {to_float(logits[id])};
        visit(values, id);
    }
}

template <typename Visit> __device__ inline void for_each_group(const LOGIT* logits, Visit visit) {
    if constexpr (VOCAB % PER_LOAD == 0) for_each_vector(logits, visit);
    else for_each_single(logits, visit);
}

// visit(logit, id) for the thread's share of the row, ids rising.
template <typename Visit> __device__ inline void for_each(const LOGIT* logits, Visit visit) {
    for_each_group(logits, [&](auto& values, unsigned id) {
#pragma unroll
        for (int j = 0; j < sizeof(values) / sizeof(float); ++j) visit(values[j], id + j);
    });
}

struct Max {
    __device__ uint64 operator()(uint64 a, uint64 b) const { return a > b ? a : b; }
};
struct Sum {
    __device__ uint64 operator()(uint64 a, uint64 b) const { return a + b; }
};

template <typename Combine> __device__ uint64 block_reduce(uint64 value, Shared& shared, Combine combine) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(~0u, value, distance));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.reduced[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared.reduced[threadIdx.x % 32];
    for (int distance = 16; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(~0u, value, distance));
    }
    return value;
}

// Sum of the values of all threads before this one; `total` is that of all. In a fixed order.
template <typename T> __device__ T exclusive_scan(T value, T* warp_sums, T& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T inclusive = value;
    for (int distance = 1; distance < 32; distance *= 2) {
        const T below = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += below;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int i = 0; i < THREADS / 32; ++i) {
        if (i == warp) before = total;
        total += warp_sums[i];
    }
    T exclusive = __shfl_up_sync(~0u, inclusive, 1);
    return before + (lane ? exclusive : T(0));
}

// The largest logit's key, the least logit, and whether none is NaN or an infinity and some id is allowed.
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
    const uint64 key = block_reduce(best_key(best, best_id), shared, Max());
    least = from_ordered_bits(~static_cast<unsigned>(block_reduce(~ordered_bits(low), shared, Max())));
    const float largest = from_ordered_bits(key >> 32);
    finite = __syncthreads_and(ordered) && least > -infinity() && largest < infinity();
    finite &= largest > to_float(lowest<LOGIT>()); // some id is not forbidden
    return key;
}

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

// The last bin that holds an id with fewer than `limit` ids, and less than `target` mass, in the bins before.
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

// Sorts the ids of these bins, at most CAPACITY, into the list.
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

// Of the first `limit` of the list: how many have less than `target` mass before them, where `mass` lies before the
// list; and the mass of all of them, `mass` included.
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
    return static_cast<unsigned>(block_reduce(kept, shared, Sum()));
}

// Count and mass of the ids of `bin` whose key is below `key`.
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
    mass = scale.bin_mass(bin, block_reduce(fixed, shared, Sum()));
    return static_cast<unsigned>(block_reduce(count, shared, Sum()));
}

// The greatest key with fewer than `limit` ids of the bin, and less than `target` mass of all, below it.
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

// Where the prefix ends that keeps `limit` ids at most, and those with less than `target` mass before them. Sets `mass`
// to that of the prefix that `limit` alone leaves. If `listed` is set, to its size, the list holds the whole prefix; one
// that it holds already, from a call with the same limit, is only cut shorter.
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

// The best score among the first `size` of the list.
__device__ uint64 draw_from_list(unsigned size, float least_scaled, uint64 key, Shared& shared) {
    uint64 best = 0;
    for (unsigned i = threadIdx.x; i < size; i += THREADS) {
        const float scaled = key_scaled(shared.list[i]);
        const unsigned id = static_cast<unsigned>(shared.list[i]);
        if (scaled >= least_scaled) best = Max()(best, best_key(__fadd_rn(scaled, gumbel(noise_bits(key, id))), id));
    }
    return block_reduce(best, shared, Max());
}

// The best score among all ids within the cut. Noise is computed only where it could beat the best score so far: as
// noise >= n implies uniform <= exp(-n), one exponential for the largest of a few logits rules out nearly all of them.
__device__ uint64 draw_from_row(
    const LOGIT* logits, const Scale& scale, Cut cut, float least_scaled, uint64 key, unsigned largest_id,
    Shared& shared) {
    const float first_score = gumbel(noise_bits(key, largest_id));
    uint64 best = best_key(first_score, largest_id);
    __syncthreads();
    if (threadIdx.x == 0) shared.best_score = ordered_bits(first_score);
    __syncthreads();
    volatile unsigned* best_score = &shared.best_score; // a late reading only costs time
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
    return block_reduce(best, shared, Max());
}

__device__ Scale make_scale(float largest, float least, float temperature) {
    Scale scale{largest, temperature, 1.0f / temperature, 0.0f, 0.0f};
    const float span = -fmaxf(LOWEST, scale.scaled(least));
    if (span > 1e-30f) scale.bins_per_unit = (BINS - 1) / span;
    if (scale.bins_per_unit > 0.0f) scale.bin_width = 1.0f / scale.bins_per_unit;
    return scale;
}

// The token of a row with a temperature.
__device__ unsigned draw(const LOGIT* logits, const SampleRecord& record, float largest, unsigned largest_id, float least,
    Shared& shared) {
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
    int* token_buffer,           // [slots, context_length]; the token of a finite row goes to its slot and position
    int* tokens,                 // [rows] out; -1 where not finite
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
