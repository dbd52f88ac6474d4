/* eventfds.c -- the list of eventfds, and which of them to signal. */
#include "eventfds.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>

struct nvmeio_eventfd {
    struct nvmeio_eventfd *next;
    int fd;
    bool armed;
};

/* Return the link that points to the entry of `fd`. If there is none, return the last
 * link, which is NULL. */
static struct nvmeio_eventfd **find(struct nvmeio_eventfds *eventfds, int fd)
{
    struct nvmeio_eventfd **place = &eventfds->first;

    while (*place && (*place)->fd != fd)
        place = &(*place)->next;
    return place;
}

int nvmeio_eventfds_arm(struct nvmeio_eventfds *eventfds, int fd)
{
    struct nvmeio_eventfd **place = find(eventfds, fd);

    if (!*place && (*place = calloc(1, sizeof(**place))))
        (*place)->fd = fd;
    if (!*place)
        return -ENOMEM;
    eventfds->armed += !(*place)->armed;
    (*place)->armed = true;
    return 0;
}

void nvmeio_eventfds_remove(struct nvmeio_eventfds *eventfds, int fd)
{
    struct nvmeio_eventfd **place = find(eventfds, fd), *found = *place;

    if (!found)
        return;
    *place = found->next;
    eventfds->armed -= found->armed;
    free(found);
}

void nvmeio_eventfds_clear(struct nvmeio_eventfds *eventfds)
{
    while (eventfds->first)
        nvmeio_eventfds_remove(eventfds, eventfds->first->fd);
}

void nvmeio_eventfds_signal(struct nvmeio_eventfds *eventfds)
{
    for (struct nvmeio_eventfd *e = eventfds->first; e; e = e->next) {
        /* This fails only if the counter is full, and then the loop wakes anyway. */
        if (e->armed)
            eventfd_write(e->fd, 1);
        e->armed = false;
    }
    eventfds->armed = 0;
}
