// What becomes of the sums of canonical_product.cu's tiles, whose columns are those of both halves of W's rows.
//
// Macros: those of canonical_product.cu.
#pragma once

#include "activation.cuh"
#include "canonical_ahead.cuh"

static_assert(ENDS != ENDS_RESIDUAL || COLUMNS % kTileColumns == 0, "a tile has whole sums of squares");

constexpr bool kLoadsAhead = ENDS == ENDS_RESIDUAL && COLUMNS <= 64;  // registers have room for what a tile is added to
constexpr int kVector = 8;                                            // columns that a lane has after an exchange

using Eight = Vector<Scalar, kVector>;

struct Ends {
    OUT* out;
    bool scales;                // whether x's rows have them
    int num_rows;
    int half;                   // rows of W in its first half
    int outputs;                // rows of W
    Scalar* residual;           // [num_rows, outputs]
    const Scalar* norm_weight;  // [outputs]
    float* new_squares;         // of the residual's rows
    const Scalar* bias;         // [outputs], if BIAS

    __device__ __forceinline__ int width(int part) const { return part ? outputs - half : half; }
};

#if ENDS == ENDS_RESIDUAL
    // What a lane adds to in a row's columns of a half: eight adjacent ones in each 32.
    struct Lines {
        Eight numbers[COLUMNS / 32];

        __device__ __forceinline__ void load(const Place& place, const Ends& ends, int row, int part) {
            const int first = place.column + (threadIdx.x & 3) * kVector;
            const int count = row < ends.num_rows ? ends.width(part) - first : 0;
            const Scalar* residual = ends.residual + row * static_cast<long long>(ends.outputs) + part * ends.half + first;
#pragma unroll
            for (int i = 0; i < COLUMNS / 32; i++) {
                if (i * 32 < count) numbers[i] = load_vector<Scalar, kVector>(residual + i * 32);
            }
        }
    };

    // The norm's weights in the same columns.
    struct NormWeights {
        uint4 words[COLUMNS / 32];

        __device__ __forceinline__ void load(const Place& place, const Ends& ends, int part) {
            const int first = place.column + (threadIdx.x & 3) * kVector, count = ends.width(part) - first;
            const Scalar* weights = ends.norm_weight + part * ends.half + first;
#pragma unroll
            for (int i = 0; i < COLUMNS / 32; i++) {
                if (i * 32 < count) words[i] = __ldg(reinterpret_cast<const uint4*>(weights + i * 32));
            }
        }
    };

// Both of a tile's lane, in the parts and rows of a half: loaded ahead of the tile's last products, or when it ends.
struct Carried {
    Lines lines[2][2];
    NormWeights weights[2];

    __device__ __forceinline__ void load(const Place& place, const Ends& ends, int row) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            weights[part].load(place, ends, part);
#pragma unroll
            for (int half = 0; half < 2; half++) lines[part][half].load(place, ends, row + half * 8, part);
        }
    }
};
#else
struct Carried {};
#endif

// Asks L2 for the residual stream of a tile.
struct AskResidual {
    const Ends& ends;

    __device__ __forceinline__ void operator()(const Place& place, int index, int count) const {
#if ENDS == ENDS_RESIDUAL
        for (int i = index; i < 2 * kRows; i += count) {
            const int part = i % 2, row = place.row + i / 2, columns = min(COLUMNS, ends.width(part) - place.column);
            if (row >= ends.num_rows || columns <= 0) continue;
            const long long line = row * static_cast<long long>(ends.outputs) + part * ends.half + place.column;
            prefetch_bytes(ends.residual + line, columns * static_cast<int>(sizeof(Scalar)));
        }
#endif
    }
};

// Ends the tiles of a multiplying warpgroup.
struct Ender : Multiplier {
    float scales[2];  // of the rows lane / 4 and lane / 4 + 8

    // Loads what can be loaded before a tile's last products.
    __device__ __forceinline__ void load_ahead(const Place& place, const Ends& ends, Carried& carried) const {
#if ENDS == ENDS_RESIDUAL
        if constexpr (kLoadsAhead) carried.load(place, ends, first_row(place));
#endif
    }

