// Routing of a lone row by the blocks that multiply with its experts' matrices, which saves a launch.
//
// Macros: those of expert_choice.cuh.
#pragma once

#include "expert_choice.cuh"

struct LoneRow {
    const float* parts;    // [num_parts, EXPERTS]: they add up to the logits of the row before it is divided by its RMS
    int num_parts;
    const float* bias;     // [EXPERTS], or null
    const float* squares;  // [num_squares, kSquaresPitch] of the row, or null where it is divided already
    int num_squares;
    float inverse_width, eps;

    // By all threads of a block: the logits, to shared memory [EXPERTS]. Returns 1 / rms.
    __device__ __forceinline__ float add_up(float* logits) const {
        const float scale = squares ? scale_of(squares, num_squares, 0, inverse_width, eps) : 1.0f;
        for (int expert = threadIdx.x; expert < EXPERTS; expert += blockDim.x) {
            float sum = 0.0f;
#pragma unroll 32
            for (int part = 0; part < num_parts; part++) sum += __ldcg(parts + part * EXPERTS + expert);
            logits[expert] = sum * scale;
        }
        return scale;
    }
};
