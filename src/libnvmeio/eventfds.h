/* eventfds.h -- the eventfds of event loops that wait for requests of a handle.
 *
 * An eventfd is signalled once, and again only after its owner has armed it again. So a
 * busy loop needs no system call per completion. The queue's mutex guards the list. So
 * nothing signals an eventfd once it is removed, and its owner may close it. */
#ifndef NVMEIO_EVENTFDS_H
#define NVMEIO_EVENTFDS_H

struct nvmeio_eventfds {
    struct nvmeio_eventfd *first;
    unsigned armed; /* how many the next nvmeio_eventfds_signal() signals */
};

/* Make the next nvmeio_eventfds_signal() signal `fd`. Returns 0 or -ENOMEM. */
int nvmeio_eventfds_arm(struct nvmeio_eventfds *eventfds, int fd);

/* Remove one, or all. */
void nvmeio_eventfds_remove(struct nvmeio_eventfds *eventfds, int fd);
void nvmeio_eventfds_clear(struct nvmeio_eventfds *eventfds);

void nvmeio_eventfds_signal(struct nvmeio_eventfds *eventfds);

#endif
