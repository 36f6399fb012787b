// Causal attention of chunks of queries over a paged KV cache for Hopper (sm_90a): TMA, wgmma, heads of 64, 96, 128, 256.
//
// A block of three warpgroups stays for the whole launch and works off its pieces, each of 128 queries of a row for one
// query head, from the last tile of KEYS keys to the first. In warpgroup 0, one warp copies queries and keys and
// another copies values; warpgroups 1 and 2 have 64 queries each. A consumer runs ahead by one score product, across
// pieces too, but not for heads of 256, whose queries leave room for one piece's alone: it issues the scores of the next tile and the values of the present one, then does the next one's softmax.
// Issuing waits for most of the products, so that one warpgroup multiplies while the other does its softmax: a tile costs
// what a warpgroup's own chain of steps takes, and every step that is saved there counts. Tiles of which all queries see
// all keys, which are most, therefore have a loop without masks and without what happens between pieces.
//
// Keys and values of a layer: [block, BLOCK_SIZE, KV_HEADS, HEAD_DIM], of SCALAR or of e4m3. An FP8 cache's tiles are
// made fp16 in shared memory by a fourth warpgroup, and queries by those that multiply.
//
// Launched with `overlap` it runs beside its predecessor, a paged_decode that releases it when all that both read is
// written, and only ends behind it: who waits for this kernel counts on both.
//
// Tiles and barriers are in hopper_tile.cuh, copies in hopper_producer.cuh, products in hopper_consumer.cuh.

#include "hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "hopper_consumer.cuh"
#include "hopper_producer.cuh"

// Heads that are copied in parts take more registers there, and outputs of 96 take fewer than those of 128.
#if FP8_CACHE
constexpr int kThreads = 512, kProducerRegisters = 40, kConverterRegisters = kPadded ? 88 : 72;
constexpr int kConsumerRegisters = kPadded ? 192 : 200;
static_assert(kProducerRegisters + kConverterRegisters + 2 * kConsumerRegisters == 4 * 128, "what 512 threads begin with");
#else
constexpr int kThreads = 384, kProducerRegisters = kPadded ? 56 : 40, kConsumerRegisters = kPadded ? 224 : 232;
static_assert(kProducerRegisters + 2 * kConsumerRegisters == 3 * 168, "what 384 threads begin with");
#endif

// plan: int32 {number of tiles, blocks that they are dealt to, 6 unused}, PrefillTile [tiles]. Tensor maps have 64
// elements a row and planes of 64-element parts of heads: queries in boxes of 128 rows and all parts of a head, keys of 16
// rows and one part, values of 16 rows and all parts. Heads of 96 are rows of 96 elements and planes of heads, in boxes of
// 64 elements. Maps of an FP8 cache have a head's bytes a row, planes of heads, and boxes of 16 rows.
// `values` is what value_map describes. Strides are in elements; `window` is the number of positions that a query sees (a
// huge one for all); `scale` multiplies the scores, `soft_cap` counts where SOFT_CAP is set; `cache_scales`
// [2, KV_HEADS] is what an FP8 cache's keys and values are in units of.
extern "C" __global__ void __launch_bounds__(kThreads, 1) paged_prefill_hopper(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const char* __restrict__ values, Scalar* __restrict__ output,
    long long output_stride, const int* __restrict__ block_tables, int table_stride, const int* __restrict__ plan,
    int window, const float* __restrict__ cache_scales, float scale, float soft_cap) {
    extern __shared__ __align__(1024) char shared_bytes[];
    Shared shared{shared_address(shared_bytes)};
    int pieces = __ldg(plan) * kHeads;
    if (blockIdx.x >= __ldg(plan + 1) || dealt_piece(plan, 0) >= pieces) {
        wait_for_predecessors();
        return;
    }
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();
    int warpgroup = __shfl_sync(kFullWarp, threadIdx.x >> 7, 0);
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        int warp = threadIdx.x >> 5;
        if (warp == 0) {
            produce_queries_and_keys(shared, &query_map, &key_map, block_tables, table_stride, plan, pieces);
        } else if (warp == 1) {
            produce_values(shared, &value_map, values, block_tables, table_stride, plan, pieces);
        }
#if FP8_CACHE
    } else if (warpgroup == 3) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kConverterRegisters));
        convert(shared, plan);
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        int index = warpgroup - 1, thread = threadIdx.x & 127;
        Consumer consumer{
            shared, window, soft_cap, output, output_stride, cache_scales, scale * kLog2E, index,
            thread == 0, index * 64 + thread / 32 * 16,
            matrix_descriptor(shared.queries().tile(0) + index * (64 * 128), 16),
            matrix_descriptor(shared.keys().tile(0), 16),
            matrix_descriptor(shared.values().tile(0), kGroup * 128),
            Ring<QUERY_STAGES>(0), Ring<KEY_STAGES>(0), Ring<VALUE_STAGES>(0), Softmax{scale * kLog2E}, -1};
        consumer.consume();
    }
    wait_for_predecessors();
}

#endif
