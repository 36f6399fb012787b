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

}  // namespace emulator
