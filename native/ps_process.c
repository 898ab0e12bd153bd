/* See ps_process.h. */
#include "ps_process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ps_atomic.h"

uint64_t ps_start_ticks(int32_t pid)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd;
    ssize_t count;
    do
        fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    if (fd < 0)
        return errno == ENOENT || errno == ESRCH ? 0 : PS_START_UNKNOWN;
    do
        count = read(fd, text, sizeof text - 1);
    while (count < 0 && errno == EINTR);
    int why = errno;
    close(fd);
    errno = why;
    if (count <= 0)
        return count == 0 || why == ESRCH ? 0 : PS_START_UNKNOWN;
    text[count] = '\0';
    /* The second field is the program's name in parentheses and may hold blanks and parentheses. */
    char *at = strrchr(text, ')');
    if (!at || at[1] != ' ')
        return 0;
    at += 2;
    /* A thread group whose first thread has ended shows that thread's state. The count of threads
     * has that one in it, until all have ended and the process is waited for. */
    int ended = *at == 'Z' || *at == 'X';
    for (int field = 3; field < 22; field++, at++) {
        if (field == 20 && ended && strtoull(at, NULL, 10) < 2)
            return 0;
        if (!(at = strchr(at, ' ')))
            return 0;
    }
    return strtoull(at, NULL, 10);
}

static int alive(const int32_t *pid_word, const uint64_t *start_word)
{
    int32_t pid = __atomic_load_n(pid_word, __ATOMIC_RELAXED);
    uint64_t start = ps_load_acquire(start_word);
    uint64_t told = pid > 0 && start ? ps_start_ticks(pid) : 0;
    /* A process of which nothing is known may live: to wait for it is the lesser harm. */
    return told && (told == start || told == PS_START_UNKNOWN);
}

int ps_job_lives(const struct ps_control *control)
{
    return alive(&control->lease_pid, &control->lease_start) ||
           alive(&control->watchdog_pid, &control->watchdog_start);
}
