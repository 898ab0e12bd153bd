/* The weighted mean of one piece; the same bits on every processor (no fused operations). */
#include "mesh.h"

/* Values that stay in the core's first cache while all members are added to them. */
#define BLOCK 2048

#if defined(__x86_64__)
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
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t here = count - at < BLOCK ? count - at : BLOCK;
        scale(out + at, from[0] + at, weight[0], here);
        for (uint32_t i = 1; i < members; i++)
            add(out + at, from[i] + at, weight[i], here);
    }
}
