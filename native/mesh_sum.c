/*
 * The weighted mean of one piece; the same bits on every processor, if it is compiled with
 * -ffp-contract=off (no fused operations). Only which of two NaNs remains is the compiler's choice.
 */
#include "mesh.h"

#include <string.h>

/* Values that stay in the core's first cache while all members are added to them. */
#define BLOCK 2048

/* The loader picks (glibc's can), as in ps_product.c. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* The differences are weighted, not the values: what is equal in all stays as it is, and no sum of
   equal values overflows. They are subtracted twice: so a -0 stays one, too. */
static void WIDE draw(float *restrict out, const float *restrict first, const float *restrict from,
                      float weight, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] -= weight * (first[i] - from[i]);
}

static void WIDE draw_first(float *restrict out, const float *restrict first,
                            const float *restrict from, float weight, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = first[i] - weight * (first[i] - from[i]);
}

/* Two members, one after the other: values of `out` and `first` are loaded once for both. */
static void WIDE draw_two(float *restrict out, const float *restrict first,
                          const float *restrict one, float of_one, const float *restrict other,
                          float of_other, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        float moved = out[i] - of_one * (first[i] - one[i]);
        out[i] = moved - of_other * (first[i] - other[i]);
    }
}

void mesh_sum(float *out, const float *const *from, const float *weight, uint32_t members,
              uint64_t count)
{
    uint32_t counted[MESH_MEMBERS], others = 0, first = 0;
    while (first + 1 < members && weight[first] == 0)
        first++;
    for (uint32_t i = first + 1; i < members; i++)
        if (weight[i] != 0)
            counted[others++] = i;
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t here = count - at < BLOCK ? count - at : BLOCK;
        const float *base = from[first] + at;
        if (!others) {
            memcpy(out + at, base, here * sizeof *out);
            continue;
        }
        draw_first(out + at, base, from[counted[0]] + at, weight[counted[0]], here);
        uint32_t k = 1;
        for (; k + 1 < others; k += 2) {
            uint32_t i = counted[k], j = counted[k + 1];
            draw_two(out + at, base, from[i] + at, weight[i], from[j] + at, weight[j], here);
        }
        if (k < others)
            draw(out + at, base, from[counted[k]] + at, weight[counted[k]], here);
    }
}
