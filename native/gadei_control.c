/*
 * The job's socket: finds it, asks the watchdog, reads its replies. gadei_ps/job/control.py is the
 * other end. A reply is checked before anything of it is used as a size.
 */
#include "gadei_learner.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "ps_atomic.h"

#define ANSWER_NS 10000000000ull /* for the watchdog to answer */
#define RECONNECT_NS 20000000l
#define MAX_REPLY 65536u

/* -- the socket -------------------------------------------------------------------------------- */

static int check_job_name(gadei_learner *learner, const char *job)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                  "0123456789-_";
    size_t length = strlen(job);
    if (length < 1 || length > 48 || job[0] == '-' || job[0] == '_' ||
        strspn(job, letters) != length)
        return ps_fail(learner, GADEI_ERROR,
                       "job name '%.64s': use 1 to 48 letters, digits, '-' and '_', beginning with "
                       "a letter or digit", job);
    return GADEI_OK;
}

/* The job's socket in the user's directory for sockets: gadei_ps/job/paths.py has the same rules. */
static int find_socket(gadei_learner *learner, const char *job)
{
    const char *given = getenv("GADEI_PS_RUNTIME_DIR"), *session = getenv("XDG_RUNTIME_DIR");
    char directory[sizeof learner->path], path[2 * sizeof learner->path];
    static const char roots[] = "/run/gadei-ps-root"; /* no other user can make it */
    struct stat status;
    int length, named = given && *given;
    if (named && *given != '/')
        return ps_fail(learner, GADEI_ERROR,
                       "GADEI_PS_RUNTIME_DIR=%s: give a path that begins with /", given);
    if (named)
        length = snprintf(directory, sizeof directory, "%s", given);
    else if (session && *session == '/') /* the specification has others ignored */
        length = snprintf(directory, sizeof directory, "%s/gadei-ps", session);
    else if (!getuid() && !lstat(roots, &status) && !status.st_uid)
        length = snprintf(directory, sizeof directory, "%s", roots);
    else
        length = snprintf(directory, sizeof directory, "/tmp/gadei-ps-%u", (unsigned)getuid());
    if (length < 0 || (size_t)length >= sizeof directory)
        return ps_fail(learner, GADEI_ERROR,
                       "GADEI_PS_RUNTIME_DIR is too long for a socket's path");
    if (!lstat(directory, &status) &&
        (!S_ISDIR(status.st_mode) || (status.st_uid != getuid() && (getuid() || !named)) ||
         (status.st_mode & (S_IWGRP | S_IWOTH))))
        return ps_fail(learner, GADEI_ERROR,
                       "%s is not a directory that only you may write (owner %u, mode %04o): run "
                       "the program as its owner, make it private (chmod go-w), or set "
                       "GADEI_PS_RUNTIME_DIR to a directory of your own", directory,
                       (unsigned)status.st_uid, (unsigned)status.st_mode & 07777);
    snprintf(path, sizeof path, "%s/%s.sock", directory, job);
    if (strlen(path) >= sizeof learner->path)
        return ps_fail(learner, GADEI_ERROR, "%s: too long for a socket's path", path);
    memcpy(learner->path, path, strlen(path) + 1);
    return GADEI_OK;
}

static int find_job(gadei_learner *learner, const char *job)
{
    if (!job || !*job)
        job = getenv("GADEI_PS_JOB");
    if (!job || !*job)
        return ps_fail(learner, GADEI_ERROR,
                       "which job? give its name, or start the program with gadei-ps run or attach, "
                       "or in a process with a gadei_ps.serve() (they set GADEI_PS_JOB)");
    snprintf(learner->target, sizeof learner->target, "%s", job);
    if (!strchr(job, '/')) {
        int result = check_job_name(learner, job);
        return result ? result : find_socket(learner, job);
    }
    if (strlen(job) >= sizeof learner->path)
        return ps_fail(learner, GADEI_ERROR, "%.300s: too long for a socket's path", job);
    memcpy(learner->path, job, strlen(job) + 1);
    return GADEI_OK;
}

