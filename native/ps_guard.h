/*
 * Memory that another process can take away: a learner may truncate the file of its ring, and a
 * load or store there would end this process with SIGBUS.
 *
 * A guarded range survives that. The handler stores a value into a word of the caller's, which says
 * that the memory is lost, and lays zeros over the whole range; the load or store is then repeated.
 * The word is stored first: a thread that has read such a zero sees it. What is not in a guarded
 * range goes to the handler that was there before.
 */
#ifndef PS_GUARD_H
#define PS_GUARD_H

#include <stdint.h>

#define PS_GUARDS 1024
#define PS_READ_ONLY 16

/* Any process; one thread at a time. Guards `bytes` bytes from `address` on, whole pages of one
 * mapping, until ps_unguard. The first call installs the handler. Returns 0 or a negative errno:
 * -ENOSPC with PS_GUARDS ranges guarded. */
int ps_guard(uint64_t address, uint64_t bytes, uint64_t word, uint64_t value);

/* A learner: a store into these `bytes` from `address` on, which can only be read, says so in a line
 * on standard error before it ends the process as ever. bytes 0: no longer. One thread at a time;
 * ranges beyond the first PS_READ_ONLY go without the line. */
void ps_tell_of_stores(uint64_t address, uint64_t bytes);

/* As ps_guard, by one thread at a time, once nothing is read there any more. */
void ps_unguard(uint64_t address);

#endif
