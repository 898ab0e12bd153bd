/*
 * CRC-32C (Castagnoli), by the processor's instructions where there are some.
 *
 * The instruction for CRC-32C has a latency of three cycles, so three blocks are computed at a time;
 * tables shift the checksum of a block over the bytes that follow it. Processors with VPCLMULQDQ
 * fold 256 bytes at a time instead: a product with x^n modulo the polynomial moves bytes n bits
 * ahead (Gopal et al. 2009, Fast CRC Computation Using PCLMULQDQ). The plain version is the
 * reference.
 */
#include "mesh.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLYNOMIAL 0x82f63b78u
#define LONG 4096u
#define SHORT 256u

static uint32_t bytewise[256];
static uint32_t over_long[4][256], over_short[4][256];

/* The checksum's linear map for one zero byte, applied `bytes` times to each bit of `table`. */
static void fill_shift(uint32_t table[4][256], size_t bytes)
{
    for (int place = 0; place < 4; place++)
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t sum = value << (8 * place);
            if (value & (value - 1)) { /* linear: the sum of two with fewer bits */
                uint32_t low = value & -value;
                table[place][value] = table[place][low] ^ table[place][value ^ low];
                continue;
            }
            for (size_t i = 0; i < bytes; i++)
                sum = bytewise[sum & 0xff] ^ (sum >> 8);
            table[place][value] = sum;
        }
}

static void __attribute__((constructor)) fill(void)
{
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t sum = value;
        for (int bit = 0; bit < 8; bit++)
            sum = sum & 1 ? (sum >> 1) ^ POLYNOMIAL : sum >> 1;
        bytewise[value] = sum;
    }
    fill_shift(over_long, LONG);
    fill_shift(over_short, SHORT);
}

uint32_t mesh_checksum_plain(const void *bytes, size_t length)
{
    const unsigned char *at = bytes;
    uint32_t sum = ~0u;
    while (length--)
        sum = bytewise[(sum ^ *at++) & 0xff] ^ (sum >> 8);
    return ~sum;
}

#if defined(__x86_64__)

static inline uint32_t shifted(uint32_t table[4][256], uint32_t sum)
{
    return table[0][sum & 0xff] ^ table[1][sum >> 8 & 0xff] ^ table[2][sum >> 16 & 0xff] ^
           table[3][sum >> 24];
}

static inline uint64_t word(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

#define WITH_CRC __attribute__((target("sse4.2")))
#define WITH_FOLDING __attribute__((target("sse4.2,avx512f,vpclmulqdq")))

#define STEP(sum, at) sum = __builtin_ia32_crc32di(sum, word(at))

/* Three blocks of `block` bytes at a time, as long as there are three. */
static uint32_t WITH_CRC three(uint32_t sum, const unsigned char **at, size_t *length, size_t block,
                               uint32_t table[4][256])
{
    uint64_t first = sum;
    while (*length >= 3 * block) {
        const unsigned char *here = *at;
        uint64_t second = 0, third = 0;
        for (size_t i = 0; i < block; i += 8) {
            STEP(first, here + i);
            STEP(second, here + block + i);
            STEP(third, here + 2 * block + i);
        }
        first = shifted(table, (uint32_t)first) ^ second;
        first = shifted(table, (uint32_t)first) ^ third;
        *at += 3 * block;
        *length -= 3 * block;
    }
    return (uint32_t)first;
}

static uint32_t WITH_CRC by_instruction(uint32_t sum, const void *bytes, size_t length)
{
    const unsigned char *at = bytes;
    sum = three(sum, &at, &length, LONG, over_long);
    sum = three(sum, &at, &length, SHORT, over_short);
    uint64_t wide = sum;
    for (; length >= 8; at += 8, length -= 8)
        STEP(wide, at);
    for (sum = (uint32_t)wide; length; length--)
        sum = __builtin_ia32_crc32qi(sum, *at++);
    return sum;
}

#define FOLDED 256 /* bytes at a time */
/* x^(n + 31) and x^(n - 33) modulo the polynomial, bits reversed, for n = 8 * FOLDED. */
#define AHEAD_LOW 0xdcb17aa4u
#define AHEAD_HIGH 0xb9e02b86u

#define FOLD(lane, at)                                                              \
    lane = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lane, ahead, 0x00),   \
                                     _mm512_clmulepi64_epi128(lane, ahead, 0x11),   \
                                     _mm512_loadu_si512(at), 0x96)

static uint32_t WITH_FOLDING by_folding(uint32_t sum, const void *bytes, size_t length)
{
    const unsigned char *at = bytes;
    const __m512i ahead =
        _mm512_set_epi64(AHEAD_HIGH, AHEAD_LOW, AHEAD_HIGH, AHEAD_LOW, AHEAD_HIGH, AHEAD_LOW,
                         AHEAD_HIGH, AHEAD_LOW);
    __m512i first = _mm512_loadu_si512(at), second = _mm512_loadu_si512(at + 64);
    __m512i third = _mm512_loadu_si512(at + 128), fourth = _mm512_loadu_si512(at + 192);
    first = _mm512_xor_si512(first, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)sum)));
    for (at += FOLDED, length -= FOLDED; length >= FOLDED; at += FOLDED, length -= FOLDED) {
        FOLD(first, at);
        FOLD(second, at + 64);
        FOLD(third, at + 128);
        FOLD(fourth, at + 192);
    }
    /* What was folded has the checksum of all that came before, as bytes. */
    __m512i folded[4] = {first, second, third, fourth};
    return by_instruction(by_instruction(0, folded, sizeof folded), at, length);
}

uint32_t mesh_checksum(const void *bytes, size_t length)
{
    if (length >= 4 * FOLDED && __builtin_cpu_supports("vpclmulqdq") &&
        __builtin_cpu_supports("avx512f"))
        return ~by_folding(~0u, bytes, length);
    if (__builtin_cpu_supports("sse4.2"))
        return ~by_instruction(~0u, bytes, length);
    return mesh_checksum_plain(bytes, length);
}

#else

uint32_t mesh_checksum(const void *bytes, size_t length)
{
    return mesh_checksum_plain(bytes, length);
}

#endif
