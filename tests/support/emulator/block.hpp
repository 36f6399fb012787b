// A block of threads: each thread is a fiber. Shared state, and operations of a warp's lanes.
#pragma once

#include <sched.h>
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "numbers.hpp"

namespace emulator {

constexpr unsigned kSharedBytes = 256 * 1024, kSharedBase = 1024;  // no shared address is 0
constexpr int kStackBytes = 128 * 1024;
constexpr int kPatience = 3000;  // rounds without progress that mean a deadlock

struct Product {  // a thread's part of d [64, 2 * count] (+)= a [64, depth] * b [depth, 2 * count]
    float* d;
    int count;
    Kind kind;
    bool a_is_shared, accumulates;
    bool b_is_along_k;
    unsigned a_low, b_low;
    std::vector<unsigned> a;  // in registers
    unsigned number;
};

struct SmallCopy {  // of 16 bytes; those after `valid_bytes` are zeros
    unsigned target;
    const void* source;
    int valid_bytes;
};

struct LateArrival {  // at a barrier, after small copies
    std::vector<SmallCopy> copies;
    unsigned barrier;
};

struct Matrices {
    float a[64][32];
    std::vector<float> b;
};

struct Thread {
    ucontext_t first;  // initial context
    jmp_buf place;     // resumes the fiber without a system call
    bool begun = false;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    struct { unsigned x, y = 0, z = 0; } index;
    bool done = false;
    const char* waits_for = "";
    unsigned which = 0;
    unsigned collectives = 0, products = 0;
    std::deque<std::vector<Product>> groups;
    std::vector<Product> open_group;
    std::map<unsigned, std::vector<unsigned>> operands;  // by product number, for the neighbouring lanes
    std::deque<std::vector<SmallCopy>> copy_groups;
    std::vector<SmallCopy> open_copies;
};

struct Warp {
    uint64_t values[2][32][4];
    int arrived[2] = {0, 0};
    unsigned completed = 0;
};

struct Named {
    int arrived = 0;
    unsigned generation = 0;
};

struct Barrier {
    int expected, pending;
    long long bytes = 0;
    unsigned phase = 0;
};

// Layout as packed by tests/support/emulator/kernel.py.
struct EncodedMap {
    int64_t address, sizes[3], strides[2];
    int32_t element_bytes, box[3], swizzles;
};

struct Copy {
    unsigned target;
    const EncodedMap* map;  // null: of `bytes` contiguous bytes at `source`
    int start[3];
    unsigned barrier;
    const void* source = nullptr;
    unsigned bytes = 0;
};

struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::map<int, Named> named;
    std::map<unsigned, Barrier> barriers;
    std::vector<Copy> copies;
    std::vector<LateArrival> arrivals;
    std::map<std::pair<int, unsigned>, Matrices> matrices;  // by warpgroup and product number, decoded
    alignas(1024) char shared[kSharedBytes];
    jmp_buf scheduler;
    std::mt19937 random;
    std::function<void()> kernel;
    unsigned index = 0, grid = 1;
    long long progress = 0;
    std::string fault;
};

inline Block* block;
inline Thread* current;

inline int thread_number() { return static_cast<int>(current - block->threads.data()); }
inline Warp& warp() { return block->warps[thread_number() / 32]; }
inline int lane() { return thread_number() % 32; }
inline void yield(const char* waits_for, unsigned which = 0) {
    current->waits_for = waits_for, current->which = which;
    if (!_setjmp(current->place)) _longjmp(block->scheduler, 1);
}
inline void resume(Thread& thread) {
    current = &thread;
    if (_setjmp(block->scheduler)) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = true;
    setcontext(&thread.first);
}

[[noreturn]] inline void fail(const std::string& what) {
    if (block->fault.empty()) block->fault = "thread " + std::to_string(thread_number()) + ": " + what;
    for (;;) yield("nothing: it failed");
}

inline char* shared_memory() { return block->shared; }
inline char* at(unsigned address, unsigned bytes) {
    if (address < kSharedBase || address + bytes > kSharedBase + kSharedBytes) fail("access outside shared memory");
    return block->shared + (address - kSharedBase);
}
inline unsigned swizzled(unsigned address) {
    unsigned place = address - kSharedBase;  // tiles are aligned to 1,024
    return address ^ (place >> 7 & 7) << 4;
}

// Words that other processes, each the emulator of another GPU, write meanwhile: a load lets them and all threads run.
inline unsigned load_shared(const unsigned* address) {
    sched_yield();
    block->progress++;
    yield("another GPU");
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
inline void store_shared(unsigned* address, unsigned value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }
inline long long nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

inline unsigned meet(std::initializer_list<uint64_t> words) {
    Warp& own = warp();
    unsigned number = current->collectives++;
    std::copy(words.begin(), words.end(), own.values[number & 1][lane()]);
    if (++own.arrived[number & 1] == 32) own.arrived[number & 1] = 0, own.completed = number + 1, block->progress++;
    while (own.completed <= number) yield("its warp, time ", number);
    return number & 1;
}
inline void check_whole(unsigned mask) {
    if (mask != 0xffffffffu) fail("a warp operation with only part of the warp");
}
template <typename T>
inline T exchanged(unsigned mask, T value, int source) {
    check_whole(mask);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    unsigned turn = meet({bits});
    memcpy(&value, warp().values[turn][source & 31], sizeof(T));
    return value;
}
inline void arrive_named(int name, int count) {  // without a wait
    Named& own = block->named[name];
    if (++own.arrived == count) own.arrived = 0, own.generation++, block->progress++;
}
inline void meet_named(int name, int count) {
    Named& own = block->named[name];
    unsigned generation = own.generation;
    arrive_named(name, count);
    while (own.generation == generation) yield("named barrier ", name);
}

}  // namespace emulator
