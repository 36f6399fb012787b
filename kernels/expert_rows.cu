// What moves experts' rows: gather puts copies of rows in the order of the experts, activate is what lies between grouped
// products, combine adds up each row's experts in the router's order, combine_norm also has the norm behind it.
//
// Macros: SCALAR; WIDTH, elements of a row (activate: of its output), a multiple of 8; TOP_K; BIAS, 1: products lack their
// biases; those of gating.cuh.

#include "gating.cuh"
#include "vector.cuh"

constexpr int kVectors = WIDTH / 8;
constexpr int kThreads = 256;  // of a block

// out [rows * TOP_K, WIDTH]: copies of each row of x [rows, WIDTH] at its places [rows, TOP_K]. With `ends` [num_experts],
// where the experts' pairs end, `indexes` [rows, TOP_K] are relative to where those of a pair's expert begin; places and
// pairs are then filled from both.
extern "C" __global__ void expert_gather(
    const SCALAR* x, const int* experts, const int* indexes, const int* ends, int* places, int* pairs, SCALAR* out,
    int num_rows) {
    wait_for_predecessors();
    release_successors();  // only now: a kernel that starts then may rely on the jobs
    const long long total = static_cast<long long>(num_rows) * kVectors;
    for (long long index = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; index < total;
         index += static_cast<long long>(gridDim.x) * blockDim.x) {
        const int row = static_cast<int>(index / kVectors), vector = static_cast<int>(index % kVectors);
        const auto data = load_vector<SCALAR, 8>(x + index * 8);
        int own[TOP_K];
#pragma unroll
        for (int rank = 0; rank < TOP_K; rank++) {
            const int pair = row * TOP_K + rank;
            const int expert = experts[pair];
            own[rank] = !ends ? places[pair] : indexes[pair] + (expert > 0 ? ends[expert - 1] : 0);
        }
#pragma unroll
        for (int rank = 0; rank < TOP_K; rank++) {
            store_vector(out + own[rank] * static_cast<long long>(WIDTH) + vector * 8, data);
            if (ends && vector == 0) places[row * TOP_K + rank] = own[rank], pairs[own[rank]] = row * TOP_K + rank;
        }
    }
}

// out [num_pairs, WIDTH] = gated(gate, up) of gate_up [num_pairs, 2 * WIDTH]; bias [experts, 2 * WIDTH]
extern "C" __global__ void expert_activate(
    const SCALAR* gate_up, const int* pairs, const int* experts, const SCALAR* bias, SCALAR* out, int num_pairs) {
    release_successors();
    wait_for_predecessors();
    const long long total = static_cast<long long>(num_pairs) * kVectors;
    for (long long index = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; index < total;
         index += static_cast<long long>(gridDim.x) * blockDim.x) {
        const int pair = static_cast<int>(index / kVectors), column = static_cast<int>(index % kVectors) * 8;
        const SCALAR* row = gate_up + pair * (2ll * WIDTH) + column;
        const auto gate = load_vector<SCALAR, 8>(row), up = load_vector<SCALAR, 8>(row + WIDTH);
        Vector<SCALAR, 8> result;
#if BIAS
        const SCALAR* own = bias + experts[pairs[pair]] * (2ll * WIDTH) + column;
        const auto gate_bias = load_vector<SCALAR, 8>(own), up_bias = load_vector<SCALAR, 8>(own + WIDTH);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            result[j] = from_float<SCALAR>(
                gated(to_float(gate[j]) + to_float(gate_bias[j]), to_float(up[j]) + to_float(up_bias[j])));
        }
#else
#pragma unroll
        for (int j = 0; j < 8; j++) result[j] = from_float<SCALAR>(gated(to_float(gate[j]), to_float(up[j])));
#endif
        store_vector(out + index * 8, result);
    }
}

// Where a row's experts' outputs are, and what they are multiplied by.
struct Parts {
    int places[TOP_K];
    float weights[TOP_K];

    __device__ __forceinline__ Parts(const int* all_places, const float* all_weights, int row) {
#pragma unroll
        for (int rank = 0; rank < TOP_K; rank++) {
            places[rank] = all_places[row * TOP_K + rank];
            weights[rank] = all_weights[row * TOP_K + rank];
        }
    }
};

// The sum over ranks, ascending, of weights * (y at places + bias of the expert), of 8 columns of a row.
struct WeightedSum {
    float sums[8] = {};