static int open_control(gadei_learner *learner)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval limit = {(time_t)(ANSWER_NS / 1000000000ull), 0};
    static_assert(sizeof address.sun_path == sizeof learner->path, "path");
    memcpy(address.sun_path, learner->path, sizeof address.sun_path);
    learner->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (learner->socket < 0)
        return ps_fail(learner, GADEI_ERROR, "no socket: %s", strerror(errno));
    /* Also limits connect(), which waits while the watchdog's backlog is full. */
    setsockopt(learner->socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    while (connect(learner->socket, (struct sockaddr *)&address, sizeof address)) {
        if (errno == EINTR)
            continue;
        int missing = errno == ENOENT || errno == ECONNREFUSED;
        if (missing && strchr(learner->target, '/'))
            return ps_fail(learner, GADEI_ERROR,
                           "no job is running at the socket %s (a job's name has no '/'); "
                           "gadei-ps ls shows the jobs there are", learner->path);
        if (missing)
            return ps_fail(learner, GADEI_ERROR,
                           "no job '%s' is running (looked at %s); gadei-ps ls shows the jobs "
                           "there are", learner->target, learner->path);
        return ps_fail(learner, GADEI_ERROR, "%s: %s", learner->path, strerror(errno));
    }
    /* struct ucred, which the headers show only to _GNU_SOURCE */
    struct {
        pid_t pid;
        uid_t uid;
        gid_t gid;
    } peer = {0, geteuid(), 0};
    socklen_t bytes = sizeof peer;
    getsockopt(learner->socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes);
    learner->owner = peer.uid;
    return GADEI_OK;
}

/* -- requests ---------------------------------------------------------------------------------- */

/* Moves `count` bytes, or fails; the connection is then of no more use. */
static int exchange(gadei_learner *learner, short event, char *bytes, size_t count, uint64_t until)
{
    while (count) {
        uint64_t now = ps_now_ns();
        struct pollfd ready = {learner->socket, event, 0};
        int polled = now < until ? poll(&ready, 1, (int)((until - now) / 1000000) + 1) : 0;
        if (!polled)
            return ps_fail(learner, GADEI_ERROR, "%s: the watchdog does not answer", learner->path);
        ssize_t moved = -1;
        if (polled > 0)
            moved = event == POLLIN ? recv(learner->socket, bytes, count, MSG_DONTWAIT)
                                    : send(learner->socket, bytes, count,
                                           MSG_DONTWAIT | MSG_NOSIGNAL);
        learner->lost = moved == 0 || (moved < 0 && errno != EINTR && errno != EAGAIN);
        if (moved == 0)
            return ps_fail(learner, GADEI_ERROR, "%s: the watchdog has closed the connection",
                           learner->path);
        if (moved > 0) {
            bytes += moved;
            count -= (size_t)moved;
        } else if (errno != EINTR && errno != EAGAIN) {
            return ps_fail(learner, GADEI_ERROR, "%s: %s", learner->path, strerror(errno));
        }
    }
    return GADEI_OK;
}

/* *waits: whether this is only a note that the watchdog is at work on the request. */
static int read_reply(gadei_learner *learner, char *text, size_t length, struct json_field *fields,
                      size_t count, int *waits)
{
    int ok = 0;
    char note[64];
    char error[ERROR_BYTES - 1] = "refused without a reason", kind[32] = "";
    struct json_field about[] = {
        {"ok", TRUTH, &ok, 0, 0},
        {"error", TEXT, error, sizeof error, 0},
        {"kind", TEXT, kind, sizeof kind, 0},
        {"note", TEXT, note, sizeof note, 0},
    };
    /* Reads the reply twice, so that text of a refusal is not taken for a member of an answer. */
    if (!json_read(text, length, about, 4) || !about[0].found)
        return ps_fail(learner, GADEI_ERROR, "%s: the reply is malformed", learner->path);
    if (!ok) {
        int code = !strcmp(kind, "JobStopped")  ? GADEI_STOPPED
                   : !strcmp(kind, "JobFailed") ? GADEI_FAILED
                   : !strcmp(kind, "Evicted")   ? GADEI_EVICTED
                                                : GADEI_ERROR;
        return ps_fail(learner, code, "%s", error);
    }
    *waits = about[3].found != 0;
    if (*waits)
        return GADEI_OK;
    int whole = json_read(text, length, fields, count);
    for (size_t i = 0; i < count; i++)
        if (!whole || fields[i].found != 1)
            return ps_fail(learner, GADEI_ERROR, "%s: the reply has no proper %s", learner->path,
                           fields[i].key);
    return GADEI_OK;
}

