// Exchanges of one launch among the GPUs of a group, over memory that each rank shares with all (a window).
//
// A rank copies its part into its own window, raises a flag in the others, waits for theirs, and reads their parts. The
// blocks of a launch meet the blocks of the same number on other ranks alone: all ranks launch equal grids in one order.
//
// A window: flags [MOST_BLOCKS][MOST_RANKS], where rank p writes the turn that its block has begun into column p; from
// DATA_BYTES on, two halves of `half_bytes`, used in turns. When a rank begins turn t + 2, all ranks have raised their
// flags of turn t + 1, hence finished turn t, and its half is free. Turns are counted on the device, so that graphs can
// be replayed; they are compared by their difference, as they wrap after a few days.
//
// Waiting ends when the host raises `abort` (page-locked memory of the host), or after `limit_ns`. Then, and from then
// on, no launch waits, reads or writes any window any more: `broken` says so to later launches and `fault` to the host.
//
// Macros: RANKS; THREADS of a block.
#pragma once

#include "vector.cuh"

#define MOST_BLOCKS 64
#define MOST_RANKS 8
#define DATA_BYTES 65536
#define POLLS 32 // between looks at the host's memory, which takes a microsecond

struct Places {
    const unsigned long long* windows; // [RANKS] where this process has mapped each rank's window
    unsigned* turns;                   // [MOST_BLOCKS] turns that each block has done
    unsigned* broken;                  // [1] on the device
    const unsigned* abort;             // [1] on the host
    unsigned* fault;                   // [1] on the host
    long long half_bytes;
    long long limit_ns;
};

__device__ inline unsigned load_acquire(const unsigned* address) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline unsigned load_relaxed(const unsigned* address) {
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline void store_release(unsigned* address, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ inline void store_relaxed(unsigned* address, unsigned value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ inline long long nanoseconds() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// The flag in a window that rank `rank` raises for blocks of this number.
__device__ inline unsigned* flag_of(unsigned long long window, int rank) {
    return reinterpret_cast<unsigned*>(window) + blockIdx.x * MOST_RANKS + rank;
}

// The half of rank `rank`'s window that belongs to a turn.
__device__ inline char* half_of(const Places& places, int rank, unsigned turn) {
    return reinterpret_cast<char*>(places.windows[rank]) + DATA_BYTES + (turn & 1) * places.half_bytes;
}

// Returns to all threads the turn that this launch does, or 0 once the exchange is broken. (Turn 0 after a wrap is
// skipped.) `stopped`: shared memory, as of `meet`.
__device__ inline unsigned begin_turn(const Places& places, int* stopped) {
    if (threadIdx.x == 0) *stopped = load_relaxed(places.broken); // one thread: another block may set it meanwhile
    __syncthreads();
    if (*stopped) return 0;
    const unsigned turn = places.turns[blockIdx.x] + 1;
    return turn ? turn : 2; // as even as 0
}

// Waits until the block of this number on every rank has written its part of the turn. All threads call it, after their
// own writes; returns false to all of them if the exchange is broken.
__device__ inline bool meet(const Places& places, int rank, unsigned turn, int* stopped) {
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < RANKS && peer != rank) {
        store_release(flag_of(places.windows[peer], rank), turn);
        const unsigned* flag = flag_of(places.windows[rank], peer);
        const long long end = nanoseconds() + places.limit_ns;
        int polls = 0;
        while (static_cast<int>(load_acquire(flag) - turn) < 0) {
            if (++polls % POLLS == 0 && (load_relaxed(places.abort) || nanoseconds() > end)) {
                *stopped = 1;
                store_relaxed(places.broken, 1);
                store_relaxed(places.fault, 1);
                break;
            }
        }
    }
    __syncthreads();
    return !*stopped;
}

// Counts the turn, also for blocks that this launch lacks. Every launch calls it last.
__device__ inline void end_turn(const Places& places, unsigned turn) {
    if (threadIdx.x == 0) places.turns[blockIdx.x] = turn;
    if (blockIdx.x == 0) {
        for (int i = gridDim.x + threadIdx.x; i < MOST_BLOCKS; i += THREADS) places.turns[i] = turn;
    }
}
