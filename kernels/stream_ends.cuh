// What follows a product whose warps have sums of the same outputs: one more warp adds them up, and applies bias,
// activation and residual stream. RMSNorm is split between the products around it, as kernels/skinny_product.cu says.
//
// Macros: those of kernels/int4_stream.cu.
#pragma once

#include "activation.cuh"
#include "int4_stream.cuh"

constexpr int kSquaresPitch = 128;
constexpr bool kAdds = EPILOGUE == EPILOGUE_RESIDUAL;

struct StreamEnds {
    Shared shared;
    Units units;
    const float* squares;  // [num_squares, kSquaresPitch]: sums of squares of x's rows, or null if x has no scale
    int num_squares;
    float inverse_width;  // 1 / (number of elements of a row of x)
    float eps;
    OUT* out;                   // [tokens, outputs], its rows apart by `pitch`
    const SCALAR* bias;         // [rows of W], or null
    SCALAR* residual;           // [tokens, outputs]
    const SCALAR* norm_weight;  // [outputs]
    float* new_squares;         // [units, kSquaresPitch]
    int outputs;                // columns of `out`
    int pitch;                  // elements between rows of `out`
    int tokens;                 // rows of `out`

    // Leaves a warp's sums of a unit.
    __device__ __forceinline__ void give(const float (&total)[STRIPS][4], int unit, int warp) const {
        const int index = unit - units.first, slot = index % SLOTS, lane = threadIdx.x % 32;
        if (SLOTS < UNITS && index >= SLOTS) barrier_wait(shared.empty(slot), (index / SLOTS - 1) & 1);
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            store_vector(reinterpret_cast<float*>(shared.sums(slot, warp) + s * 512 + lane * 16),
                         Vector<float, 4>{{total[s][0], total[s][1], total[s][2], total[s][3]}});
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.full(slot));
    }

    // Called by one warp.
    __device__ __forceinline__ void end_units() const {
        wait_for_predecessors();
        read_scales();
        for (int unit = units.first; unit < units.end; unit++) finish(unit);
    }

private:
    // Computes 1 / rms of each row of x.
    __device__ __forceinline__ void read_scales() const {
        const int lane = threadIdx.x % 32, token = lane % kRowsOfX;
        float sum = 0.0f;
        if (token < tokens) {
#pragma unroll 16
            for (int i = lane / kRowsOfX; i < num_squares; i += 32 / kRowsOfX) {
                sum += __ldcg(squares + i * kSquaresPitch + token);
            }
        }
        for (int distance = kRowsOfX; distance < 32; distance *= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
        if (lane < kRowsOfX) shared.scales()[lane] = squares ? rsqrtf(sum * inverse_width + eps) : 1.0f;
        __syncwarp();
    }

    // This lane's sums of a strip: of rows lane / 4 and 8 more (the upper bit of the index), and tokens lane % 4 * 2
    // and 1 more.
    __device__ __forceinline__ Vector<float, 4> add_up(int slot, int strip, int lane) const {
        Vector<float, 4> parts[WARPS];
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            parts[warp] = load_vector<float, 4>(
                reinterpret_cast<const float*>(shared.sums(slot, warp) + strip * 512 + lane * 16));
        }
#pragma unroll
        for (int warp = 1; warp < WARPS; warp++) {
#pragma unroll
            for (int i = 0; i < 4; i++) parts[0][i] += parts[warp][i];
        }
        return parts[0];
    }

    __device__ __forceinline__ void scale_and_add(Vector<float, 4>& values, const float (&scale)[2], int row) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values[i] *= scale[i % 2];
            if (bias != nullptr) values[i] += to_float(bias[row + i / 2 * 8]);
        }
    }

    __device__ __forceinline__ void finish(int unit) const {
        const int index = unit - units.first, slot = index % SLOTS, lane = threadIdx.x % 32, token = lane % 4 * 2;
        const float scale[2] = {shared.scales()[token], shared.scales()[token + 1]};
        float old[Units::kAdjacent][4] = {}, weights[Units::kAdjacent][2] = {}, found[2] = {0.0f, 0.0f};
        if constexpr (kAdds) read_residual(old, weights, unit, lane, token);
        barrier_wait(shared.full(slot), index / SLOTS & 1);
#pragma unroll
        for (int s = 0; s < Units::kAdjacent; s++) {
            if (!units.has(unit, s)) continue;
            const int row = units.strip(unit, s) * kStripRows + lane / 4;
            auto values = add_up(slot, s, lane);
            scale_and_add(values, scale, row);
            if constexpr (GATED) {
                auto up = add_up(slot, 1, lane);
                scale_and_add(up, scale, units.strip(unit, 1) * kStripRows + lane / 4);
#pragma unroll
                for (int i = 0; i < 4; i++) values[i] = ACTIVATION(values[i]) * up[i];
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (token + i % 2 >= tokens) continue;
                if constexpr (kAdds) {
                    const SCALAR sum = from_float<SCALAR>(old[s][i] + values[i]);
                    residual[place(token + i % 2, row + i / 2 * 8)] = sum;
                    found[i % 2] += to_float(sum) * to_float(sum);
                    values[i] = to_float(sum) * weights[s][i / 2];
                }
                out[(token + i % 2) * static_cast<long long>(pitch) + row + i / 2 * 8] = from_float<OUT>(values[i]);
            }
        }
        if (SLOTS < UNITS) {
            __syncwarp();  // all lanes have read the sums
            if (lane == 0) barrier_arrive(shared.empty(slot));
        }
        if constexpr (kAdds) write_squares(found, unit, lane, token);
    }

    __device__ __forceinline__ long long place(int token, int row) const {
        return token * static_cast<long long>(outputs) + row;
    }

    // Reads the residual stream and norm weights of this lane's outputs.
    __device__ __forceinline__ void read_residual(float (&old)[Units::kAdjacent][4], float (&weights)[Units::kAdjacent][2],
        int unit, int lane, int token) const {
#pragma unroll
        for (int s = 0; s < Units::kAdjacent; s++) {
            if (!units.has(unit, s)) continue;
            const int row = units.strip(unit, s) * kStripRows + lane / 4;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (token + i % 2 < tokens) old[s][i] = to_float(residual[place(token + i % 2, row + i / 2 * 8)]);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) weights[s][i] = to_float(norm_weight[row + i * 8]);
        }
    }

    __device__ __forceinline__ void write_squares(float (&found)[2], int unit, int lane, int token) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int distance = 4; distance < 32; distance *= 2) {
                found[i] += __shfl_xor_sync(kFullWarp, found[i], distance);
            }
            if (lane < 4 && token + i < tokens) new_squares[unit * kSquaresPitch + token + i] = found[i];
        }
    }
};
