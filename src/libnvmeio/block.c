/* block.c -- prepares a block for the kernel, and evaluates its completion.
 *
 * Every length and errno that the kernel returns is evaluated here. request.c decides
 * which block is cut next, and what its end means for its request. */
#include "block.h"

#include <errno.h>

#include "file_internal.h"
#include "request_internal.h"

/* How long a block may keep failing with EINTR, EAGAIN or EBUSY without moving a
 * byte. */
#define STALL_NS_MAX 10000000000

/* Whether a block goes past the page cache, unless the file refuses that. */
static bool is_direct(const struct nvmeio_block *block)
{
    return block->piece.route != NVMEIO_ROUTE_BUFFERED &&
           !atomic_load_explicit(&block->request->file->direct_refused,
                                 memory_order_relaxed);
}

static bool claim(struct nvmeio_block *block, bool direct)
{
    enum nvmeio_claim_kind kind = block->op == NVMEIO_OP_FSYNC ? NVMEIO_CLAIM_FSYNC
                                  : direct                     ? NVMEIO_CLAIM_DIRECT
                                                               : NVMEIO_CLAIM_BUFFERED;

    if (block->op == NVMEIO_OP_READ ||
        (block->claim.state != NVMEIO_CLAIM_NONE && block->claim.kind == kind))
        return true;
    nvmeio_claim_end(&block->claim);
    return nvmeio_claim_begin(&block->claim, block->request->file->inode, kind,
                              block->piece.io_offset, block->piece.io_bytes);
}

bool nvmeio_block_claim_cut(struct nvmeio_block *block)
{
    return claim(block, is_direct(block));
}

bool nvmeio_block_claim(struct nvmeio_block *block)
{
    return claim(block, block->fd == block->request->file->direct_fd);
}

/* Read a block from the page cache if that has all of it. A bounce is not needed then.
 */
static void prefer_page_cache(struct nvmeio_block *block)
{
    struct nvmeio_piece *piece = &block->piece;
    int64_t offset = piece->io_offset + (int64_t)piece->skip;

    if (nvmeio_file_is_cached(block->request->file, offset, piece->wanted) != 1)
        return;
    piece->route = NVMEIO_ROUTE_BUFFERED;
    piece->io_offset = offset;
    piece->io_bytes = piece->wanted;
    piece->skip = 0;
}

void nvmeio_block_prepare(struct nvmeio_block *block)
{
    const struct nvmeio_request *request = block->request;
    struct nvmeio_file *file = request->file;
    const struct nvmeio_piece *piece = &block->piece;

    if (request->warm && piece->route != NVMEIO_ROUTE_BUFFERED)
        prefer_page_cache(block);
    /* nvmeio_file_fd() rarely has to open anything: the plan usually did. */
    block->fd = is_direct(block)               ? file->direct_fd
                : block->op == NVMEIO_OP_FSYNC ? nvmeio_file_any_fd(file)
                                               : nvmeio_file_fd(file);
    block->result = block->fd;
    block->address =
        block->bounce && (piece->route == NVMEIO_ROUTE_BOUNCE || !block->memory)
            ? block->bounce
            : block->memory;
    block->bytes = (uint32_t)piece->io_bytes;
    block->offset = piece->io_offset;
    block->aside = file->aside;
    block->moved = 0;
    block->stalled_ns = 0;
    if (block->bounce && block->op == NVMEIO_OP_WRITE)
        request->ops->load(block);
}

/* End a block. A read delivers the bytes that it got, even if it then failed, because
 * the outcome counts them. */
static enum nvmeio_verdict finish(struct nvmeio_block *block, int64_t result)
{
    const struct nvmeio_piece *piece = &block->piece;
    size_t landed = block->moved > piece->skip ? block->moved - piece->skip : 0;

    if (landed > 0 && block->op == NVMEIO_OP_READ)
        block->request->ops->deliver(block,
                                     landed < piece->wanted ? landed : piece->wanted);
    if (block->op == NVMEIO_OP_FSYNC) {
        const struct nvmeio_file *file = block->request->file;
        result = nvmeio_inode_synced(file->inode, file->losses, (int)result);
    }
    nvmeio_claim_end(&block->claim);
    block->result = result;
    return NVMEIO_BLOCK_FINISHED;
}

/* Retry a block for which the kernel transferred nothing. It fails once this has lasted
 * too long. */
static enum nvmeio_verdict repeat(struct nvmeio_block *block)
{
    int64_t now = nvmeio_now_ns();

    if (block->stalled_ns == 0)
        block->stalled_ns = now;
    else if (now - block->stalled_ns > STALL_NS_MAX)
        return finish(block, block->result);
    return NVMEIO_BLOCK_REPEATED;
}

static enum nvmeio_verdict advance_error(struct nvmeio_block *block)
{
    struct nvmeio_file *file = block->request->file;
    int error = (int)-block->result;

    if (block->fd < 0)
        return finish(block, block->result);
    if (error == EINTR || error == EAGAIN || error == EBUSY)
        return repeat(block);
    /* The I/O was aligned, and still it was refused: some file systems accept O_DIRECT
     * in open(2) and refuse it only here. From now on, use the page cache. */
    if ((error == EINVAL || error == EOPNOTSUPP) && block->fd == file->direct_fd &&
        block->op != NVMEIO_OP_FSYNC && !file->demanded) {
        int fd = nvmeio_file_fd(file);
        if (fd < 0)
            return finish(block, fd);
        atomic_store_explicit(&file->direct_refused, true, memory_order_relaxed);
        block->fd = fd;
        return NVMEIO_BLOCK_REPEATED;
    }
    return finish(block, nvmeio_error_reported((int)block->result));
}

enum nvmeio_verdict nvmeio_block_advance(struct nvmeio_block *block)
{
    const struct nvmeio_request *request = block->request;
    const struct nvmeio_piece *piece = &block->piece;

    if (block->result < 0)
        return advance_error(block);
    if (block->op == NVMEIO_OP_FSYNC)
        return finish(block, 0);
    block->moved += (size_t)block->result;
    block->stalled_ns = 0;
    if (block->moved >= piece->skip + piece->wanted)
        return finish(block, 0);
    if (block->result == 0)
        return finish(block, block->op == NVMEIO_OP_READ ? -ENODATA : -EIO);

    /* Short: continue after the bytes that moved, through the page cache if the rest is
     * no longer aligned. */
    block->address = (char *)block->address + block->result;
    block->offset += block->result;
    block->bytes = (uint32_t)(piece->io_bytes - block->moved);
    if (block->offset % request->geometry.offset_align ||
        (uintptr_t)block->address % request->file->info.memory_align) {
        block->fd = nvmeio_file_fd(request->file);
        if (block->fd < 0)
            return finish(block, block->fd);
    }
    return NVMEIO_BLOCK_CONTINUED;
}

void nvmeio_block_count(const struct nvmeio_block *block, struct nvmeio_stats *stats,
                        uint64_t latencies[NVMEIO_LATENCY_BUCKETS])
{
    bool direct = block->fd == block->request->file->direct_fd;
    uint64_t *bytes = !direct         ? &stats->bytes_buffered
                      : block->bounce ? &stats->bytes_bounced
                                      : &stats->bytes_direct;

    stats->blocks++;
    if (block->result == 0)
        *bytes += block->piece.wanted;
    /* An fsync transfers nothing and takes as long as many transfers, so it is not
     * counted. */
    if (block->op != NVMEIO_OP_FSYNC)
        latencies[nvmeio_latency_bucket(
            (uint64_t)(block->seen_ns - block->pushed_ns))]++;
}
