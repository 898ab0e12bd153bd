/*
 * A learner in C: least squares on data that it makes itself. See README.md beside this file.
 *
 *     learner: native/examples/least_squares.c native/gadei.h
 *             cc -std=gnu11 -O2 -Wall -Wextra -Inative -o $@ $< \
 *                 native/gadei_*.c native/ps_*.c -pthread -lrt
 *
 * Usage: learner [JOB [STEPS]]. Without JOB it asks the environment, as `gadei-ps run` sets it.
 * Start it several times: every learner draws samples of its own and all train the same weights.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "gadei.h"

enum { FEATURES = 16, SAMPLES = 32 };

static uint64_t random_state;

/* Uniform from -1 to 1. */
static float draw(void)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(random_state >> 40) / (float)(1 << 23) - 1.0f;
}

/* What is to be learned: y = sum of truth(i) * x[i], plus 0.5. */
static float truth(int feature)
{
    return 0.25f * (float)(feature - 8);
}

/* Mean squared error of a fresh mini-batch; its gradient goes into to_w and to_b. */
static double compute(const float *w, const float *b, float *to_w, float *to_b)
{
    double loss = 0.0;
    for (int i = 0; i < FEATURES; i++)
        to_w[i] = 0.0f;
    *to_b = 0.0f;
    for (int sample = 0; sample < SAMPLES; sample++) {
        float x[FEATURES], error = *b - 0.5f;
        for (int i = 0; i < FEATURES; i++) {
            x[i] = draw();
            error += (w[i] - truth(i)) * x[i];
        }
        loss += (double)error * error / SAMPLES;
        for (int i = 0; i < FEATURES; i++)
            to_w[i] += 2.0f * error * x[i] / SAMPLES;
        *to_b += 2.0f * error / SAMPLES;
    }
    return loss;
}

static int train(gadei_learner *learner, long steps)
{
    uint32_t count;
    const struct gadei_tensor *tensors = gadei_tensors(learner, &count);
    int w = gadei_find(learner, "w"), b = gadei_find(learner, "b");
    if (w < 0 || b < 0)
        return GADEI_ERROR;
    if (tensors[w].count != FEATURES || tensors[b].count != 1) {
        fprintf(stderr, "the job needs w of shape [%d] and b of shape [1]\n", FEATURES);
        return GADEI_ERROR;
    }
    const float *weights = gadei_weights(learner);
    double mean = 0.0;
    for (long step = 1; step <= steps; step++) {
        float to_w[FEATURES], to_b[1];
        int result = gadei_wait_turn(learner, -1);
        if (result)
            return result;
        double loss = compute(weights + tensors[w].start, weights + tensors[b].start, to_w, to_b);
        result = gadei_claim(learner, -1);
        if (result)
            return result;
        gadei_write(learner, (uint32_t)w, to_w);
        gadei_write(learner, (uint32_t)b, to_b);
        result = gadei_publish(learner, loss, SAMPLES, 1.0f);
        if (result)
            return result;
        mean += loss / 50;
        if (step % 50 == 0) {
            printf("step %4ld  loss %.6f\n", step, mean);
            fflush(stdout);
            mean = 0.0;
        }
    }
    return gadei_wait_applied(learner, -1);
}

int main(int count, char **arguments)
{
    gadei_learner *learner;
    long steps = count > 2 ? atol(arguments[2]) : 500;
    random_state = (uint64_t)getpid();
    if (gadei_attach(count > 1 ? arguments[1] : NULL, "least_squares", &learner) < 0) {
        fprintf(stderr, "least_squares: %s\n", gadei_error(NULL));
        return 1;
    }
    int result = train(learner, steps);
    if (result < 0 && result != GADEI_STOPPED)
        fprintf(stderr, "least_squares: %s\n", gadei_error(learner));
    gadei_detach(learner);
    return result < 0 && result != GADEI_STOPPED;
}