    __device__ __forceinline__ WeightedSum(
        const SCALAR* y, const Parts& parts, const int* experts, const SCALAR* bias, int row, int column) {
        Vector<SCALAR, 8> values[TOP_K];
#pragma unroll
        for (int rank = 0; rank < TOP_K; rank++) {
            values[rank] = load_vector<SCALAR, 8>(y + parts.places[rank] * static_cast<long long>(WIDTH) + column);
        }
#pragma unroll
        for (int rank = 0; rank < TOP_K; rank++) {
#if BIAS
            const auto own = load_vector<SCALAR, 8>(bias + experts[row * TOP_K + rank] * static_cast<long long>(WIDTH) + column);
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += parts.weights[rank] * (to_float(values[rank][j]) + to_float(own[j]));
#else
#pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += parts.weights[rank] * to_float(values[rank][j]);
#endif
        }
    }
};

// out [rows, WIDTH] = the weighted sums + sigmoid(gate) * shared; with `adds` that is added to what `out` holds.
// y [rows * TOP_K, WIDTH], bias [experts, WIDTH], shared [rows, WIDTH] or null, its gates at `gates`, `gate_stride` floats
// apart, or none where that is null.
extern "C" __global__ void expert_combine(
    const SCALAR* y, const int* places, const float* weights, const int* experts, const SCALAR* bias,
    const SCALAR* shared, const float* gates, SCALAR* out, int gate_stride, int adds, int num_rows) {
    release_successors();
    wait_for_predecessors();
    const long long total = static_cast<long long>(num_rows) * kVectors;
    for (long long index = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; index < total;
         index += static_cast<long long>(gridDim.x) * blockDim.x) {
        const int row = static_cast<int>(index / kVectors), column = static_cast<int>(index % kVectors) * 8;
        WeightedSum sum(y, Parts(places, weights, row), experts, bias, row, column);
        if (shared) {
            const float factor = gates ? 1.0f / (1.0f + expf(-gates[row * static_cast<long long>(gate_stride)])) : 1.0f;
            const auto part = load_vector<SCALAR, 8>(shared + index * 8);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.sums[j] += factor * to_float(part[j]);
        }
        Vector<SCALAR, 8> result;
        if (adds) result = load_vector<SCALAR, 8>(out + index * 8);
#pragma unroll
        for (int j = 0; j < 8; j++) result[j] = from_float<SCALAR>(sum.sums[j] + (adds ? to_float(result[j]) : 0.0f));
        store_vector(out + index * 8, result);
    }
}

// residual [rows, WIDTH] += the weighted sums, and out = residual / rms * norm_weight: a block of kThreads per row, which
// stays in registers. As in add_rms_norm.cu, the norm is that of the stored residual. The predecessor is the product that
// writes y, which lets this kernel start only once all before it has ended: residual, places and weights are read at once.
extern "C" __global__ void __launch_bounds__(kThreads) expert_combine_norm(
    const SCALAR* y, const int* places, const float* weights, const int* experts, const SCALAR* bias, SCALAR* residual,
    const SCALAR* norm_weight, SCALAR* out, float eps) {
    __shared__ float scratch[32];
    constexpr int kOfThread = (kVectors + kThreads - 1) / kThreads;
    release_successors();
    const int row = blockIdx.x;
    Vector<SCALAR, 8> values[kOfThread], scales[kOfThread];
#pragma unroll
    for (int i = 0; i < kOfThread; i++) {
        const int vector = threadIdx.x + i * kThreads;
        if (vector >= kVectors) continue;
        scales[i] = load_vector<SCALAR, 8>(norm_weight + vector * 8);
        values[i] = load_vector<SCALAR, 8>(residual + row * static_cast<long long>(WIDTH) + vector * 8);
    }
    const Parts parts(places, weights, row);
    wait_for_predecessors();
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfThread; i++) {
        const int vector = threadIdx.x + i * kThreads;
        if (vector >= kVectors) continue;
        const WeightedSum sum(y, parts, experts, bias, row, vector * 8);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            values[i][j] = from_float<SCALAR>(to_float(values[i][j]) + sum.sums[j]);
            squares += to_float(values[i][j]) * to_float(values[i][j]);
        }
        store_vector(residual + row * static_cast<long long>(WIDTH) + vector * 8, values[i]);
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / WIDTH + eps);
#pragma unroll
    for (int i = 0; i < kOfThread; i++) {
        const int vector = threadIdx.x + i * kThreads;
        if (vector >= kVectors) continue;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            values[i][j] = from_float<SCALAR>(to_float(values[i][j]) * scale * to_float(scales[i][j]));
        }
        store_vector(out + row * static_cast<long long>(WIDTH) + vector * 8, values[i]);
    }
}
