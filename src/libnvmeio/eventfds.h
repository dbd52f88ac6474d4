/* eventfds.h -- the eventfds of event loops that wait for requests of a handle.
 *
 * An eventfd is signalled once, and again only after its owner has asked for it. So a
 * busy loop needs no system call per completion. The queue's mutex guards them: an
 * owner that has stopped watching its eventfd may close it. */
#ifndef NVMEIO_EVENTFDS_H
#define NVMEIO_EVENTFDS_H

struct nvmeio_eventfds {
    struct nvmeio_eventfd *first;
    unsigned armed; /* how many of these are to be signalled */
};

/* Have the next nvmeio_eventfds_signal() signal an eventfd: 0 or -ENOMEM. */
int nvmeio_eventfds_arm(struct nvmeio_eventfds *eventfds, int fd);

/* Remove one, or all. */
void nvmeio_eventfds_remove(struct nvmeio_eventfds *eventfds, int fd);
void nvmeio_eventfds_clear(struct nvmeio_eventfds *eventfds);

void nvmeio_eventfds_signal(struct nvmeio_eventfds *eventfds);

#endif