    // Writes a tile's outputs.
    __device__ __forceinline__ void end(const Place& place, const Ends& ends, Carried& carried) const {
        if (place.row + index * 64 >= ends.num_rows) return;  // also keeps what follows after the last stage's release
#if ENDS == ENDS_GATED
        write_rounded(place, ends, 0, ends.half);
#elif ENDS == ENDS_RESIDUAL
#pragma unroll
        for (int part = 0; part < 2; part++) {
            NormWeights weights;
            if (!kLoadsAhead) weights.load(place, ends, part);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Lines lines;
                if (!kLoadsAhead) lines.load(place, ends, first_row(place) + half * 8, part);
                add_to_residual(place, ends, part, half, kLoadsAhead ? carried.lines[part][half] : lines,
                                kLoadsAhead ? carried.weights[part] : weights);
            }
        }
#else
#pragma unroll
        for (int part = 0; part < 2; part++) {
            if constexpr (sizeof(OUT) == 4) write_floats(place, ends, part);
            else write_rounded(place, ends, part, ends.outputs);
        }
#endif
    }

private:
    // -0 becomes +0, as where parts are added to zero.
    __device__ __forceinline__ float scaled(int i, int half) const {
        return __fmul_rn(__fadd_rn(sum(i), 0.0f), scales[half]);
    }
    // With its bias, if there are any. Four sums of a thread are of two columns in each eight.
    __device__ __forceinline__ float biased(const Place& place, const Ends& ends, int i, int half) const {
        const float value = scaled(i, half);
#if BIAS
        const int part = i / (COLUMNS / 2), own = i % (COLUMNS / 2);
        const int column = place.column + own / 4 * 8 + (threadIdx.x & 3) * 2 + own % 2;
        if (column < ends.width(part)) return __fadd_rn(value, to_float(ends.bias[part * ends.half + column]));
#endif
        return value;
    }
    // What becomes of a sum of G, or without gates of any sum.
    __device__ __forceinline__ float ended(const Place& place, const Ends& ends, int i, int half) const {
        const float value = biased(place, ends, i, half);
        return ENDS == ENDS_GATED ? ACTIVATION(value) * biased(place, ends, i + COLUMNS / 2, half) : value;
    }
    // Two outputs of the row lane / 4 + half * 8, in the columns block * 8 + lane % 4 * 2; part 1: of U.
    __device__ __forceinline__ unsigned pair(const Place& place, const Ends& ends, int block, int half, int part) const {
        const int first = 4 * block + 2 * half + part * (COLUMNS / 2);
        return Tensor16<Scalar>::pack(ended(place, ends, first, half), ended(place, ends, first + 1, half));
    }

    // Quads exchange columns, so that a lane stores 16 bytes at a time.
    __device__ __forceinline__ void write_rounded(const Place& place, const Ends& ends, int part, long long pitch) const {
        const int quad = threadIdx.x & 3, row = first_row(place), width = ends.width(part);
        const bool odd = quad & 1, upper = quad & 2;
        OUT* out = ends.out + part * ends.half;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 32; i++) {
                unsigned words[4];
#pragma unroll
                for (int j = 0; j < 4; j++) words[j] = pair(place, ends, 4 * i + j, half, part);
                exchange_in_quad(words, odd, upper);
                const int column = place.column + i * 32 + quad * kVector;
                if (row + half * 8 < ends.num_rows && column < width) store(words, out + (row + half * 8) * pitch + column);
            }
        }
        if (COLUMNS % 32) {  // 16 columns of both rows at a time
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) words[j] = pair(place, ends, COLUMNS / 8 - 2 + (j & 1), j >> 1, part);
            exchange_in_quad(words, odd, upper);
            const int own_row = row + (quad >> 1) * 8, column = place.column + COLUMNS - 16 + (quad & 1) * kVector;
            if (own_row < ends.num_rows && column < width) store(words, out + own_row * pitch + column);
        }
    }

    static __device__ __forceinline__ void store(const unsigned (&words)[4], void* place) {
        *reinterpret_cast<uint4*>(place) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ __forceinline__ void write_floats(const Place& place, const Ends& ends, int part) const {
        const int row = first_row(place), width = ends.width(part);
        float* out = reinterpret_cast<float*>(ends.out) + part * ends.half;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + half * 8 >= ends.num_rows) continue;
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; block++) {
                const int first = 4 * block + 2 * half + part * (COLUMNS / 2);
                const int column = place.column + block * 8 + (threadIdx.x & 3) * 2;
                if (column >= width) continue;
                const Vector<float, 2> values{{biased(place, ends, first, half), biased(place, ends, first + 1, half)}};
                store_vector(out + (row + half * 8) * static_cast<long long>(ends.outputs) + column, values);
            }
        }
    }

