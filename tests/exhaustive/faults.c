/*
 * Makes the n-th call of a kind fail, in the processes of one role: for the count of failing calls.
 *
 * Preloaded (LD_PRELOAD). A plan lies in memory that all forks share: counts_plan() sets it, and
 * counts_role() says which role the calling process has. Calls are counted over all processes of that
 * role, from the plan on. Those that only load code do not count. A negative number: the call of this
 * number fails, and all after it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define POPULATE_WRITE 23 /* of madvise: makes pages; posix_fallocate() is the second way */

#ifndef COUNTS_ROOM
#define COUNTS_ROOM (1 << 18)
#endif

enum kind { OPEN, MMAP, FTRUNCATE, FALLOCATE, FSYNC, RENAME, READ, WRITE, PIDFD_OPEN, CLONE, VFORK, OPENDIR,
            SENDMSG, RECVMSG };

static struct plan {
    int role, kind, error;
    long number; /* of the call that fails, from 1; 0: none */
    long count;  /* of such calls so far */
    int failed;
    char what[256]; /* what failed */
    size_t used;
    char all[COUNTS_ROOM]; /* where none fails: what was called, a line each */
} *plan;
static int role;

__attribute__((constructor)) static void begin(void)
{
    plan = (struct plan *)syscall(SYS_mmap, NULL, sizeof *plan, PROT_READ | PROT_WRITE,
                                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void counts_role(int given) { role = given; }

void counts_plan(int given, int kind, long number, int error)
{
    memset(plan, 0, sizeof *plan);
    plan->kind = kind;
    plan->number = number;
    plan->error = error;
    plan->role = given;
}

long counts_seen(void) { return __atomic_load_n(&plan->count, __ATOMIC_SEQ_CST); }
/* NULL if the list has no room for all. */
const char *counts_all(void) { return plan->used + 1 < sizeof plan->all ? plan->all : NULL; }
const char *counts_failed(void) { return plan->failed ? plan->what : ""; }

/* Code and its places: where modules are looked for and read. */
static int loads(const char *path)
{
    size_t length = strlen(path);
    return strstr(path, "/lib/python") || strstr(path, "/gadei_ps/") || (length > 3 && !strcmp(path + length - 3, ".py")) ||
           (length > 4 && !strcmp(path + length - 4, ".pyc"));
}

static int mine(enum kind kind)
{
    return role && role == plan->role && plan->kind == (int)kind;
}

/* Whether this call fails: errno is set then. */
static int fails(enum kind kind, const char *path)
{
    if (!mine(kind) || loads(path))
        return 0;
    long count = __atomic_add_fetch(&plan->count, 1, __ATOMIC_SEQ_CST);
    if (!plan->number) {
        size_t length = strlen(path);
        size_t at = __atomic_fetch_add(&plan->used, length + 1, __ATOMIC_SEQ_CST);
        if (at + length + 2 < sizeof plan->all) {
            memcpy(plan->all + at, path, length);
            plan->all[at + length] = '\n';
        }
    }
    if (count != plan->number && (plan->number >= 0 || count < -plan->number))
        return 0;
    snprintf(plan->what, sizeof plan->what, "%s", path);
    __atomic_store_n(&plan->failed, 1, __ATOMIC_SEQ_CST);
    errno = plan->error;
    return 1;
}

static int fails_at(enum kind kind, int fd)
{
    char link[64], path[PATH_MAX];
    if (!mine(kind) || ((kind == READ || kind == WRITE) && fd == 2))
        return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    errno = before;
    return fails(kind, path);
}

/* -- calls --------------------------------------------------------------------------------------- */

#define OPEN_(name, folder)                                                                        \
    {                                                                                              \
        mode_t mode = 0;                                                                           \
        if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                                 \
            va_list rest;                                                                          \
            va_start(rest, flags);                                                                 \
            mode = va_arg(rest, mode_t);                                                           \
            va_end(rest);                                                                          \
        }                                                                                          \
        return fails(OPEN, name) ? -1 : (int)syscall(SYS_openat, folder, name, flags, mode);       \
    }
int open(const char *name, int flags, ...) OPEN_(name, AT_FDCWD)
int open64(const char *name, int flags, ...) OPEN_(name, AT_FDCWD)
int openat(int folder, const char *name, int flags, ...) OPEN_(name, folder)
int openat64(int folder, const char *name, int flags, ...) OPEN_(name, folder)
int shm_open(const char *name, int flags, mode_t mode)
{
    return fails(OPEN, name) ? -1 : NEXT(shm_open)(name, flags, mode);
}

/* /proc/PID/fd does not count: there are as many as processes on the machine, and the tests' own. */
DIR *opendir(const char *name)
{
    const char *end = strrchr(name, '/');
    int counts = strncmp(name, "/proc/", 6) || !end || strcmp(end, "/fd");
    return counts && fails(OPENDIR, name) ? NULL : NEXT(opendir)(name);
}

/* Arenas and stacks of Python itself do not count, as malloc's memory does not. */
static int of_interpreter(size_t size) { return size == 1 << 20 || size == 16 << 10; }

void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t offset)
{
    if (mine(MMAP) && (fd >= 0 ? fails_at(MMAP, fd) : !of_interpreter(size) && fails(MMAP, "?")))
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, size, protection, flags, fd, offset);
}
void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    return mmap64(at, size, protection, flags, fd, offset);
}

