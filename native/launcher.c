/*
 * Starts a program that gets a signal when the thread that has started it ends. A program of its
 * own: between fork() and exec() a process with threads may run hardly anything, and no Python.
 *
 *     _launcher SIGNAL PARENT OOM_SCORE ERRORS PROGRAM ARGUMENT...
 *
 * SIGNAL is 0 if the program is to live on, PARENT the pid of the starting process, and OOM_SCORE
 * the text for oom_score_adj, or empty. If the program cannot be executed, errno is written to the
 * descriptor ERRORS; else that is closed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static void set_oom_score(const char *score)
{
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    /* Where it is forbidden, the program has the score of its parent. */
    ssize_t written = write(fd, score, strlen(score));
    (void)written;
    close(fd);
}

/* As Popen of Python: execvp() would give a script without a first line `#!` to the shell. */
static int execute(char **argument)
{
    const char *name = argument[0], *at = getenv("PATH");
    char path[PATH_MAX];
    if (strchr(name, '/')) {
        execv(name, argument);
        return errno;
    }
    int why = ENOENT;
    for (at = at ? at : "/bin:/usr/bin";; at++) {
        const char *end = strchrnul(at, ':');
        int bytes = (int)(end - at);
        int length = snprintf(path, sizeof path, "%.*s/%s", bytes ? bytes : 1, bytes ? at : ".", name);
        if (length < (int)sizeof path) {
            execv(path, argument);
            if (errno != ENOENT && errno != ENOTDIR)
                why = errno;
        }
        at = end;
        if (!*at)
            return why;
    }
}

int main(int count, char **argument)
{
    if (count < 6)
        return 2;
    int number = atoi(argument[1]), parent = atoi(argument[2]), errors = atoi(argument[4]);
    if (number && prctl(PR_SET_PDEATHSIG, (unsigned long)number, 0, 0, 0) < 0)
        return 1;
    if (number && getppid() != parent)
        return 1; /* the parent died before the request was in place */
    if (*argument[3])
        set_oom_score(argument[3]);
    fcntl(errors, F_SETFD, FD_CLOEXEC);
    int why = execute(argument + 5);
    return write(errors, &why, sizeof why) == sizeof why ? 127 : 126;
}
