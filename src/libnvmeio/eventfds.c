/* eventfds.c -- which eventfds to signal. */
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

/* Where the pointer to the entry of `fd` is, or else the last pointer, which is
 * NULL. */
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
        /* It fails if the counter is full; the loop is awake then anyway. */
        if (e->armed)
            eventfd_write(e->fd, 1);
        e->armed = false;
    }
    eventfds->armed = 0;
}
