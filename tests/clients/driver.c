/*
 * A learner on strings: reads one command a line, does it, answers with one line. An answer begins
 * with the result; after an error follows what gadei_error says. The tests hold it at any point of
 * a gradient and kill it there. driver.py knows the same commands.
 */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gadei.h"

static gadei_learner *learner;
static uint32_t wire; /* for the next learner; 0: not chosen */

/* Answers of the second thread go to memory. */
static _Thread_local FILE *out;
#define printf(...) fprintf(out ? out : stdout, __VA_ARGS__)

static void answer(int result)
{
    if (result < 0)
        printf("%d %s\n", result, gadei_error(learner));
    else
        printf("%d\n", result);
}

/* Values from -0.5 to 0.5 that all formats round; the same as driver.py makes. */
static float pattern(unsigned seed, uint64_t k)
{
    uint32_t bits = (uint32_t)(k * 2654435761u + seed * 40503u);
    return (float)(bits >> 8) / 16777216.0f - 0.5f;
}

/* A whole gradient; what lies between the tensors is not a number: nobody reads it. Row r of each
 * tensor is zero unless r is a multiple of `every`. */
static float *whole(const float *value, unsigned seed, unsigned every)
{
    uint32_t count;
    const struct gadei_tensor *tensors = gadei_tensors(learner, &count);
    float *gradient = malloc(gadei_elements(learner) * sizeof *gradient);
    if (!gradient)
        abort();
    for (uint64_t i = 0; i < gadei_elements(learner); i++)
        gradient[i] = NAN;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t rows = tensors[i].dims ? tensors[i].shape[0] : 1;
        for (uint64_t k = 0; k < tensors[i].count; k++) {
            float one = value ? *value : pattern(seed, k);
            gradient[tensors[i].start + k] = k / (tensors[i].count / rows) % every ? 0.0f : one;
        }
    }
    return gradient;
}

