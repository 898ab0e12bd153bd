/*
 * The weighted mean of one piece; the same bits on every processor, if it is compiled with
 * -ffp-contract=off (no fused operations). Only which of two NaNs remains is the compiler's choice.
 */
#include "mesh.h"

/* Values that stay in the core's first cache while all members are added to them. */
#define BLOCK 2048

/* The loader picks (glibc's can), as in ps_product.c. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

static void WIDE scale(float *restrict out, const float *restrict from, float weight, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = weight * from[i];
}

static void WIDE add(float *restrict out, const float *restrict from, float weight, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] += weight * from[i];
}

void mesh_sum(float *out, const float *const *from, const float *weight, uint32_t members,
              uint64_t count)
{
    uint32_t first = 0;
    while (first + 1 < members && weight[first] == 0)
        first++;
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t here = count - at < BLOCK ? count - at : BLOCK;
        scale(out + at, from[first] + at, weight[first], here);
        for (uint32_t i = first + 1; i < members; i++)
            if (weight[i] != 0)
                add(out + at, from[i] + at, weight[i], here);
    }
}
