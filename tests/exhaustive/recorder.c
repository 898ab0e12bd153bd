/*
 * Records what a program changes below a directory, for the count of power cuts (disk.py).
 *
 * Preloaded (LD_PRELOAD), and controlled by counts_record(). A record is one line, behind which a
 * write has its bytes:
 *
 *     create INODE PATH      truncate INODE SIZE     fsync INODE
 *     mkdir INODE PATH       write INODE AT SIZE     rename FROM<tab>TO
 *     link INODE PATH        unlink PATH             rmdir PATH
 *     exchange FROM<tab>TO
 *
 * A record is appended when the call has succeeded. Whether a call was missed is seen when the records
 * are played back: the result must be what lies in the directory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static char root[PATH_MAX], journal[PATH_MAX];
static long die_at, done;

/* From now on, what is done below `where` is recorded in the file `log`. The process kills itself
 * before its operation number `die`, counted from 1; 0: never. */
void counts_record(const char *where, const char *log, long die)
{
    snprintf(root, sizeof root, "%s", where);
    snprintf(journal, sizeof journal, "%s", log);
    die_at = die;
    done = 0;
}

/* -- what is recorded -------------------------------------------------------------------------- */

static void record(const void *bytes, size_t size, const char *format, ...)
{
    char line[3 * PATH_MAX];
    va_list given;
    int before = errno;
    va_start(given, format);
    int length = vsnprintf(line, sizeof line - 1, format, given);
    va_end(given);
    line[length++] = '\n';
    struct iovec parts[] = {{line, (size_t)length}, {(void *)bytes, size}};
    int fd = (int)syscall(SYS_openat, AT_FDCWD, journal, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0 || syscall(SYS_writev, fd, parts, 2) != length + (ssize_t)size)
        abort();
    syscall(SYS_close, fd);
    errno = before;
}

static int below(const char *path)
{
    size_t length = strlen(root);
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

/* The absolute path of a name, without links on the way to it; whether it lies below the root. */
static int find(int folder, const char *name, char out[PATH_MAX])
{
    char whole[2 * PATH_MAX], parent[PATH_MAX], *end;
    if (!*root || !name)
        return 0;
    if (*name == '/') {
        snprintf(whole, sizeof whole, "%s", name);
    } else {
        char from[PATH_MAX], link[64];
        ssize_t length = -1;
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        if (folder == AT_FDCWD)
            length = getcwd(from, sizeof from) ? (ssize_t)strlen(from) : -1;
        else
            length = syscall(SYS_readlinkat, AT_FDCWD, link, from, sizeof from - 1);
        if (length < 0)
            return 0;
        from[length] = 0;
        snprintf(whole, sizeof whole, "%s/%s", from, name);
    }
    while ((end = strrchr(whole, '/')) && end > whole && !end[1])
        *end = 0;
    char *last = strrchr(whole, '/');
    *last = 0;
    if (!realpath(*whole ? whole : "/", parent))
        return 0;
    if (snprintf(out, PATH_MAX, "%s/%s", parent, last + 1) >= PATH_MAX)
        abort();
    return below(out);
}

/* The inode behind a descriptor of something below the root; 0 for anything else. */
static unsigned long inode(int fd)
{
    char link[64], path[PATH_MAX];
    struct stat status;
    int before = errno;
    if (!*root)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    int mine = length > 0 && below(path) && !fstat(fd, &status) &&
               (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode));
    errno = before;
    return mine ? status.st_ino : 0;
}

static unsigned long inode_at(const char *path)
{
    struct stat status;
    int before = errno;
    unsigned long found = lstat(path, &status) ? 0 : status.st_ino;
    errno = before;
    return found;
}

/* Before each operation. */
static void step(void)
{
    if (die_at && ++done == die_at)
        kill(getpid(), SIGKILL);
}

/* -- files ------------------------------------------------------------------------------------- */

static int open_(int folder, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    int mine = (flags & (O_CREAT | O_TRUNC)) && (flags & O_TMPFILE) != O_TMPFILE &&
               find(folder, name, path);
    unsigned long before = mine ? inode_at(path) : 0;
    if (mine)
        step();
    int fd = NEXT(openat)(folder, name, flags, mode);
    if (fd >= 0 && mine && !before)
        record(NULL, 0, "create %lu %s", inode_at(path), path);
    else if (fd >= 0 && mine && (flags & O_TRUNC))
        record(NULL, 0, "truncate %lu 0", before);
    return fd;
}

#define OPEN(name, folder)                                                                         \
    {                                                                                              \
        mode_t mode = 0;                                                                           \
        if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                                 \
            va_list rest;                                                                          \
            va_start(rest, flags);                                                                 \
            mode = va_arg(rest, mode_t);                                                           \
            va_end(rest);                                                                          \
        }                                                                                          \
        return open_(folder, name, flags, mode);                                                   \
    }
