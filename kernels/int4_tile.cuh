// Matrices of 4-bit numbers as products read them, written by runner_svc/cuda/int4/packed_matrix.py:
// W = (code - zero) * scale, with a scale and a zero for each row and GROUP columns.
//
// A tile is 64 rows by 128 columns, and is contiguous; tiles lie row by row. It has four strips of 16 rows: the codes in
// the order of fragments of A, 16 bytes a lane for 64 columns, then scales, then zeros.
//
// Macros: GROUP, 32, 64 or 128; SCALE, type of the scales; ZEROS, 0: every zero is 8.
#pragma once

#include "vector.cuh"

constexpr int kStep = 128;  // columns of a tile
constexpr int kRows = 64;
constexpr int kGroups = kStep / GROUP;
constexpr int kStripRows = 16;
constexpr int kTileStrips = kRows / kStripRows;
constexpr int kCodeBytes = kStripRows * kStep / 2;
constexpr int kScaleBytes = kGroups * kStripRows * static_cast<int>(sizeof(SCALE));
constexpr int kStripBytes = kCodeBytes + kScaleBytes + (ZEROS ? kGroups * kStripRows : 0);
constexpr int kTileBytes = kTileStrips * kStripBytes;
static_assert(kStep % GROUP == 0 && GROUP % 32 == 0, "a promotion ends with a group");

// Where a lane finds its part of strips, in bytes from the first one's start. Its rows are lane / 4 and lane / 4 + 8.
struct LanePlaces {
    int codes, scales, zeros;

    __device__ __forceinline__ LanePlaces(int strip, int lane) {
        const int begin = strip * kStripBytes, pair = lane / 4 * 2;
        codes = begin + lane * 16;
        scales = begin + kCodeBytes + pair * static_cast<int>(sizeof(SCALE));
        zeros = begin + kCodeBytes + kScaleBytes + pair;
    }
};

// Eight codes for each of `Count` steps of 16 columns from `column` on, a multiple of 16 * Count.
template <int Count>
__device__ __forceinline__ Vector<unsigned, Count> load_codes(const char* codes, int column) {
    return load_vector<unsigned, Count>(
        reinterpret_cast<const unsigned*>(codes + column / 64 * 512 + column % 64 / 4));
}

__device__ __forceinline__ Vector<SCALE, 2> load_scales(const char* scales, int group) {
    return load_vector<SCALE, 2>(reinterpret_cast<const SCALE*>(scales) + group * kStripRows);
}

__device__ __forceinline__ Vector<unsigned char, 2> load_zeros(const char* zeros, int group) {
#if ZEROS
    return load_vector<unsigned char, 2>(reinterpret_cast<const unsigned char*>(zeros) + group * kStripRows);
#else
    return Vector<unsigned char, 2>{{8, 8}};
#endif
}
