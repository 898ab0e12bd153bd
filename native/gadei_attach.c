/*
 * Attaching and detaching: a learner requests a ring from the watchdog and returns it at the end.
 * learners/attach.py does the same in Python.
 */
#include "gadei_learner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ps_atomic.h"

#define DETACH_NS 1000000000ull

/* Bytes of the text that fit into `room` without cutting a UTF-8 character. */
static size_t fitting(const char *text, size_t length, size_t room)
{
    if (length <= room)
        return length;
    while (room && ((unsigned char)text[room] & 0xc0u) == 0x80u)
        room--;
    return room;
}

static int read_id(const char *text, uint8_t id[16])
{
    struct json_reader in = {text, text + strlen(text)};
    uint32_t value;
    for (int i = 0; i < 16; i += 2) {
        if (!take_hex4(&in, &value))
            return 0;
        id[i] = (uint8_t)(value >> 8);
        id[i + 1] = (uint8_t)value;
    }
    return in.at == in.end;
}

/* The learner's number as its launcher gives it; -1 if none is given. */
static long number(void)
{
    const char *given = getenv("GADEI_PS_LEARNER");
    if (!given || !*given || strlen(given) > 9 || strspn(given, "0123456789") < strlen(given))
        return -1;
    return strtol(given, NULL, 10);
}

static int ask_for_ring(gadei_learner *learner, const char *name)
{
    char quoted[6 * 31 + 3], json[256], id_text[33];
    struct ps_segment_names names;
    uint8_t id[16];
    uint64_t row;
    struct json_field fields[] = {
        {"job", TEXT, learner->job, sizeof learner->job, 0},
        {"job_id", TEXT, id_text, sizeof id_text, 0},
        {"row", NUMBER, &row, 0, 0},
        {"generation", NUMBER, &learner->generation, 0, 0},
        {"control", TEXT, names.control, sizeof names.control, 0},
        {"weights", TEXT, names.weights, sizeof names.weights, 0},
        {"ring", TEXT, names.ring, sizeof names.ring, 0},
    };
    json_quote(name, fitting(name, strlen(name), 31), quoted);
    snprintf(json, sizeof json, "{\"v\":1,\"op\":\"attach\",\"name\":%s,\"number\":%ld}", quoted,
             number());
    int result = ps_request(learner, json, fields, sizeof fields / sizeof fields[0],
                            PS_PATIENCE_NS);
    if (result)
        return result;
    if (!read_id(id_text, id) || row >= PS_MAX_LEARNERS)
        return ps_fail(learner, GADEI_ERROR, "%s: the reply has no proper job_id or row",
                       learner->path);
    learner->row = (uint32_t)row;
    return ps_map_segments(learner, &names, id);
}

static void drop(gadei_learner *learner)
{
    ps_unmap_segments(learner);
    if (learner->socket >= 0)
        close(learner->socket); /* the watchdog keeps the row until this process ends */
    free(learner);
}

static void leave(gadei_learner *learner)
{
    char json[128];
    snprintf(json, sizeof json, "{\"v\":1,\"op\":\"detach\",\"row\":%u,\"generation\":%llu}",
             learner->row, (unsigned long long)learner->generation);
    uint64_t patience_ns = DETACH_NS;
    const struct ps_learner *common = &learner->common;
    if (common->ring) { /* if no watchdog receives the request, the next one reads this word */
        ps_store_release(&common->ring->detached, 1);
        if (__atomic_load_n(&common->control->phase, __ATOMIC_RELAXED) >= PS_PHASE_STOPPED)
            patience_ns = 0;
    }
    /* Fails if the job has ended or has evicted this learner already. */
    ps_request(learner, json, NULL, 0, patience_ns);
}

/* For the job's status: from the program, or from its launcher. */
static const char *name_of(const char *name)
{
    if (!name || !*name)
        name = getenv("GADEI_PS_NAME");
    return name ? name : "";
}

int gadei_attach(const char *job_or_socket, const char *name, gadei_learner **out)
{
    gadei_learner *learner = out ? calloc(1, sizeof *learner) : NULL;
    ps_attach_failed("");
    ps_set_refusal(learner, NULL); /* of one that was at the same address */
    if (!learner) {
        ps_attach_failed(out ? "out of memory" : "no place for a learner");
        return GADEI_ERROR;
    }
    *out = NULL;
    learner->socket = -1;
    int result = ps_connect(learner, job_or_socket);
    if (!result)
        result = ask_for_ring(learner, name_of(name));
    if (result) {
        ps_attach_failed(learner->error);
        if (learner->generation && learner->row < PS_MAX_LEARNERS)
            leave(learner); /* the watchdog has given it a ring that it cannot use */
        drop(learner);
        return result;
    }
    ps_learner_begin(&learner->common, learner->ring_map.at, learner->control_map.at,
                     learner->weights_map.at);
    *out = learner;
    return GADEI_OK;
}

void gadei_detach(gadei_learner *learner)
{
    if (!learner)
        return;
    if (!ps_is_forked(&learner->common.calls)) {
        ps_shut(&learner->common.calls);
        leave(learner);
    }
    drop(learner);
}
