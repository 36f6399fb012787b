// 16-bit and 8-bit numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

inline float from_bf16(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_f16(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return static_cast<float>(half);
}
inline uint16_t to_f16(float value) {
    _Float16 half = static_cast<_Float16>(value);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
inline uint16_t from_e4m3(unsigned bits) {  // as fp16
    float sign = bits & 0x80 ? -1.0f : 1.0f;
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (exponent == 15 && mantissa == 7) return 0x7fff;
    return to_f16(sign * (exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6)));
}
inline unsigned half(unsigned word, int index) { return index ? word >> 16 : word & 0xffff; }
inline unsigned expand_pair(unsigned two) { return from_e4m3(two & 0xff) | from_e4m3(two >> 8 & 0xff) << 16; }
inline unsigned to_e4m3(float value) {  // to nearest even, saturated; NaN stays NaN
    unsigned sign = std::signbit(value) ? 0x80 : 0;
    float size = std::fabs(value);
    if (size != size) return 0x7f;
    if (size >= 448.0f) return sign | 0x7e;
    int exponent;
    std::frexp(size, &exponent);
    float unit = std::ldexp(1.0f, std::max(exponent - 4, -9));
    size = std::nearbyint(size / unit) * unit;
    if (size == 0.0f) return sign;
    std::frexp(size, &exponent);
    if (exponent - 1 < -6) return sign | static_cast<unsigned>(size * 512.0f);
    return sign | (exponent + 6) << 3 | static_cast<unsigned>(std::ldexp(size, 4 - exponent)) - 8;
}
enum Kind { kF16, kBf16, kE4m3 };  // of the elements that products take
inline int kind_bytes(Kind kind) { return kind == kE4m3 ? 1 : 2; }
inline int kind_depth(Kind kind) { return 32 / kind_bytes(kind); }  // elements that a product adds up
inline float element(unsigned bits, Kind kind) {
    return kind == kBf16 ? from_bf16(bits) : from_f16(kind == kE4m3 ? from_e4m3(bits) : bits);
}
template <typename Operation>
unsigned of_pairs(unsigned a, unsigned b, Kind kind, Operation operation) {
    unsigned result = 0;
    for (int i = 0; i < 2; i++) {
        float number = operation(element(half(a, i), kind), element(half(b, i), kind));
        result |= static_cast<unsigned>(kind == kBf16 ? to_bf16(number) : to_f16(number)) << 16 * i;
    }
    return result;
}
inline unsigned subtract_pairs(unsigned a, unsigned b, Kind kind) {
    return of_pairs(a, b, kind, [](float first, float second) { return first - second; });
}
inline unsigned multiply_pairs(unsigned a, unsigned b, Kind kind) {
    return of_pairs(a, b, kind, [](float first, float second) { return first * second; });
}


inline uint64_t bits_of(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}
inline double power_of_two(int exponent) {
    uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, 8);
    return value;
}
// c plus products, as one step of a tensor core adds them: the terms are cut to 25 bits below the leading one of the
// largest, and so is the sum to a float32, so that their order makes no difference. No GPU's exact recipe is meant.
inline float sum_step(float c, const double* terms, int count) {
    double most = std::fabs(static_cast<double>(c)), plain = c;
    for (int i = 0; i < count; i++) most = std::max(most, std::fabs(terms[i])), plain += terms[i];
    if (!(plain - plain == 0.0)) return static_cast<float>(plain);
    if (most == 0.0) return 0.0f;
    int exponent = static_cast<int>(bits_of(most) >> 52) - 1023;  // of the largest, which is a normal float64
    double per_unit = power_of_two(25 - exponent);
    int64_t units = static_cast<int64_t>(c * per_unit);
    for (int i = 0; i < count; i++) units += static_cast<int64_t>(terms[i] * per_unit);
    uint64_t bits = bits_of(static_cast<double>(units) * power_of_two(exponent - 25)) & ~((uint64_t{1} << 29) - 1);
    double sum;
    memcpy(&sum, &bits, 8);
    return static_cast<float>(sum);
}
// 2^x; results below the normal numbers are 0. In float64 by a fixed polynomial, so that a twin can repeat it.
inline float exp2_approx(float x) {
    constexpr double kCoefficients[] = {
        1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
        1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1.0,         1.0};
    if (!(x >= -126.0f)) return x != x ? x : 0.0f;
    if (x >= 128.0f) return __builtin_inff();
    double whole = std::floor(static_cast<double>(x)), part = (x - whole) * 0.6931471805599453, power = 0.0;
    for (double coefficient : kCoefficients) power = power * part + coefficient;
    return static_cast<float>(std::ldexp(power, static_cast<int>(whole)));
}

}  // namespace emulator
