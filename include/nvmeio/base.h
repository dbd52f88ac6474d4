/* base.h -- words, limits and facts that every other header uses.
 *
 * Every function returns 0 or a count, or -errno, unless its comment says
 * otherwise.  Nothing here prints, exits or raises. */
#ifndef NVMEIO_BASE_H
#define NVMEIO_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef NVMEIO_API /* the archive is compiled without, and exports nothing */
#define NVMEIO_API __attribute__((visibility("default")))
#endif

#define NVMEIO_VERSION "0.2.0"

/* One I/O moves at most this much: MAX_RW_COUNT of the kernel, read(2). */
#define NVMEIO_IO_BYTES_MAX 0x7ffff000u

#define NVMEIO_BLOCK_BYTES_MAX (1u << 30)
#define NVMEIO_QUEUE_DEPTH_MAX 32768u /* IORING_MAX_ENTRIES of the kernel */
#define NVMEIO_WORKERS_MAX 256u

enum nvmeio_op { NVMEIO_OP_READ, NVMEIO_OP_WRITE, NVMEIO_OP_FSYNC };

/* Whether O_DIRECT is used where the file system has it, demanded, or left alone. */
enum nvmeio_direct { NVMEIO_DIRECT_AUTO, NVMEIO_DIRECT_ALWAYS, NVMEIO_DIRECT_NEVER };

/* When data passes through our own memory: where the device could not reach the
 * caller's, always, or never (the page cache is used instead). */
enum nvmeio_bounce { NVMEIO_BOUNCE_AUTO, NVMEIO_BOUNCE_ALWAYS, NVMEIO_BOUNCE_NEVER };

struct nvmeio_engine_info {
    const char *name;    /* static; "io_uring", "libaio", "threads", "sync" */
    const char *library; /* static; the library it needs, or "" */
    bool built;          /* compiled in */
    int error;           /* 0 where it works in this process, else -errno */
    char reason[256];    /* why it does not, and what would help; "" where it works */
};

NVMEIO_API const char *nvmeio_version(void);

/* The number of engines this version knows, in order of preference. */
NVMEIO_API unsigned nvmeio_engine_count(void);

/* Try engine `index` here and now.  Returns 0 (look at info->error) or -EINVAL. */
NVMEIO_API int nvmeio_engine_probe(unsigned index, struct nvmeio_engine_info *info);

/* How many forks lie between the process that loaded the library and this one. */
NVMEIO_API uint32_t nvmeio_fork_generation(void);

#ifdef __cplusplus
}
#endif
#endif
