/* A learner that assigns; its argument is the job's socket. The model has two tensors or more. */
#include "gadei.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static gadei_learner *learner;

static void show(const char *what, int result)
{
    printf("%s %d %s\n", what, result, result ? gadei_error(learner) : "");
}

int main(int count, char **given)
{
    uint32_t tensors;
    if (count != 2 || gadei_attach(given[1], NULL, &learner))
        return 1;
    const struct gadei_tensor *table = gadei_tensors(learner, &tensors);
    const float **values = calloc(tensors, sizeof *values);
    float *first = malloc(table[0].count * sizeof *first);
    float *ones = calloc(gadei_elements(learner), sizeof *ones);
    if (!values || !first || !ones)
        return 1;
    for (uint64_t i = 0; i < table[0].count; i++)
        first[i] = 100.0f + (float)i;
    for (uint64_t i = 0; i < gadei_elements(learner); i++)
        ones[i] = 1.0f;
    show("push", gadei_push(learner, ones, 0.5, 1, 10000));
    values[0] = first;
    show("assign", gadei_assign(learner, values, 0, 10000));
    int same = 1;
    for (uint64_t i = 0; i < table[0].count; i++)
        same &= gadei_weights(learner)[table[0].start + i] == first[i];
    printf("same %d other %g\n", same, (double)gadei_weights(learner)[table[1].start]);
    show("push", gadei_push(learner, ones, 0.5, 1, 10000));
    show("applied", gadei_wait_applied(learner, 10000));
    printf("after %g\n", (double)gadei_weights(learner)[table[0].start]);
    show("null", gadei_assign(learner, NULL, 0, 10000));
    first[1] = NAN;
    show("nan", gadei_assign(learner, values, 0, 10000));
    show("claim", gadei_claim(learner, 10000));
    show("claimed", gadei_assign(learner, values, 0, 10000));
    gadei_detach(learner);
    learner = NULL;
    show("none", gadei_assign(NULL, values, 0, 10000));
    free(values);
    free(first);
    free(ones);
    return 0;
}