int ftruncate64(int fd, off64_t size)
{
    return fails_at(FTRUNCATE, fd) ? -1 : (int)syscall(SYS_ftruncate, fd, size);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int posix_fallocate64(int fd, off64_t at, off64_t size)
{
    return fails_at(FALLOCATE, fd) ? errno : NEXT(posix_fallocate64)(fd, at, size);
}
int posix_fallocate(int fd, off_t at, off_t size) { return posix_fallocate64(fd, at, size); }
/* Its first way always fails, or the second would never be taken. */
int madvise(void *at, size_t size, int advice)
{
    if (advice == POPULATE_WRITE && mine(FALLOCATE)) {
        errno = ENOMEM;
        return -1;
    }
    return (int)syscall(SYS_madvise, at, size, advice);
}

int fsync(int fd) { return fails_at(FSYNC, fd) ? -1 : (int)syscall(SYS_fsync, fd); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    return fails(RENAME, new) ? -1 : (int)syscall(SYS_renameat2, from, old, to, new, flags);
}
int rename(const char *old, const char *new)
{
    return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0);
}
int renameat(int from, const char *old, int to, const char *new)
{
    return renameat2(from, old, to, new, 0);
}

ssize_t read(int fd, void *to, size_t size)
{
    return fails_at(READ, fd) ? -1 : syscall(SYS_read, fd, to, size);
}
ssize_t pread64(int fd, void *to, size_t size, off64_t at)
{
    return fails_at(READ, fd) ? -1 : syscall(SYS_pread64, fd, to, size, at);
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags)
{
    return fails_at(READ, fd) ? -1 : NEXT(preadv64v2)(fd, parts, count, at, flags);
}
ssize_t write(int fd, const void *bytes, size_t size)
{
    return fails_at(WRITE, fd) ? -1 : syscall(SYS_write, fd, bytes, size);
}
ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t at)
{
    return fails_at(WRITE, fd) ? -1 : syscall(SYS_pwrite64, fd, bytes, size, at);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    return fails_at(SENDMSG, fd) ? -1 : syscall(SYS_sendmsg, fd, message, flags);
}
ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    return fails_at(RECVMSG, fd) ? -1 : syscall(SYS_recvmsg, fd, message, flags);
}

long syscall(long number, ...)
{
    static long (*next)(long, ...);
    long a[6];
    va_list given;
    va_start(given, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(given, long);
    va_end(given);
    if (number == SYS_pidfd_open && fails(PIDFD_OPEN, "pidfd"))
        return -1;
    if (!next)
        next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

pid_t fork(void) { return fails(CLONE, "fork") ? -1 : NEXT(fork)(); }
/* A function cannot call vfork() for its caller; what starts a program by it is content with fork(). */
pid_t vfork(void) { return fails(VFORK, "vfork") ? -1 : NEXT(fork)(); }

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with)
{
    return fails(CLONE, "thread") ? errno : NEXT(pthread_create)(thread, how, run, with);
}
