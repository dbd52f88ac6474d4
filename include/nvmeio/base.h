/* base.h -- types and limits that every other header uses.
 *
 * Unless its comment says otherwise, a function returns 0 or a count if it
 * succeeds, and a negative errno if it fails: nvmeio_file_open() returns -ENOENT
 * if there is no such file.  No function prints, exits or raises a signal. */
#ifndef NVMEIO_BASE_H
#define NVMEIO_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef NVMEIO_API /* empty for the archive, which exports nothing */
#define NVMEIO_API __attribute__((visibility("default")))
#endif

#define NVMEIO_VERSION "0.2.0"

/* One I/O moves at most this much: MAX_RW_COUNT of the kernel, read(2). */
#define NVMEIO_IO_BYTES_MAX 0x7ffff000u

#define NVMEIO_BLOCK_BYTES_MAX (1u << 30)
#define NVMEIO_QUEUE_DEPTH_MAX 32768u /* IORING_MAX_ENTRIES of the kernel */
#define NVMEIO_WORKERS_MAX 256u

enum nvmeio_op { NVMEIO_OP_READ, NVMEIO_OP_WRITE, NVMEIO_OP_FSYNC };

/* O_DIRECT: use it if the file system has it, require it, or never use it. */
enum nvmeio_direct { NVMEIO_DIRECT_AUTO, NVMEIO_DIRECT_ALWAYS, NVMEIO_DIRECT_NEVER };

/* When data passes through bounce buffers: if the device cannot use the caller's
 * memory, always, or never (the page cache is used instead). */
enum nvmeio_bounce { NVMEIO_BOUNCE_AUTO, NVMEIO_BOUNCE_ALWAYS, NVMEIO_BOUNCE_NEVER };

struct nvmeio_engine_info {
    const char *name;    /* static; "io_uring", "libaio", "threads", "sync" */
    const char *library; /* static; the library it needs, or "" */
    bool built;          /* compiled in */
    int error;           /* 0 if it works in this process, else -errno */
    char reason[256];    /* why it does not work, and what would help; else "" */
};

/* Return the version of the linked library, a static string; NVMEIO_VERSION is that of
 * the header. */
NVMEIO_API const char *nvmeio_version(void);

/* Return the number of engines; their indices are in order of preference. */
NVMEIO_API unsigned nvmeio_engine_count(void);

/* Try engine `index` in this process.  Returns 0 (see info->error) or -EINVAL. */
NVMEIO_API int nvmeio_engine_probe(unsigned index, struct nvmeio_engine_info *info);

/* Count the forks between the process that loaded the library and this one. */
NVMEIO_API uint32_t nvmeio_fork_generation(void);

#ifdef __cplusplus
}
#endif
#endif
