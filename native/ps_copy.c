/* Copies a gradient into its slot. The same pass converts, adds up the squares, finds values that
 * are not finite, and keeps the residue of rounding (error feedback). */
#include "ps_ring.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define STRETCH 2048 /* values whose squares are added up as float32, in lanes, before double */

/* Vectors of the compiler, which maps them to those of the target. */
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#define PICK(mask, yes, no) (((words)(mask) & (yes)) | (~(words)(mask) & (no)))
#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u

/* What a pass over a stretch collects. */
struct seen {
    words largest; /* magnitude of a value as it is stored */
    floats squares;
};

/* Converts LANES values. stored: their 16-bit codes. back: these codes as float32. */
INLINE void to_bfloat16(const words *bits, words *stored, words *back)
{
    /* Round to nearest even. A NaN keeps its sign and gets a bit that rounding cannot carry away. */
    words rounded = (*bits + 0x7fffu + ((*bits >> 16) & 1u)) >> 16;
    *stored = PICK((*bits & MAGNITUDE) > INFINITE, (*bits >> 16) | 0x40u, rounded);
    *back = *stored << 16;
}

INLINE void to_float16(const words *bits, words *stored, words *back)
{
    /* Round to nearest even, in integers. Small values are rounded by the adder: adding 0.5 leaves
     * the bits of a subnormal half in the low end of the sum. */
    words magnitude = *bits & MAGNITUDE, sign = (*bits >> 16) & 0x8000u;
    words normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    words subnormal = (words)((floats)magnitude + 0.5f) - 0x3f000000u;
    words half = PICK(magnitude < 0x38800000u, subnormal, normal);
    words most = PICK(magnitude > INFINITE, (words){} + 0x7e00u, (words){} + 0x7c00u);
    half = PICK(magnitude >= 0x47800000u, most, half); /* 65536 and above */
    *stored = half | sign;
    typedef int32_t ints __attribute__((vector_size(4 * LANES)));
    words tiny = (words)(__builtin_convertvector((ints)half, floats) * 0x1p-24f);
    words wide = half << 13;
    words read = PICK(half >= 0x7c00u, wide | INFINITE, wide + (112u << 23));
    *back = PICK(half < 0x400u, tiny, read) | sign << 16;
}

INLINE void some_of(uint32_t dtype, void *to, const float *from, float *residue, struct seen *seen)
{
    floats value;
    memcpy(&value, from, sizeof value);
    if (residue) {
        floats more;
        memcpy(&more, residue, sizeof more);
        value += more;
    }
    words bits = (words)value, stored = bits, back = bits;
    if (dtype == PS_BFLOAT16)
        to_bfloat16(&bits, &stored, &back);
    else if (dtype == PS_FLOAT16)
        to_float16(&bits, &stored, &back);
    if (dtype == PS_FLOAT32) {
        memcpy(to, &stored, sizeof stored);
    } else {
        halves narrow = __builtin_convertvector(stored, halves);
        memcpy(to, &narrow, sizeof narrow);
    }
    words magnitude = back & MAGNITUDE;
    if (residue) {
        words rest = PICK(magnitude < INFINITE, (words)(value - (floats)back), (words){});
        memcpy(residue, &rest, sizeof rest);
    }
    seen->largest = PICK(magnitude > seen->largest, magnitude, seen->largest);
    seen->squares += value * value;
}

/* One stretch. Returns whether a value is not finite as it is stored; the squares of what was given
 * are added up. residue: what earlier roundings did not store, which is added to the values and then
 * replaced; or NULL. */
INLINE int stretch(uint32_t dtype, void *to, const float *from, uint64_t count, float *residue,
                   float *squares)
{
    uint64_t width = dtype == PS_FLOAT32 ? 4 : 2, whole = count - count % LANES;
    /* Two sums, because an addition has the latency of four other operations. */
    struct seen seen = {}, other = {};
    uint64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        uint64_t j = i + LANES;
        some_of(dtype, (char *)to + i * width, from + i, residue ? residue + i : NULL, &seen);
        some_of(dtype, (char *)to + j * width, from + j, residue ? residue + j : NULL, &other);
    }
    for (; i < whole; i += LANES)
        some_of(dtype, (char *)to + i * width, from + i, residue ? residue + i : NULL, &seen);
    seen.largest = PICK(other.largest > seen.largest, other.largest, seen.largest);
    seen.squares += other.squares;
    if (whole < count) {
        float values[LANES] = {0}, rest[LANES] = {0};
        uint32_t room[LANES];
        memcpy(values, from + whole, (count - whole) * 4);
        if (residue)
            memcpy(rest, residue + whole, (count - whole) * 4);
        some_of(dtype, room, values, residue ? rest : NULL, &seen);
        memcpy((char *)to + whole * width, room, (count - whole) * width);
        if (residue)
            memcpy(residue + whole, rest, (count - whole) * 4);
    }
    int found = 0;
    *squares = 0.0f;
    for (int k = 0; k < LANES; k++) {
        found |= seen.largest[k] >= INFINITE;
        *squares += seen.squares[k];
    }
    return found;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

