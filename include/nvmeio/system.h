/* system.h -- how much of the machine this process may use. */
#ifndef NVMEIO_SYSTEM_H
#define NVMEIO_SYSTEM_H

#include <nvmeio/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Return the number of processors that this thread may run on, limited by the quota of
 * its control group; at least 1.  The quota is read once. */
NVMEIO_API unsigned nvmeio_cpu_count(void);

/* Return how many threads an OpenMP team of this thread may have, at most `wanted`.
 * 1 in a forked child, where GNU OpenMP would wait for its parent's threads; and no
 * more than can be started, because OpenMP ends the process if a thread cannot start.
 */
NVMEIO_API unsigned nvmeio_team_size(unsigned wanted);

/* Return the memory in bytes: the machine's, or the limit of the control group if that
 * is less.  Read once. */
NVMEIO_API uint64_t nvmeio_memory_bytes(void);

#ifdef __cplusplus
}
#endif
#endif
