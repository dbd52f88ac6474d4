/* ends.h -- how far the writes to a file reach, by whichever open of it they come. */
#ifndef NVMEIO_ENDS_H
#define NVMEIO_ENDS_H

#include <stdint.h>

/* Of a file, by its identity: what all opens of it in this process have in common. */
struct nvmeio_ends;

/* That of a file, for an open of it; NULL: no memory. */
struct nvmeio_ends *nvmeio_ends_join(uint64_t device, uint64_t inode);

/* Also in a child that has inherited the open, which may do nothing else with it. */
void nvmeio_ends_leave(struct nvmeio_ends *ends);

/* Note that a write reaches to `end`, before it does. */
void nvmeio_ends_note(struct nvmeio_ends *ends, int64_t end);

/* Return how far all writes reach that were noted, but for one that reaches to `end`;
 * INT64_MAX where a forked child may write as well.  No write is noted until
 * nvmeio_ends_release(). */
int64_t nvmeio_ends_hold(struct nvmeio_ends *ends, int64_t end);
void nvmeio_ends_release(struct nvmeio_ends *ends);

#endif
