/*
 * Leases: who may write. A lease is a robust mutex in the control segment. The thread that holds it
 * holds it until it ends; the kernel gives it free as soon as that thread can no longer run, however
 * it ended, and long before the memory of its process is torn down and a pidfd tells of the death.
 * Only a server that stands by ever waits for one.
 */
#ifndef PS_LEASE_H
#define PS_LEASE_H

#include <stdint.h>

enum { PS_LEASE_CLEAN = 0, PS_LEASE_DIED = 1 }; /* how the one who held it before let go */

/* Makes a lease, 64 bytes at `lease`; when no process that knows it is alive. 0 or -errno. */
int ps_lease_make(uint64_t lease);

/* Takes it for the calling thread within timeout_ns. PS_LEASE_*, PS_TIMEOUT, or -1000 - errno. */
int ps_lease_take(uint64_t lease, uint64_t timeout_ns);

/* The calling thread, which holds it, lets it go. */
void ps_lease_release(uint64_t lease);

#endif
