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
inline void multiply(float* d, int count, bool is_bf16, unsigned long long a, unsigned long long b, int accumulate) {
    issue({d, count, is_bf16, true, accumulate != 0, static_cast<unsigned>(a), static_cast<unsigned>(b), {}, 0});
}
inline void mix(
    float* d, int count, bool is_bf16, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b,
    int accumulate) {
    issue({d, count, is_bf16, false, accumulate != 0, 0, static_cast<unsigned>(b), {a0, a1, a2, a3}, 0});
}
inline void commit_products() {
    current->groups.push_back(std::move(current->open_group));
    current->open_group.clear();
}

inline float element_at(unsigned address, bool is_bf16) {
    uint16_t bits;
    memcpy(&bits, at(swizzled(address), 2), 2);
    return element(bits, is_bf16);
}
// Element of a matrix in shared memory: rows of 128 bytes along k, groups of eight rows 1,024 bytes apart.
inline float along_k(unsigned low, int row, int k, bool is_bf16) {
    unsigned start = (low & 0x3fff) << 4;
    return element_at(start + row / 8 * 1024 + row % 8 * 128 + k * 2, is_bf16);
}
// The same with a row per k, where a row's next 64 elements are `leading` bytes further.
inline float across_k(unsigned low, int k, int column, bool is_bf16) {
    unsigned start = (low & 0x3fff) << 4, leading = (low >> 16 & 0x3fff) << 4;
    return element_at(start + column / 64 * leading + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2, is_bf16);
}
// A product's operands in shared memory, read when the first thread of its warpgroup does its part: a warpgroup's
// products are complete for all its threads once one of them has waited for them.
inline const Matrices& matrices_of(const Product& product) {
    auto key = std::make_pair(thread_number() / 128, product.number);
    auto [found, is_new] = block->matrices.try_emplace(key);
    Matrices& read = found->second;
    if (is_new) {
        int columns = 2 * product.count;
        read.b.resize(16 * columns);
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < columns; n++)
                read.b[k * columns + n] = product.a_is_shared ? along_k(product.b_low, n, k, product.is_bf16)
                                                              : across_k(product.b_low, k, n, product.is_bf16);
        for (int i = 0; product.a_is_shared && i < 64 * 16; i++)
            read.a[i / 16][i % 16] = along_k(product.a_low, i / 16, i % 16, product.is_bf16);
        if (product.number >= 256) block->matrices.erase(std::make_pair(thread_number() / 128, product.number - 256));
    }
    return read;
}
inline void left_side(const Product& product, const Matrices& read, float (&a)[2][16]) {
    int row = thread_number() % 128 / 32 * 16 + lane() / 4;
    for (int upper = 0; upper < 2; upper++)
        for (int k = 0; k < 16; k++) {
            if (product.a_is_shared) {
                a[upper][k] = read.a[row + 8 * upper][k];
                continue;
            }
            Thread& owner = block->threads[thread_number() / 4 * 4 + k % 8 / 2];
            auto operand = owner.operands.find(product.number);
            if (operand == owner.operands.end()) fail("lanes of a warp have different products");
            a[upper][k] = element(half(operand->second[k / 8 * 2 + upper], k % 2), product.is_bf16);
        }
}
inline void carry_out(const Product& product) {
    // A product belongs to the whole warpgroup: it starts once all its threads have reached it.
    for (int i = 0; i < 128; i++) {
        const Thread& other = block->threads[thread_number() / 128 * 128 + i];
        while (other.products <= product.number) yield("its warpgroup to start product ", product.number);
    }
    float a[2][16];
    const Matrices& read = matrices_of(product);
    left_side(product, read, a);
    int columns = 2 * product.count;
    for (int i = 0; i < product.count; i++) {
        int column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
        float sum = product.accumulates ? product.d[i] : 0.0f;
        for (int k = 0; k < 16; k++) sum += a[i / 2 % 2][k] * read.b[k * columns + column];
        product.d[i] = sum;
    }
}
inline void wait_products(int pending) {
    while (static_cast<int>(current->groups.size()) > pending) {
        for (const Product& product : current->groups.front()) carry_out(product);
        current->groups.pop_front();
        block->progress++;
    }
}
[[gnu::noinline]] inline void pin(float* d) { asm volatile("" : : "r"(d) : "memory"); }

}  // namespace emulator