#if ENDS == ENDS_RESIDUAL
    // Adds one row's columns of a half; writes its sums of squares.
    __device__ __forceinline__ void add_to_residual(
        const Place& place, const Ends& ends, int part, int half, Lines& lines, const NormWeights& weights) const {
        const int quad = threadIdx.x & 3, width = ends.width(part), base = part * ends.half;
        const int tiles = (ends.outputs + kTileColumns - 1) / kTileColumns;
        const int row = first_row(place) + half * 8, first = place.column + quad * kVector;
        const int count = row < ends.num_rows ? width - first : 0;  // how many of the lane's columns there are
        const long long line = row * static_cast<long long>(ends.outputs) + base + first;
#pragma unroll
        for (int tile = 0; tile < COLUMNS / kTileColumns; tile++) {
            float squares[2] = {0.0f, 0.0f};  // of the lane's groups of four columns, over the tile's halves
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int index = tile * 2 + i;
                float values[kVector];
                exchanged(place, ends, index, half, part, values);
                float own[2] = {0.0f, 0.0f};
                if (index * 32 < count) {
                    Eight& numbers = lines.numbers[index];
                    const auto weight = *reinterpret_cast<const Eight*>(&weights.words[index]);
                    const Eight normed = add_eight(weight, numbers, values, own);
                    store_vector(ends.residual + line + index * 32, numbers);
                    store_vector(ends.out + line + index * 32, normed);
                }
#pragma unroll
                for (int j = 0; j < 2; j++) squares[j] = i ? __fadd_rn(squares[j], own[j]) : own[j];
            }
            const float total = tree(squares);
            const int tile_column = place.column + tile * kTileColumns;
            if (quad == 0 && row < ends.num_rows && tile_column < width) {
                ends.new_squares[squares_place(row, tiles) + (base + tile_column) / kTileColumns * kRowTile] = total;
            }
        }
    }

    // The lane's eight of 32 adjacent columns.
    __device__ __forceinline__ void exchanged(
        const Place& place, const Ends& ends, int columns, int half, int part, float (&values)[kVector]) const {
        const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
        for (int second = 0; second < 2; second++) {
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int i = 4 * (4 * columns + j) + 2 * half + part * (COLUMNS / 2) + second;
                words[j] = __float_as_uint(biased(place, ends, i, half));
            }
            exchange_in_quad(words, odd, upper);
#pragma unroll
            for (int j = 0; j < 4; j++) values[2 * j + second] = __uint_as_float(words[j]);
        }
    }

    // Adds to eight numbers of the residual stream, and to the squares of four columns each. Returns them times the norm's
    // weights.
    static __device__ __forceinline__ Eight add_eight(
        const Eight& weight, Eight& carried, const float (&values)[kVector], float (&squares)[2]) {
        Eight normed;
#pragma unroll
        for (int j = 0; j < kVector; j++) {
            carried[j] = from_float<Scalar>(__fadd_rn(to_float(carried[j]), values[j]));
            const float rounded = to_float(carried[j]);
            squares[j / 4] = __fadd_rn(squares[j / 4], __fmul_rn(rounded, rounded));
            normed[j] = from_float<Scalar>(__fmul_rn(rounded, to_float(weight[j])));
        }
        return normed;
    }

    // The sum of a tile's 16 groups of four columns, 8 and then 4, 2 and 1 groups apart: the first is done.
    static __device__ __forceinline__ float tree(float (&squares)[2]) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            squares[j] = __fadd_rn(squares[j], __shfl_xor_sync(kFullWarp, squares[j], 2));
            squares[j] = __fadd_rn(squares[j], __shfl_xor_sync(kFullWarp, squares[j], 1));
        }
        return __fadd_rn(squares[0], squares[1]);
    }
#endif
};
