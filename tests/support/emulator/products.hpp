// Products of a warpgroup (wgmma): they run, and read shared memory, only when they are waited for.
#pragma once

#include "block.hpp"
#include "numbers.hpp"

namespace emulator {

inline void issue(Product product) {
    product.number = current->products++;
    if (!product.a_is_shared) {
        current->operands[product.number] = product.a;
        while (current->operands.size() > 64) current->operands.erase(current->operands.begin());
    }
    current->open_group.push_back(std::move(product));
}
inline void multiply(float* d, int count, Kind kind, unsigned long long a, unsigned long long b, int accumulate) {
    issue({d, count, kind, true, accumulate != 0, true, static_cast<unsigned>(a), static_cast<unsigned>(b), {}, 0});
}
inline void mix(
    float* d, int count, Kind kind, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b,
    int accumulate) {
    issue({d, count, kind, false, accumulate != 0, false, 0, static_cast<unsigned>(b), {a0, a1, a2, a3}, 0});
}
inline void multiply_held(
    float* d, int count, Kind kind, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b,
    int accumulate) {
    issue({d, count, kind, false, accumulate != 0, true, 0, static_cast<unsigned>(b), {a0, a1, a2, a3}, 0});
}
inline void commit_products() {
    current->groups.push_back(std::move(current->open_group));
    current->open_group.clear();
}

inline float element_at(unsigned address, Kind kind) {
    uint16_t bits = 0;
    memcpy(&bits, at(swizzled(address), kind_bytes(kind)), kind_bytes(kind));
    return element(bits, kind);
}
// Element of a matrix in shared memory: rows of 128 bytes along k, groups of eight rows 1,024 bytes apart.
inline float along_k(unsigned low, int row, int k, Kind kind) {
    unsigned start = (low & 0x3fff) << 4;
    return element_at(start + row / 8 * 1024 + row % 8 * 128 + k * kind_bytes(kind), kind);
}
// The same with a row per k, where a row's next 64 elements are `leading` bytes further.
inline float across_k(unsigned low, int k, int column, Kind kind) {
    unsigned start = (low & 0x3fff) << 4, leading = (low >> 16 & 0x3fff) << 4;
    return element_at(start + column / 64 * leading + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2, kind);
}
// A product's operands in shared memory, read when the first thread of its warpgroup does its part: a warpgroup's
// products are complete for all its threads once one of them has waited for them.
inline const Matrices& matrices_of(const Product& product) {
    auto key = std::make_pair(thread_number() / 128, product.number);
    auto [found, is_new] = block->matrices.try_emplace(key);
    Matrices& read = found->second;
    if (is_new) {
        int columns = 2 * product.count, depth = kind_depth(product.kind);
        read.b.resize(depth * columns);
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < columns; n++)
                read.b[k * columns + n] = product.b_is_along_k ? along_k(product.b_low, n, k, product.kind)
                                                               : across_k(product.b_low, k, n, product.kind);
        for (int i = 0; product.a_is_shared && i < 64 * depth; i++)
            read.a[i / depth][i % depth] = along_k(product.a_low, i / depth, i % depth, product.kind);
        if (product.number >= 256) block->matrices.erase(std::make_pair(thread_number() / 128, product.number - 256));
    }
    return read;
}
inline void left_side(const Product& product, const Matrices& read, float (&a)[2][32]) {
    int row = thread_number() % 128 / 32 * 16 + lane() / 4;
    for (int upper = 0; upper < 2; upper++)
        for (int k = 0; k < kind_depth(product.kind); k++) {
            if (product.a_is_shared) {
                a[upper][k] = read.a[row + 8 * upper][k];
                continue;
            }
            Thread& owner = block->threads[thread_number() / 4 * 4 + k % 8 / 2];
            auto operand = owner.operands.find(product.number);
            if (operand == owner.operands.end()) fail("lanes of a warp have different products");
            a[upper][k] = element(half(operand->second[k / 8 * 2 + upper], k % 2), product.kind);
        }
}
inline void carry_out(const Product& product) {
    // A product belongs to the whole warpgroup: it starts once all its threads have reached it.
    for (int i = 0; i < 128; i++) {
        const Thread& other = block->threads[thread_number() / 128 * 128 + i];
        while (other.products <= product.number) yield("its warpgroup to start product ", product.number);
    }
    float a[2][32];
    const Matrices& read = matrices_of(product);
    left_side(product, read, a);
    int columns = 2 * product.count;
    for (int i = 0; i < product.count; i++) {
        int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
        double terms[32];
        int depth = kind_depth(product.kind);
        for (int k = 0; k < depth; k++) {
            terms[k] = static_cast<double>(a[i / 2 % 2][k]) * read.b[k * columns + column];
        }
        product.d[i] = sum_step(product.accumulates ? product.d[i] : 0.0f, terms, depth);
    }
}
inline void wait_products(int pending) {
    while (static_cast<int>(current->groups.size()) > pending) {
        for (const Product& product : current->groups.front()) carry_out(product);
        current->groups.pop_front();
        block->progress++;
    }
}
template <typename T>
[[gnu::noinline]] void pin(T* d) { asm volatile("" : : "r"(d) : "memory"); }

}  // namespace emulator
