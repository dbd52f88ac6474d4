/* system.h -- how much of the machine this process may use. */
#ifndef NVMEIO_SYSTEM_H
#define NVMEIO_SYSTEM_H

#include <nvmeio/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Processors that this thread may run on, no more than what the quota of its control
 * group comes to; at least 1.  The quota is looked up once. */
NVMEIO_API unsigned nvmeio_cpu_count(void);

/* How many threads a team of OpenMP that this thread leads may have: `wanted`, or
 * fewer. One in a child of a fork(), where GNU OpenMP would wait for its parent's
 * threads for ever; and no more than can be started, for it ends the process where one
 * cannot. */
NVMEIO_API unsigned nvmeio_team_size(unsigned wanted);

/* Bytes of memory: that of the machine, or the limit of the control group where that is
 * less.  Looked up once. */
NVMEIO_API uint64_t nvmeio_memory_bytes(void);

#ifdef __cplusplus
}
#endif
#endif
