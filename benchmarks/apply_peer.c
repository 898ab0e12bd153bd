/* What benchmarks/apply.py compares with: the same loops over chunks in C with OpenMP.
 *
 * Compiled when the benchmark runs. OpenMP keeps its threads from one pass to the next.
 */

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SGD = 1, MOMENTUM, NESTEROV, ADAGRAD, ADAM, ADAMW, RMSPROP = 8 };
enum { RATE, DECAY, MASS, FLOOR, MEAN_NEW, SQUARE_OLD, SQUARE_NEW, UNBIAS };
enum { FLOAT32 = 1, BFLOAT16, FLOAT16 };
enum { CHUNK = 1024 };

#define F(name) ((float)coef[name])

static void sgd(const double *coef, float *restrict w, const float *restrict g, size_t n)
{
    const float rate = F(RATE), decay = F(DECAY);
    if (decay != 0)
        for (size_t i = 0; i < n; i++)
            w[i] -= rate * (g[i] + decay * w[i]);
    else
        for (size_t i = 0; i < n; i++)
            w[i] -= rate * g[i];
}

static void momentum(const double *coef, float *restrict w, float *restrict s,
                     const float *restrict g, size_t n)
{
    const float rate = F(RATE), decay = F(DECAY), mass = F(MASS);
    if (decay != 0)
        for (size_t i = 0; i < n; i++) {
            s[i] = mass * s[i] + (g[i] + decay * w[i]);
            w[i] -= rate * s[i];
        }
    else
        for (size_t i = 0; i < n; i++) {
            s[i] = mass * s[i] + g[i];
            w[i] -= rate * s[i];
        }
}

static void nesterov(const double *coef, float *restrict w, float *restrict s,
                     const float *restrict g, size_t n)
{
    const float rate = F(RATE), decay = F(DECAY), mass = F(MASS);
    if (decay != 0)
        for (size_t i = 0; i < n; i++) {
            const float x = g[i] + decay * w[i];
            s[i] = mass * s[i] + x;
            w[i] -= rate * (x + mass * s[i]);
        }
    else
        for (size_t i = 0; i < n; i++) {
            s[i] = mass * s[i] + g[i];
            w[i] -= rate * (g[i] + mass * s[i]);
        }
}

static void adagrad(const double *coef, float *restrict w, float *restrict s,
                    const float *restrict g, size_t n)
{
    const float rate = F(RATE), decay = F(DECAY), eps = F(FLOOR);
    if (decay != 0)
        for (size_t i = 0; i < n; i++) {
            const float x = g[i] + decay * w[i];
            s[i] += x * x;
            w[i] -= rate * x / (sqrtf(s[i]) + eps);
        }
    else
        for (size_t i = 0; i < n; i++) {
            s[i] += g[i] * g[i];
            w[i] -= rate * g[i] / (sqrtf(s[i]) + eps);
        }
}

static void adam(const double *coef, float *restrict w, float *restrict m, float *restrict v,
                 const float *restrict g, size_t n)
{
    const float rate = F(RATE), decay = F(DECAY), eps = F(FLOOR), mean_new = F(MEAN_NEW);
    const float old = F(SQUARE_OLD), new = F(SQUARE_NEW), unbias = F(UNBIAS);
    if (decay != 0)
        for (size_t i = 0; i < n; i++) {
            const float x = g[i] + decay * w[i];
            m[i] += mean_new * (x - m[i]);
            v[i] = old * v[i] + new * x * x;
            w[i] -= rate * m[i] / (sqrtf(v[i]) * unbias + eps);
        }
    else
        for (size_t i = 0; i < n; i++) {
            m[i] += mean_new * (g[i] - m[i]);
            v[i] = old * v[i] + new * g[i] * g[i];
            w[i] -= rate * m[i] / (sqrtf(v[i]) * unbias + eps);
        }
}

static void adamw(const double *coef, float *restrict w, float *restrict m, float *restrict v,
                  const float *restrict g, size_t n)
{
    const float rate = F(RATE), keep = F(DECAY), eps = F(FLOOR), mean_new = F(MEAN_NEW);
    const float old = F(SQUARE_OLD), new = F(SQUARE_NEW), unbias = F(UNBIAS);
    for (size_t i = 0; i < n; i++) {
        m[i] += mean_new * (g[i] - m[i]);
        v[i] = old * v[i] + new * g[i] * g[i];
        w[i] = keep * w[i] - rate * m[i] / (sqrtf(v[i]) * unbias + eps);
    }
}

static void rmsprop(const double *coef, float *restrict w, float *restrict v, float *restrict s,
                    const float *restrict g, size_t n)
{
    const float rate = F(RATE), decay = F(DECAY), eps = F(FLOOR), mass = F(MASS);
    const float old = F(SQUARE_OLD), new = F(SQUARE_NEW);
    for (size_t i = 0; i < n; i++) {
        const float x = decay != 0 ? g[i] + decay * w[i] : g[i];
        v[i] = old * v[i] + new * x * x;
        s[i] = mass * s[i] + x / (sqrtf(v[i]) + eps);
        w[i] -= rate * s[i];
    }
}

static void from_bfloat16(float *restrict to, const uint16_t *restrict from, size_t n)
{
    uint32_t *bits = (uint32_t *)to;
    for (size_t i = 0; i < n; i++)
        bits[i] = (uint32_t)from[i] << 16;
}

static void from_float16(float *restrict to, const uint16_t *restrict from, size_t n)
{
    size_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < n; i++) {
        _Float16 half;
        memcpy(&half, from + i, sizeof half);
        to[i] = (float)half;
    }
}

static void chunk(int kind, const double *coef, float *w, float *s0, float *s1, const void *payload,
                  int wire, size_t n, ptrdiff_t c)
{
    const size_t at = (size_t)c * CHUNK;
    const size_t some = n - at < CHUNK ? n - at : CHUNK;
    float decoded[CHUNK];
    const float *g = decoded;

    if (wire == FLOAT32)
        g = (const float *)payload + at;
    else if (wire == BFLOAT16)
        from_bfloat16(decoded, (const uint16_t *)payload + at, some);
    else
        from_float16(decoded, (const uint16_t *)payload + at, some);
    switch (kind) {
    case SGD: sgd(coef, w + at, g, some); break;
    case MOMENTUM: momentum(coef, w + at, s0 + at, g, some); break;
    case NESTEROV: nesterov(coef, w + at, s0 + at, g, some); break;
    case ADAGRAD: adagrad(coef, w + at, s0 + at, g, some); break;
    case ADAM: adam(coef, w + at, s0 + at, s1 + at, g, some); break;
    case ADAMW: adamw(coef, w + at, s0 + at, s1 + at, g, some); break;
    case RMSPROP: rmsprop(coef, w + at, s0 + at, s1 + at, g, some); break;
    }
}

/* A parallel loop for each pass. */
void apply(int kind, const double *coef, float *w, float *s0, float *s1, const void *payload,
           int wire, size_t n, int passes, int threads)
{
    const ptrdiff_t chunks = (ptrdiff_t)((n + CHUNK - 1) / CHUNK);

    for (int pass = 0; pass < passes; pass++) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (ptrdiff_t c = 0; c < chunks; c++)
            chunk(kind, coef, w, s0, s1, payload, wire, n, c);
    }
}

/* What memory gives: a[i] += b[i], as STREAM's additions are, but in place as an update is. */
void stream(float *a, const float *b, size_t n, int passes, int threads)
{
    for (int pass = 0; pass < passes; pass++) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
        for (size_t i = 0; i < n; i++)
            a[i] += b[i];
    }
}
