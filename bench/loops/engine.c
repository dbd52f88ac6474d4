/* engine.c -- the same work through the public C API of nvmeio. */
#include "loops.h"

#include <errno.h>
#include <fcntl.h>
#include <nvmeio/nvmeio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096 };

/* Return the handle that was opened last. If the settings differ, replace it. */
static int handle_of(size_t block, unsigned depth, struct nvmeio_handle **handle)
{
    static struct nvmeio_handle *kept;
    static struct nvmeio_config config;

    if (!kept || config.block_bytes != block || config.queue_depth != depth) {
        if (kept)
            nvmeio_handle_close(kept);
        kept = NULL;
        nvmeio_config_default(&config);
        config.block_bytes = block;
        config.queue_depth = depth;
        int error = nvmeio_handle_open(&config, &kept);
        if (error)
            return error;
    }
    *handle = kept;
    return 0;
}

/* Return touched memory of the pool. It is kept, and replaced if a larger one is
 * needed. */
static void *pool_memory(size_t size)
{
    static void *kept;
    static size_t kept_size;

    if (kept_size >= size)
        return kept;
    nvmeio_pool_free(kept);
    kept = NULL;
    kept_size = nvmeio_pool_alloc(size, false, &kept, NULL) ? 0 : size;
    if (kept_size)
        memset(kept, 1, size);
    return kept;
}

static int finish(struct nvmeio_request *request, int64_t size, int64_t patience_ns)
{
    struct nvmeio_outcome outcome = {0};
    int error;

    do
        error = nvmeio_request_wait(request, patience_ns);
    while (error == -ETIMEDOUT);
    if (!error)
        error = nvmeio_request_outcome(request, &outcome);
    nvmeio_request_release(request);
    if (!error && outcome.result != size)
        error = outcome.result < 0 ? (int)outcome.result : -ENODATA;
    return error;
}

/* Submit everything, then wait for each request in order. */
static int move(struct nvmeio_handle *handle, struct nvmeio_transfer transfer,
                struct nvmeio_request **requests, size_t count)
{
    size_t submitted = 0;
    int error = 0;

    for (; !error && submitted < count; submitted += !error) {
        error = nvmeio_submit(handle, &transfer, &requests[submitted]);
        transfer.address = (char *)transfer.address + transfer.size;
        transfer.offset += (int64_t)transfer.size;
    }
    for (size_t i = 0; i < submitted; i++) {
        int failed = finish(requests[i], (int64_t)transfer.size, -1);
        error = error ? error : failed;
    }
    return error;
}

/* OP PATH BLOCK DEPTH BYTES: transfer the first BYTES of a file, with one request per
 * block. */
int engine_blocks(char **words, struct turn *turn)
{
    bool reads = strcmp(words[0], "read") == 0;
    size_t block = (size_t)number(words[2]), size = (size_t)number(words[4]);
    struct nvmeio_request **requests = malloc(size / block * sizeof(*requests));
    struct nvmeio_transfer transfer = {.op = reads ? NVMEIO_OP_READ : NVMEIO_OP_WRITE,
                                       .address = pool_memory(size),
                                       .size = block};
    struct nvmeio_handle *handle;
    int error = transfer.address && requests ? 0 : -ENOMEM;

    if (!error)
        error = handle_of(block, (unsigned)number(words[3]), &handle);
    if (!error)
        error = nvmeio_file_open(words[1], reads ? O_RDONLY : O_WRONLY,
                                 NVMEIO_DIRECT_ALWAYS, &transfer.file);
    if (!error) {
        begin(turn);
        error = move(handle, transfer, requests, size / block);
        end(turn, (int64_t)size);
        nvmeio_file_release(transfer.file);
    }
    free(requests);
    return error;
}

/* PATH COUNT: open and release a file. */
int engine_opens(char **words, struct turn *turn)
{
    int64_t count = number(words[1]);

    begin(turn);
    for (int64_t i = 0; i < count; i++) {
        struct nvmeio_file *file;
        int error = nvmeio_file_open(words[0], O_RDONLY, NVMEIO_DIRECT_AUTO, &file);
        if (error)
            return error;
        nvmeio_file_release(file);
    }
    end(turn, count);
    return 0;
}

struct readers {
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    uint64_t pages;
    char *memory;
    int64_t count;
    int64_t patience_ns;
};

static int read_pages(void *context, unsigned index)
{
    struct readers *readers = context;
    uint64_t state = 88172645463325252u + index;
    struct nvmeio_transfer transfer = {.op = NVMEIO_OP_READ,
                                       .file = readers->file,
                                       .address =
                                           readers->memory + (size_t)index * PAGE,
                                       .size = PAGE};

    for (int64_t i = 0; i < readers->count; i++) {
        struct nvmeio_request *request;
        transfer.offset = (int64_t)(draw(&state, readers->pages) * PAGE);
        int error = nvmeio_submit(readers->handle, &transfer, &request);
        if (!error)
            error = finish(request, PAGE, readers->patience_ns);
        if (error)
            return error;
    }
    return 0;
}

/* PATH THREADS COUNT PATIENCE_NS: start THREADS threads, each of which submits the read
 * of a page and waits for it, COUNT times. A wait is repeated after PATIENCE_NS; -1: it
 * never times out. */
int engine_threads(char **words, struct turn *turn)
{
    unsigned threads = (unsigned)number(words[1]);
    struct readers readers = {.memory = pool_memory((size_t)threads * PAGE),
                              .count = number(words[2]),
                              .patience_ns = number(words[3])};
    struct nvmeio_config config;
    int error = readers.memory ? 0 : -ENOMEM;

    nvmeio_config_default(&config);
    if (!error)
        error = handle_of(config.block_bytes, config.queue_depth, &readers.handle);
    if (!error)
        error =
            nvmeio_file_open(words[0], O_RDONLY, NVMEIO_DIRECT_ALWAYS, &readers.file);
    if (error)
        return error;
    readers.pages = (uint64_t)nvmeio_file_size(readers.file) / PAGE;
    begin(turn);
    error = in_threads(threads, read_pages, &readers);
    end(turn, readers.count * threads * PAGE);
    nvmeio_file_release(readers.file);
    return error;
}
