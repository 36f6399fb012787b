// Causal attention of chunks of queries over a paged KV cache for Hopper (sm_90a), with TMA and wgmma. Heads have 64,
// 96, 128 or 256 elements.
//
// Blocks of three warpgroups are persistent and process pieces, each 128 queries of a row for one query head, from the
// last tile of KEYS keys to the first. In warpgroup 0, one warp copies queries and keys and another copies values;
// warpgroups 1 and 2 have 64 queries each. A consumer runs ahead by one score product: it issues the scores of the next
// tile and the values of the current one, then computes the next tile's softmax. It does so across pieces too, except
// with heads of 256, where shared memory has room for only one piece's queries.
//
// With CANONICAL, attention is in the canonical order (canonical_consumer.cuh): tiles ascend.
//
// Issuing waits for most of the products, so that one warpgroup multiplies while the other computes its softmax. A
// tile's time is therefore that of a warpgroup's own chain of steps, and every step saved there counts. Most tiles have
// only keys that all queries see; their loop has no masks and no code for the transition between pieces.
//
// Keys and values of a layer are [block, BLOCK_SIZE, KV_HEADS, HEAD_DIM], of SCALAR or e4m3. A fourth warpgroup
// converts tiles of an FP8 cache to fp16 in shared memory; the multiplying warpgroups convert queries.
//
// Launched with `overlap` it runs beside its predecessor, a paged_decode that releases it once everything that both
// read is written. It ends only after its predecessor, because kernels that wait for this one rely on the end of both.
//
// Tiles and barriers are in hopper_tile.cuh, copies in hopper_producer.cuh, products in hopper_consumer.cuh.

#include "hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#if CANONICAL
#include "canonical_consumer.cuh"
#else
#include "hopper_consumer.cuh"
#endif
#include "hopper_producer.cuh"

// Copying heads in parts takes more registers in the producer, and outputs of 96 take fewer than those of 128.
#if FP8_CACHE
constexpr int kThreads = 512, kProducerRegisters = 40, kConverterRegisters = kPadded ? 88 : 72;
constexpr int kConsumerRegisters = kPadded ? 192 : 200;
static_assert(kProducerRegisters + kConverterRegisters + 2 * kConsumerRegisters == 4 * 128, "what 512 threads begin with");
#else
constexpr int kThreads = 384, kProducerRegisters = kPadded ? 56 : 40, kConsumerRegisters = kPadded ? 224 : 232;
static_assert(kProducerRegisters + 2 * kConsumerRegisters == 3 * 168, "what 384 threads begin with");
#endif

// plan: int32 {number of tiles, number of blocks that they are dealt to, 6 unused}, PrefillTile [tiles].
//
// Tensor maps have 64 elements per row, and planes are 64-element parts of heads. Boxes are 128 rows and all parts of a
// head for queries, 16 rows and one part for keys, 16 rows and all parts for values. With heads of 96, rows have 96
// elements, planes are heads, and boxes have 64 elements. Maps of an FP8 cache have the bytes of a head per row, planes
// are heads, and boxes have 16 rows.
//
// `values` is the tensor of value_map. Strides are in elements; `window` is the number of positions that a query sees
// (a huge number for all); `scale` multiplies the scores; `soft_cap` is used if SOFT_CAP is set; `sinks`, by
// query head and in log2 units, if SINKS is set; `cache_scales` [2, KV_HEADS] are the units of an FP8 cache's keys and
// values.
extern "C" __global__ void __launch_bounds__(kThreads, 1) paged_prefill_hopper(
    const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map, const char* __restrict__ values, Scalar* __restrict__ output,
    long long output_stride, const int* __restrict__ block_tables, int table_stride, const int* __restrict__ plan,
    int window, const float* __restrict__ cache_scales, float scale, float soft_cap, const float* __restrict__ sinks) {
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
        const Products products{
            shared, window, soft_cap, output, output_stride, cache_scales, sinks, scale * Consumer::kScoreUnit, index,
            thread == 0, index * 64 + thread / 32 * 16,
            matrix_descriptor(shared.queries().tile(0) + index * (64 * 128), 16),
            matrix_descriptor(shared.keys().tile(0), 16),
            matrix_descriptor(shared.values().tile(0), kGroup * 128),
            Ring<QUERY_STAGES>(0), Ring<KEY_STAGES>(0), Ring<VALUE_STAGES>(0), -1};
        Consumer consumer = Consumer::of(products);
        consumer.consume();
    }
    wait_for_predecessors();
}

#endif
