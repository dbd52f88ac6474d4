/* closer.h -- threads for close(2) on file systems where it may take long. */
#ifndef NVMEIO_CLOSER_H
#define NVMEIO_CLOSER_H

#include "request_internal.h"

/* Have its owner's close() called with the request in a thread of its own. It is the
 * only holder of its file. Returns false if no thread can be started; then the caller
 * closes the file. Afterwards the request may be gone. */
bool nvmeio_closer_add(struct nvmeio_request *request);

#endif
