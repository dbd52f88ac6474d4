/* runs.h -- requests of many records, which are cut run by run.
 *
 * What records a run has is records.h's.  The handle's mutex is held in all of them
 * once the request is submitted. */
#ifndef NVMEIO_RUNS_H
#define NVMEIO_RUNS_H

#include "handle_internal.h"
#include "records.h"
#include "request_internal.h"

/* A gather or scatter as nvmeio_request_new() makes transfers; takes over the records.
 */
struct nvmeio_request *nvmeio_request_new_gather(struct nvmeio_handle *handle,
                                                 const struct nvmeio_gather *gather,
                                                 struct nvmeio_records *records);

/* The span that ends the current round: those before the edges, or the edges.  What is
 * no gather has one round. */
unsigned nvmeio_runs_round_end(const struct nvmeio_request *request);

/* Go to the next run that has anything to cut, in this round or the second one. */
void nvmeio_runs_next(struct nvmeio_request *request);

/* Begin the current run again, and do without bounces from now on: nothing is merged,
 * and the page cache serves where the device cannot.  False where that is too late. */
bool nvmeio_runs_unmerge(struct nvmeio_request *request);

/* Once all of a gather is cut and back: read each record by itself that has failed with
 * others, whose bytes may have been at fault.  False where there are none, or they were
 * read so already. */
bool nvmeio_runs_retry(struct nvmeio_request *request);

/* Find what has failed, once the request is over: what was never cut has, with the
 * rest.  Without the mutex. */
void nvmeio_runs_settle(struct nvmeio_request *request);

#endif
