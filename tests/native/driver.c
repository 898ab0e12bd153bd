/*
 * A learner on strings: reads one command a line, does it, answers with one line. An answer begins
 * with the result; after an error follows what gadei_error says. The tests hold it at any point of
 * a gradient and kill it there.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gadei.h"

static gadei_learner *learner;

static void answer(int result)
{
    if (result < 0)
        printf("%d %s\n", result, gadei_error(learner));
    else
        printf("%d\n", result);
}

/* A whole gradient; what lies between the tensors is not a number, for nobody may look at it. */
static float *whole(float value)
{
    uint32_t count;
    const struct gadei_tensor *tensors = gadei_tensors(learner, &count);
    float *gradient = malloc(gadei_elements(learner) * sizeof *gradient);
    if (!gradient)
        abort();
    for (uint64_t i = 0; i < gadei_elements(learner); i++)
        gradient[i] = NAN;
    for (uint32_t i = 0; i < count; i++)
        for (uint64_t k = 0; k < tensors[i].count; k++)
            gradient[tensors[i].start + k] = value;
    return gradient;
}

static int push(float value, int64_t timeout_ms)
{
    float *gradient = whole(value);
    int result = gadei_push(learner, gradient, 0.5, 1, timeout_ms);
    free(gradient);
    return result;
}

static void attach(char *rest)
{
    char job[512] = "", name[512] = "";
    int result;
    sscanf(rest, "%511s %511[^\n]", job, name);
    result = gadei_attach(strcmp(job, "-") ? job : NULL, name, &learner);
    if (result < 0)
        printf("%d %s\n", result, gadei_error(NULL));
    else
        printf("%d\n", result);
}

static void tensors(void)
{
    uint32_t count;
    const struct gadei_tensor *all = gadei_tensors(learner, &count);
    printf("%u", count);
    for (uint32_t i = 0; i < count; i++) {
        printf(" %s:%u:", all[i].name, all[i].role);
        for (uint32_t k = 0; k < all[i].dims; k++)
            printf("%s%llu", k ? "x" : "", (unsigned long long)all[i].shape[k]);
        printf(":%llu:%llu", (unsigned long long)all[i].start, (unsigned long long)all[i].count);
    }
    printf("\n");
}

/* Smallest and largest value of all tensors. */
static void range(const float *weights)
{
    uint32_t count;
    const struct gadei_tensor *all = gadei_tensors(learner, &count);
    float low = INFINITY, high = -INFINITY;
    for (uint32_t i = 0; i < count; i++)
        for (uint64_t k = 0; k < all[i].count; k++) {
            float value = weights[all[i].start + k];
            low = value < low ? value : low;
            high = value > high ? value : high;
        }
    printf("%.9g %.9g\n", (double)low, (double)high);
}

static void pull(int64_t timeout_ms, int consistent)
{
    float *weights = malloc(gadei_elements(learner) * sizeof *weights);
    int result = 0;
    if (!weights)
        abort();
    if (consistent)
        result = gadei_pull_consistent(learner, weights, timeout_ms);
    else
        gadei_pull(learner, weights);
    if (result)
        answer(result);
    else
        range(weights);
    free(weights);
}

static void write_one(unsigned index, float value, int bad)
{
    uint32_t count;
    const struct gadei_tensor *all = gadei_tensors(learner, &count);
    uint64_t values = index < count ? all[index].count : 1;
    float *gradient = malloc(values * sizeof *gradient);
    if (!gradient)
        abort();
    for (uint64_t i = 0; i < values; i++)
        gradient[i] = value;
    if (bad)
        gradient[values - 1] = NAN;
    answer(gadei_write(learner, index, gradient));
    free(gradient);
}

static void do_command(char *line)
{
    char word[32] = "", name[256] = "";
    int used = 0;
    long long a = 0, b = 0, c = 0;
    double x = 0.0, y = 0.0;
    sscanf(line, "%31s %n", word, &used);
    char *rest = line + used;
    sscanf(rest, "%lld %lld %lld", &a, &b, &c);
    if (!strcmp(word, "attach")) {
        attach(rest);
    } else if (!strcmp(word, "detach")) {
        gadei_detach(learner);
        learner = NULL;
        printf("0\n");
    } else if (!strcmp(word, "tensors")) {
        tensors();
    } else if (!strcmp(word, "find")) {
        sscanf(rest, "%255s", name);
        answer(gadei_find(learner, name));
    } else if (!strcmp(word, "live")) {
        range(gadei_weights(learner));
    } else if (!strcmp(word, "pull")) {
        pull(0, 0);
    } else if (!strcmp(word, "pull_consistent")) {
        pull(a, 1);
    } else if (!strcmp(word, "wire")) {
        answer(gadei_set_wire(learner, (uint32_t)a));
    } else if (!strcmp(word, "turn")) {
        answer(gadei_wait_turn(learner, a));
    } else if (!strcmp(word, "claim")) {
        answer(gadei_claim(learner, a));
    } else if (!strcmp(word, "write")) {
        sscanf(rest, "%lld %lf", &a, &x);
        write_one((unsigned)a, (float)x, 0);
    } else if (!strcmp(word, "write_bad")) {
        write_one((unsigned)a, 1.0f, 1);
    } else if (!strcmp(word, "publish")) {
        sscanf(rest, "%lf %lld %lf", &x, &b, &y);
        answer(gadei_publish(learner, x, (uint32_t)b, (float)y));
    } else if (!strcmp(word, "push")) {
        sscanf(rest, "%lf %lld", &x, &b);
        answer(push((float)x, b));
    } else if (!strcmp(word, "flood")) {
        float *gradient = whole(1.0f);
        int result;
        printf("0\n");
        fflush(stdout);
        while (!(result = gadei_push(learner, gradient, 0.5, 1, -1)))
            ;
        free(gradient);
        answer(result);
    } else if (!strcmp(word, "wanted")) {
        answer(gadei_wanted(learner));
    } else if (!strcmp(word, "wave")) {
        answer((int)gadei_wave(learner));
    } else if (!strcmp(word, "give_up")) {
        answer(gadei_give_up(learner, a));
    } else if (!strcmp(word, "applied")) {
        answer(gadei_wait_applied(learner, a));
    } else if (!strcmp(word, "published")) {
        printf("%llu\n", (unsigned long long)gadei_published(learner));
    } else if (!strcmp(word, "version")) {
        printf("%llu\n", (unsigned long long)gadei_version(learner));
    } else if (!strcmp(word, "stopping")) {
        printf("%d\n", gadei_stopping(learner));
    } else if (!strcmp(word, "work")) {
        answer(gadei_set_work(learner, (uint32_t)a, (uint32_t)b, (uint64_t)c));
    } else if (!strcmp(word, "take")) {
        uint32_t epoch = 0, index = 0;
        int result = gadei_take_batch(learner, &epoch, &index, a);
        if (result)
            answer(result);
        else
            printf("0 %u %u\n", epoch, index);
    } else if (!strcmp(word, "poke")) {
        *(volatile float *)(uintptr_t)gadei_weights(learner) = 1e6f; /* the mapping forbids it */
        printf("0\n");
    } else {
        printf("unknown command\n");
    }
}

int main(void)
{
    char line[1024];
    while (fgets(line, sizeof line, stdin)) {
        do_command(line);
        fflush(stdout);
    }
    gadei_detach(learner);
    return 0;
}
