/* slow.h -- threads for what would hold up a worker or a caller. */
#ifndef NVMEIO_SLOW_H
#define NVMEIO_SLOW_H

#include "request_internal.h"

/* Have its owner's `continue_slowly` called with a request that is to be planned or
 * settled, in a thread of its own. Returns false if no thread can be started; then the
 * caller does it. Afterwards the request may be gone, unless the caller holds a
 * reference. The mutex of its queue is not held. */
bool nvmeio_slow_add(struct nvmeio_request *request);

#endif
