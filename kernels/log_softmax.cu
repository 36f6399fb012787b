// The largest logit of each row, and the logarithm of the sum of exp(logit - largest): what a log-softmax subtracts. A block
// per row. The order of the sum depends on VOCAB alone: each thread adds its share, ids ascending, then the warps' lanes
// 16, 8, 4, 2 and 1 apart, then the warps in the same way.
//
// Macros: CANONICAL, 1; LOGIT; VOCAB.

#include "row_pass.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) log_softmax(
    const LOGIT* all_logits,  // [rows, VOCAB]
    float* subtrahends) {     // [rows, 2] out: the largest logit, the logarithm
    __shared__ uint64 reduced[32];
    __shared__ float scratch[32];
    const LOGIT* logits = all_logits + static_cast<long long>(blockIdx.x) * VOCAB;
    float best = -infinity();
    for_each(logits, [&](float logit, unsigned) { best = fmaxf(best, logit); });
    const float largest = from_ordered_bits(block_reduce(best_key(best, 0), reduced, Max()) >> 32);
    float sum = 0.0f;
    for_each(logits, [&](float logit, unsigned) { sum = __fadd_rn(sum, expf(__fsub_rn(logit, largest))); });
    sum = block_sum(sum, scratch);
    if (threadIdx.x != 0) return;
    subtrahends[2 * blockIdx.x] = largest;
    subtrahends[2 * blockIdx.x + 1] = logf(sum);
}