/* The processor's own conversion differs only in the payload of a NaN. */
__attribute__((target("avx2,f16c,fma"))) static int
stretch_f16c(void *to, const float *from, uint64_t count, float *residue, float *squares)
{
    const __m256 infinite = _mm256_set1_ps(INFINITY), sign = _mm256_set1_ps(-0.0f);
    __m256 sum = _mm256_setzero_ps(), bad = _mm256_setzero_ps();
    uint64_t whole = count & ~7ull;
    for (uint64_t i = 0; i < whole; i += 8) {
        __m256 value = _mm256_loadu_ps(from + i);
        if (residue)
            value = _mm256_add_ps(value, _mm256_loadu_ps(residue + i));
        __m128i half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
        __m256 back = _mm256_cvtph_ps(half);
        __m256 lost = _mm256_cmp_ps(_mm256_andnot_ps(sign, back), infinite, _CMP_NLT_UQ);
        _mm_storeu_si128((__m128i *)(void *)((uint16_t *)to + i), half);
        if (residue)
            _mm256_storeu_ps(residue + i, _mm256_andnot_ps(lost, _mm256_sub_ps(value, back)));
        bad = _mm256_or_ps(bad, lost);
        sum = _mm256_fmadd_ps(value, value, sum);
    }
    float lanes[8], rest = 0.0f;
    _mm256_storeu_ps(lanes, sum);
    int found = _mm256_movemask_ps(bad) != 0;
    if (whole < count)
        found |= stretch(PS_FLOAT16, (uint16_t *)to + whole, from + whole, count - whole,
                         residue ? residue + whole : NULL, &rest);
    for (int i = 0; i < 8; i++)
        rest += lanes[i];
    *squares = rest;
    return found;
}
#define STRETCH_F16C stretch_f16c
#define TUNED(isa) __attribute__((target(isa)))
#else
#define STRETCH_F16C(to, from, count, residue, squares) \
    stretch(PS_FLOAT16, to, from, count, residue, squares)
#endif

/* For a stretch whose sum is too large for float32 although each value is finite. */
static double squares_of(const float *from, uint64_t count)
{
    double sum = 0.0;
    for (uint64_t i = 0; i < count; i++)
        sum += (double)from[i] * from[i];
    return sum;
}

INLINE double walk_as(uint32_t dtype, void *to, const float *from, uint64_t count, float *residue,
                      int f16c)
{
    uint64_t width = dtype == PS_FLOAT32 ? 4 : 2;
    double sum = 0.0;
    int found = 0;
    for (uint64_t at = 0; at < count; at += STRETCH) {
        uint64_t some = count - at < STRETCH ? count - at : STRETCH;
        void *place = (char *)to + at * width;
        float squares, *rest = residue ? residue + at : NULL;
        if (f16c && dtype == PS_FLOAT16)
            found |= STRETCH_F16C(place, from + at, some, rest, &squares);
        else
            found |= stretch(dtype, place, from + at, some, rest, &squares);
        sum += squares <= 3e38f ? (double)squares : squares_of(from + at, some);
    }
    return found ? (double)INFINITY : sum;
}

/* The compiler makes one loop for each format, with and without feedback. */
INLINE double walk(uint32_t dtype, void *to, const float *from, uint64_t count, float *residue,
                   int f16c)
{
    if (dtype == PS_FLOAT32) /* nothing is rounded */
        return walk_as(PS_FLOAT32, to, from, count, NULL, f16c);
    if (dtype == PS_BFLOAT16)
        return residue ? walk_as(PS_BFLOAT16, to, from, count, residue, f16c)
                    : walk_as(PS_BFLOAT16, to, from, count, NULL, f16c);
    return residue ? walk_as(PS_FLOAT16, to, from, count, residue, f16c)
                : walk_as(PS_FLOAT16, to, from, count, NULL, f16c);
}

static double walk_plain(uint32_t dtype, void *to, const float *from, uint64_t count,
                         float *residue)
{
    return walk(dtype, to, from, count, residue, 0);
}

#ifdef TUNED
TUNED("avx2,f16c,fma")
static double walk_avx2(uint32_t dtype, void *to, const float *from, uint64_t count,
                        float *residue)
{
    return walk(dtype, to, from, count, residue, 1);
}

TUNED("avx512f,avx512bw,avx512vl,avx2,f16c,fma")
static double walk_avx512(uint32_t dtype, void *to, const float *from, uint64_t count,
                          float *residue)
{
    return walk(dtype, to, from, count, residue, 1);
}
#endif

typedef double walker(uint32_t, void *, const float *, uint64_t, float *);

/* Chooses when the program runs, so that one build serves old and new processors. */
static walker *walker_here(void)
{
#ifdef TUNED
    unsigned int a, b, c = 0, d;
    int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && __builtin_cpu_supports("fma");
    if (f16c && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return walk_avx512;
    if (f16c && __builtin_cpu_supports("avx2"))
        return walk_avx2;
#endif
    return walk_plain;
}

double ps_copy(uint32_t dtype, void *to, const float *from, uint64_t count, float *residue)
{
    static walker *chosen; /* asking the processor takes microseconds in a virtual machine */
    walker *walk_here = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (!walk_here) {
        walk_here = walker_here();
        __atomic_store_n(&chosen, walk_here, __ATOMIC_RELAXED);
    }
    return walk_here(dtype, to, from, count, residue);
}
