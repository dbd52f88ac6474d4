/* nvmeio.h -- the whole public C API. */
#ifndef NVMEIO_NVMEIO_H
#define NVMEIO_NVMEIO_H

#include <nvmeio/base.h>
#include <nvmeio/copy.h>
#include <nvmeio/file.h>
#include <nvmeio/gather.h>
#include <nvmeio/handle.h>
#include <nvmeio/pool.h>
#include <nvmeio/request.h>
#include <nvmeio/system.h>

#endif
