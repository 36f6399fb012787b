// Warp operations on matrices whose elements are in the registers of its lanes (mma.sync, ldmatrix, movmatrix).
#pragma once

#include "block.hpp"
#include "numbers.hpp"

namespace emulator {

inline uint64_t both(unsigned low, unsigned high) { return static_cast<uint64_t>(high) << 32 | low; }
inline unsigned word(unsigned turn, int of_lane, int index) {
    return static_cast<unsigned>(warp().values[turn][of_lane][index / 2] >> index % 2 * 32);
}

// c [16, 8] += a [16, 16] * b [16, 8]
inline void multiply_fragments(
    Kind kind, float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned b0, unsigned b1) {
    unsigned turn = meet({both(a0, a1), both(a2, a3), both(b0, b1)});
    float* sums[4] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; i++) {
        int row = lane() / 4, column = lane() % 4 * 2 + i % 2;
        double terms[16];
        for (int k = 0; k < 16; k++) {
            unsigned a = word(turn, row * 4 + k % 8 / 2, i / 2 + k / 8 * 2);
            unsigned b = word(turn, column * 4 + k % 8 / 2, 4 + k / 8);
            terms[k] = static_cast<double>(element(half(a, k % 2), kind)) * element(half(b, k % 2), kind);
        }
        *sums[i] = sum_step(*sums[i], terms, 16);
    }
}

inline void load_fragments(unsigned& m0, unsigned& m1, unsigned& m2, unsigned& m3, unsigned address, bool transposes) {
    unsigned turn = meet({address});
    unsigned* words[4] = {&m0, &m1, &m2, &m3};
    for (int matrix = 0; matrix < 4; matrix++) {
        uint16_t pair[2];
        for (int i = 0; i < 2; i++) {
            int row = transposes ? lane() % 4 * 2 + i : lane() / 4, column = transposes ? lane() / 4 : lane() % 4 * 2 + i;
            memcpy(pair + i, at(word(turn, matrix * 8 + row, 0) + column * 2, 2), 2);
        }
        *words[matrix] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
    }
}

inline unsigned transpose_fragment(unsigned m) {
    unsigned turn = meet({m}), row = lane() / 4, column = lane() % 4 * 2;
    unsigned low = half(word(turn, column * 4 + row / 2, 0), row % 2);
    return low | half(word(turn, (column + 1) * 4 + row / 2, 0), row % 2) << 16;
}

}  // namespace emulator