/* Reads one message. *whole: whether the next one can be read after it. */
static int receive(gadei_learner *learner, struct json_field *fields, size_t count, uint64_t until,
                   int *whole, int *waits)
{
    unsigned char size[4];
    *whole = 0;
    int result = exchange(learner, POLLIN, (char *)size, 4, until);
    if (result)
        return result;
    size_t length = (size_t)size[0] << 24 | (size_t)size[1] << 16 | (size_t)size[2] << 8 | size[3];
    char *text = length <= MAX_REPLY ? malloc(length + 1) : NULL;
    if (!text)
        return ps_fail(learner, GADEI_ERROR, "%s: the reply is too long", learner->path);
    result = exchange(learner, POLLIN, text, length, until);
    if (!result) {
        *whole = 1;
        result = read_reply(learner, text, length, fields, count, waits);
    }
    free(text);
    return result;
}

static int request_once(gadei_learner *learner, const char *json, struct json_field *fields,
                        size_t count)
{
    if (learner->socket < 0)
        return ps_fail(learner, GADEI_ERROR, "%s: the connection is lost", learner->path);
    size_t length = strlen(json);
    int whole = 0, waits = 0;
    char message[1024];
    assert(length + 4 <= sizeof message);
    for (int i = 0; i < 4; i++)
        message[i] = (char)(length >> (24 - 8 * i) & 0xff);
    memcpy(message + 4, json, length);
    int result = exchange(learner, POLLOUT, message, length + 4, ps_now_ns() + ANSWER_NS);
    if (!result || learner->lost) /* a watchdog without room answers before it is asked, and closes */
        do { /* as long as there is progress, the watchdog takes its time */
            waits = 0;
            result = receive(learner, fields, count, ps_now_ns() + ANSWER_NS, &whole, &waits);
        } while (!result && waits);
    if (!whole) {
        close(learner->socket); /* a late reply to this request would be taken for the next one's */
        learner->socket = -1;
    }
    return result;
}

/* Waits for another watchdog at the job's socket; 0 if none comes in time. */
static int reconnect(gadei_learner *learner, uint64_t until)
{
    const struct timespec nap = {0, RECONNECT_NS};
    while (ps_now_ns() < until) {
        if (!open_control(learner))
            return 1;
        if (learner->socket >= 0)
            close(learner->socket);
        learner->socket = -1;
        nanosleep(&nap, NULL);
    }
    return 0;
}

/* Whether the job's memory is there, of which only a watchdog may be missing. */
static int is_in_memory(const gadei_learner *learner)
{
    const char *slash = strrchr(learner->path, '/'), *dot = strrchr(learner->path, '.');
    char control[PATH_MAX];
    if (!slash || !dot || dot < slash)
        return 0;
    snprintf(control, sizeof control, "/dev/shm/gadei-ps.%u.%.*s.control", (unsigned)geteuid(),
             (int)(dot - slash - 1), slash + 1);
    return !access(control, F_OK);
}

/* The command that has started this learner replaces a watchdog that dies: the next one is awaited
 * while the job is in memory. */
int ps_connect(gadei_learner *learner, const char *job)
{
    int result = find_job(learner, job);
    if (result || !(result = open_control(learner)))
        return result;
    int is_launched = (!job || !*job) && getenv("GADEI_PS_LEARNER");
    if (learner->socket >= 0)
        close(learner->socket);
    learner->socket = -1;
    const uint64_t until = ps_now_ns() + ANSWER_NS;
    while (result && is_launched && is_in_memory(learner) && ps_now_ns() < until)
        result = !reconnect(learner, ps_now_ns() + 10 * RECONNECT_NS);
    return result ? GADEI_ERROR : GADEI_OK;
}

int ps_request(gadei_learner *learner, const char *json, struct json_field *fields, size_t count,
               uint64_t patience_ns)
{
    uint64_t until = ps_now_ns() + patience_ns;
    for (;;) {
        learner->lost = 0;
        int result = request_once(learner, json, fields, count);
        if (!learner->lost)
            return result;
        char why[sizeof learner->error];
        memcpy(why, learner->error, sizeof why);
        if (!reconnect(learner, until)) {
            memcpy(learner->error, why, sizeof why);
            return result;
        }
    }
}