int open(const char *name, int flags, ...) OPEN(name, AT_FDCWD)
int open64(const char *name, int flags, ...) OPEN(name, AT_FDCWD)
int openat(int folder, const char *name, int flags, ...) OPEN(name, folder)
int openat64(int folder, const char *name, int flags, ...) OPEN(name, folder)

static ssize_t wrote(unsigned long number, long long at, const void *bytes, ssize_t size)
{
    if (number && size > 0)
        record(bytes, (size_t)size, "write %lu %lld %zd", number, at, size);
    return size;
}

static long long position(int fd)
{
    if (fcntl(fd, F_GETFL) & O_APPEND) {
        struct stat status;
        return fstat(fd, &status) ? 0 : status.st_size;
    }
    return lseek(fd, 0, SEEK_CUR);
}

ssize_t write(int fd, const void *bytes, size_t size)
{
    unsigned long number = inode(fd);
    long long at = number ? position(fd) : 0;
    if (number)
        step();
    return wrote(number, at, bytes, NEXT(write)(fd, bytes, size));
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t at)
{
    unsigned long number = inode(fd);
    if (number)
        step();
    return wrote(number, at, bytes, NEXT(pwrite64)(fd, bytes, size, at));
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at)
{
    return pwrite64(fd, bytes, size, at);
}

/* As single writes: a kernel may do so, too. */
ssize_t writev(int fd, const struct iovec *parts, int count)
{
    ssize_t all = 0;
    if (!inode(fd))
        return NEXT(writev)(fd, parts, count);
    for (int i = 0; i < count; i++) {
        ssize_t one = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (one < 0)
            return all ? all : one;
        all += one;
        if ((size_t)one < parts[i].iov_len)
            break;
    }
    return all;
}

int ftruncate64(int fd, off64_t size)
{
    unsigned long number = inode(fd);
    if (number)
        step();
    int result = NEXT(ftruncate64)(fd, size);
    if (!result && number)
        record(NULL, 0, "truncate %lu %lld", number, (long long)size);
    return result;
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int sync_(int (*call)(int), int fd)
{
    unsigned long number = inode(fd);
    if (number)
        step();
    int result = call(fd);
    if (!result && number)
        record(NULL, 0, "fsync %lu", number);
    return result;
}

int fsync(int fd) { return sync_(NEXT(fsync), fd); }
int fdatasync(int fd) { return sync_(NEXT(fdatasync), fd); }

/* -- names ------------------------------------------------------------------------------------- */

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    char a[PATH_MAX], b[PATH_MAX];
    int mine = find(from, old, a) | find(to, new, b);
    if (mine)
        step();
    int result = (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (!result && mine)
        record(NULL, 0, "%s %s\t%s", flags & RENAME_EXCHANGE ? "exchange" : "rename", a, b);
    return result;
}

int renameat(int from, const char *old, int to, const char *new)
{
    return renameat2(from, old, to, new, 0);
}

int rename(const char *old, const char *new)
{
    return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0);
}

int linkat(int from, const char *old, int to, const char *new, int flags)
{
    char a[PATH_MAX], b[PATH_MAX];
    int mine = find(from, old, a) | find(to, new, b);
    if (mine)
        step();
    int result = NEXT(linkat)(from, old, to, new, flags);
    if (!result && mine)
        record(NULL, 0, "link %lu %s", inode_at(a), b);
    return result;
}

int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int folder, const char *name, int flags)
{
    char path[PATH_MAX];
    int mine = find(folder, name, path);
    if (mine)
        step();
    int result = NEXT(unlinkat)(folder, name, flags);
    if (!result && mine)
        record(NULL, 0, "%s %s", flags & AT_REMOVEDIR ? "rmdir" : "unlink", path);
    return result;
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode)
{
    char path[PATH_MAX];
    int mine = find(folder, name, path);
    if (mine)
        step();
    int result = NEXT(mkdirat)(folder, name, mode);
    if (!result && mine)
        record(NULL, 0, "mkdir %lu %s", inode_at(path), path);
    return result;
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

/* A socket's name; disk.py takes it for that of an empty file. */
int bind(int fd, const struct sockaddr *address, socklen_t size)
{
    char path[PATH_MAX];
    const struct sockaddr_un *local = (const struct sockaddr_un *)address;
    int mine = address->sa_family == AF_UNIX && local->sun_path[0] &&
               find(AT_FDCWD, local->sun_path, path);
    if (mine)
        step();
    int result = NEXT(bind)(fd, address, size);
    if (!result && mine)
        record(NULL, 0, "create %lu %s", inode_at(path), path);
    return result;
}
