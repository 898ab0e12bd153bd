/* Copy of a gradient into its slot: conversion and the search for values that are not finite ride
 * along in the same pass. */
#include "ps_ring.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
/* One build serves old and new processors; the loader (glibc's can) picks. */
#define PS_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define PS_CLONES
#endif

static const uint32_t INFINITE = 0x7f800000u, MAGNITUDE = 0x7fffffffu;

PS_CLONES static uint32_t copy_float32(uint32_t *restrict to, const uint32_t *restrict from,
                                       uint64_t count)
{
    uint32_t largest = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = from[i], magnitude = bits & MAGNITUDE;
        to[i] = bits;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= INFINITE;
}

/* Round to nearest even. A NaN keeps its sign and gets a bit that rounding cannot carry away. */
PS_CLONES static uint32_t copy_bfloat16(uint16_t *restrict to, const uint32_t *restrict from,
                                        uint64_t count)
{
    uint32_t largest = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = from[i];
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        uint32_t kept = (bits >> 16) | 0x40u;
        uint32_t half = (bits & MAGNITUDE) > INFINITE ? kept : rounded;
        uint32_t magnitude = half & 0x7fffu;
        to[i] = (uint16_t)half;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= 0x7f80u;
}

/* Round to nearest even, in integers. Small values are rounded by the adder: adding 0.5 leaves
 * the bits of a subnormal half in the low end of the sum. */
PS_CLONES static uint32_t copy_float16(uint16_t *restrict to, const uint32_t *restrict from,
                                       uint64_t count)
{
    uint32_t largest = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = from[i], sign = (bits >> 16) & 0x8000u, magnitude = bits & MAGNITUDE;
        uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        float value, sum;
        uint32_t sum_bits;
        memcpy(&value, &magnitude, sizeof value);
        sum = value + 0.5f;
        memcpy(&sum_bits, &sum, sizeof sum_bits);
        uint32_t subnormal = sum_bits - 0x3f000000u;
        uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
        half = magnitude >= 0x47800000u ? 0x7c00u : half; /* 65536 and above */
        half = magnitude > INFINITE ? 0x7e00u : half;
        to[i] = (uint16_t)(half | sign);
        largest = half > largest ? half : largest;
    }
    return largest >= 0x7c00u;
}

int ps_copy(uint32_t dtype, void *to, const float *from, uint64_t count)
{
    const uint32_t *bits = (const uint32_t *)(const void *)from;
    switch (dtype) {
    case PS_FLOAT32:
        return (int)copy_float32(to, bits, count);
    case PS_BFLOAT16:
        return (int)copy_bfloat16(to, bits, count);
    case PS_FLOAT16:
        return (int)copy_float16(to, bits, count);
    default:
        return -1;
    }
}
