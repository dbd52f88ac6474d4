/* eventfds.h -- the eventfds of event loops that wait for requests of a handle.
 *
 * An eventfd is signalled once, and then only after its owner has asked again: a loop
 * that is busy costs no system call for each completion.  The queue's mutex guards
 * them: an owner that has unwatched its eventfd may close it. */
#ifndef NVMEIO_EVENTFDS_H
#define NVMEIO_EVENTFDS_H

struct nvmeio_eventfds {
    struct nvmeio_eventfd *first;
    unsigned armed; /* of these, to be signalled */
};

/* Have an eventfd signalled by the next nvmeio_eventfds_signal(): 0 or -ENOMEM. */
int nvmeio_eventfds_arm(struct nvmeio_eventfds *eventfds, int fd);

/* Forget one, or all. */
void nvmeio_eventfds_remove(struct nvmeio_eventfds *eventfds, int fd);
void nvmeio_eventfds_clear(struct nvmeio_eventfds *eventfds);

void nvmeio_eventfds_signal(struct nvmeio_eventfds *eventfds);

#endif
