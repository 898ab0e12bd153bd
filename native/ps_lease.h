/*
 * Leases decide which process may write. A lease is a robust mutex in the control segment. A thread
 * that takes it keeps it until the thread ends. The kernel releases it as soon as that thread can
 * no longer run, however it ended: long before the memory of its process is freed and a pidfd
 * reports the death. Only a standby server waits for a lease.
 */
#ifndef PS_LEASE_H
#define PS_LEASE_H

#include <stdint.h>

enum { PS_LEASE_CLEAN = 0, PS_LEASE_DIED = 1 }; /* how the previous holder released it */

/* Makes a lease of 64 bytes at `lease`, while no other process uses it. Returns 0 or -errno. */
int ps_lease_make(uint64_t lease);

/* Takes the lease for the calling thread within timeout_ns. Returns PS_LEASE_CLEAN, PS_LEASE_DIED,
 * PS_TIMEOUT, or -1000 - errno. */
int ps_lease_take(uint64_t lease, uint64_t timeout_ns);

/* Releases the lease, which the calling thread must hold. */
void ps_lease_release(uint64_t lease);

#endif