static int push(const float *value, unsigned seed, unsigned every, int64_t timeout_ms)
{
    float *gradient = whole(value, seed, every);
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
    if (!result && wire)
        result = gadei_set_wire(learner, wire);
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

/* The pattern, or with `value` all the same, and with `bad` one that is not a number. */
static void write_one(unsigned index, const float *value, unsigned seed, int bad)
{
    uint32_t count;
    const struct gadei_tensor *all = gadei_tensors(learner, &count);
    uint64_t values = index < count ? all[index].count : 1;
    float *gradient = malloc(values * sizeof *gradient);
    if (!gradient)
        abort();
    for (uint64_t i = 0; i < values; i++)
        gradient[i] = value ? *value : pattern(seed, i);
    if (bad)
        gradient[values - 1] = NAN;
    answer(gadei_write(learner, index, gradient));
    free(gradient);
}

static void write_rows(unsigned index, unsigned seed, char *list)
{
    enum { MOST = 256 };
    static float gradient[1 << 16];
    int64_t rows[MOST];
    uint64_t count = 0;
    const struct gadei_tensor *tensor = &gadei_tensors(learner, NULL)[index];
    for (char *end; count < MOST; count++, list = end) {
        rows[count] = strtoll(list, &end, 10);
        if (end == list)
            break;
    }
    uint64_t width = tensor->count / (tensor->dims && tensor->shape[0] ? tensor->shape[0] : 1);
    if (count * width > sizeof gradient / sizeof *gradient)
        abort();
    for (uint64_t i = 0; i < count * width; i++)
        gradient[i] = pattern(seed, i);
    answer(gadei_write_rows(learner, index, rows, gradient, count));
}

static void do_command(char *line);

/* What a child process of this one is answered; no hook of fork() is called for it. */
static void forked(char *rest)
{
    fflush(stdout);
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (!child) {
        do_command(rest);
        fflush(stdout);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

/* Every function without a learner, and with arrays that are NULL. Answers with the calls whose
 * result is not as it must be. */
static void nulls(void)
{
    uint32_t count = 7, batch;
    int64_t row = 0;
    float value = 0.0f;
#define EXPECT(call, wanted)              \
    do {                                  \
        if ((call) != (wanted))           \
            printf("%s; ", #call);        \
    } while (0)
#define REFUSED(call, one)                               \
    do {                                                 \
        EXPECT(call, GADEI_ERROR);                       \
        if (!strstr(gadei_error(one), "NULL"))           \
            printf("%s: %s; ", #call, gadei_error(one)); \
    } while (0)
    gadei_pull(NULL, &value);
    gadei_pull(learner, NULL);
    EXPECT(gadei_tensors(NULL, &count), NULL);
    EXPECT(count, 0);
    EXPECT(gadei_tensors(NULL, NULL), NULL);
    EXPECT(gadei_elements(NULL), 0);
    EXPECT(gadei_weights(NULL), NULL);
    EXPECT(gadei_version(NULL), 0);
    EXPECT(gadei_published(NULL), 0);
    EXPECT(gadei_wanted(NULL), 0);
    EXPECT(gadei_stopping(NULL), 1);
    EXPECT(gadei_wave(NULL), 1);
    EXPECT(gadei_attach("x", NULL, NULL), GADEI_ERROR);
    REFUSED(gadei_find(NULL, "w"), NULL);
    REFUSED(gadei_find(learner, NULL), learner);
    REFUSED(gadei_assign(NULL, NULL, 0, 0), NULL);
    REFUSED(gadei_assign(learner, NULL, 0, 0), learner);
    REFUSED(gadei_pull_consistent(NULL, &value, 0), NULL);
    REFUSED(gadei_pull_consistent(learner, NULL, 0), learner);
    REFUSED(gadei_set_wire(NULL, GADEI_FLOAT32), NULL);
    REFUSED(gadei_wait_turn(NULL, 0), NULL);
    REFUSED(gadei_claim(NULL, 0), NULL);
    REFUSED(gadei_claim_rows(NULL, 0), NULL);
    REFUSED(gadei_write_rows(NULL, 0, &row, &value, 1), NULL);
    REFUSED(gadei_write(NULL, 0, &value), NULL);
    REFUSED(gadei_publish(NULL, 0.0, 0, 1.0f), NULL);
    REFUSED(gadei_push(NULL, &value, 0.0, 0, 0), NULL);
    REFUSED(gadei_push(learner, NULL, 0.0, 0, 0), learner);
    REFUSED(gadei_give_up(NULL, 0), NULL);
    REFUSED(gadei_pause(NULL), NULL);
    REFUSED(gadei_resume(NULL), NULL);
    REFUSED(gadei_wait_applied(NULL, 0), NULL);
    REFUSED(gadei_set_work(NULL, 1, 1, 0), NULL);
    REFUSED(gadei_take_batch(NULL, &batch, &batch, 0), NULL);
    REFUSED(gadei_take_batch(learner, NULL, &batch, 0), learner);
    REFUSED(gadei_take_batch(learner, &batch, NULL, 0), learner);
    gadei_detach(NULL);
    printf("done\n");
}

/* -- a second thread --------------------------------------------------------------------------- */

static struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char command[1024]; /* "": none */
    char *answer;       /* NULL: none */
    int runs;
} second = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void *follow(void *unused)
{
    char command[sizeof second.command];
    for (;;) {
        pthread_mutex_lock(&second.lock);
        while (!*second.command)
            pthread_cond_wait(&second.changed, &second.lock);
        memcpy(command, second.command, sizeof command);
        *second.command = '\0';
        pthread_mutex_unlock(&second.lock);
        if (!strncmp(command, "over", 4))
            return unused;
        char *text;
        size_t length;
        out = open_memstream(&text, &length);
        do_command(command);
        fclose(out);
        pthread_mutex_lock(&second.lock);
        second.answer = text;
        pthread_cond_broadcast(&second.changed);
        pthread_mutex_unlock(&second.lock);
    }
}

/* Let a second thread run a command; `joined` reports its answer. */
static void beside(const char *command)
{
    pthread_mutex_lock(&second.lock);
    if (!second.runs)
        second.runs = !pthread_create(&second.thread, NULL, follow, NULL);
    snprintf(second.command, sizeof second.command, "%s", command);
    pthread_cond_broadcast(&second.changed);
    pthread_mutex_unlock(&second.lock);
}

static void joined(void)
{
    pthread_mutex_lock(&second.lock);
    while (!second.answer)
        pthread_cond_wait(&second.changed, &second.lock);
    printf("%s", second.answer);
    free(second.answer);
    second.answer = NULL;
    pthread_mutex_unlock(&second.lock);
}

/* Ends the second thread. */
static void over(void)
{
    beside("over");
    pthread_join(second.thread, NULL);
    second.runs = 0;
}

/* Push so many times and report how many were published; refused ones are not repeated. */
static void many(int count)
{
    float value = 1.0f, *gradient = whole(&value, 0, 1);
    int done = 0;
    for (int i = 0; i < count; i++)
        done += !gadei_push(learner, gradient, 0.5, 1, -1);
    free(gradient);
    printf("%d\n", done);
}

static void do_command(char *line)
{
    char word[32] = "", name[256] = "";
    int used = 0;
    long long a = 0, b = 0, c = 0;
    double x = 0.0, y = 0.0;
    float value;
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
        if (learner)
            answer(gadei_set_wire(learner, (uint32_t)a));
        else
            wire = (uint32_t)a, answer(0);
    } else if (!strcmp(word, "turn")) {
        answer(gadei_wait_turn(learner, a));
    } else if (!strcmp(word, "mini_batch")) {
        answer(gadei_wait_mini_batch(learner, (uint32_t)a, b));
    } else if (!strcmp(word, "claim")) {
        answer(gadei_claim(learner, a));
    } else if (!strcmp(word, "claim_rows")) {
        answer(gadei_claim_rows(learner, a));
    } else if (!strcmp(word, "write")) {
        sscanf(rest, "%lld %lf", &a, &x);
        value = (float)x;
        write_one((unsigned)a, &value, 0, 0);
    } else if (!strcmp(word, "write_bad")) {
        value = 1.0f;
        write_one((unsigned)a, &value, 0, 1);
    } else if (!strcmp(word, "write_pattern")) {
        write_one((unsigned)a, NULL, (unsigned)b, 0);
    } else if (!strcmp(word, "write_none")) {
        answer(gadei_write(learner, (unsigned)a, NULL));
    } else if (!strcmp(word, "write_rows")) {
        sscanf(rest, "%*d %*d %n", &used);
        write_rows((unsigned)a, (unsigned)b, rest + used);
    } else if (!strcmp(word, "publish")) {
        sscanf(rest, "%lf %lld %lf", &x, &b, &y);
        answer(gadei_publish(learner, x, (uint32_t)b, (float)y));
    } else if (!strcmp(word, "push")) {
        sscanf(rest, "%lf %lld", &x, &b);
        value = (float)x;
        answer(push(&value, 0, 1, b));
    } else if (!strcmp(word, "push_pattern")) {
        answer(push(NULL, (unsigned)a, 1, b));
    } else if (!strcmp(word, "push_sparse")) {
        answer(push(NULL, (unsigned)a, (unsigned)b, c));
    } else if (!strcmp(word, "flood")) {
        value = 1.0f;
        float *gradient = whole(&value, 0, 1);
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
    } else if (!strcmp(word, "pause")) {
        answer(gadei_pause(learner));
    } else if (!strcmp(word, "resume")) {
        answer(gadei_resume(learner));
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
    } else if (!strcmp(word, "nulls")) {
        nulls();
    } else if (!strcmp(word, "forked")) {
        forked(rest);
    } else if (!strcmp(word, "beside")) {
        beside(rest);
        printf("0\n");
    } else if (!strcmp(word, "joined")) {
        joined();
    } else if (!strcmp(word, "over")) {
        over();
        printf("0\n");
    } else if (!strcmp(word, "many")) {
        many((int)a);
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
