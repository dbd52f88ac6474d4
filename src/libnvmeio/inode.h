/* inode.h -- what the process knows of a file, whichever handle, descriptor or thread
 * uses it: the writes and fsyncs that run or wait, and whether an fsync has reported
 * lost data.
 *
 * The page cache works in folios and in blocks of the file system, which may be larger
 * than a page. If a buffered write changes a folio while a direct write to the same
 * folio is under way, one of the two is lost, or the page cache keeps old bytes. So
 * within the process they take turns, first come, first served. */
#ifndef NVMEIO_INODE_H
#define NVMEIO_INODE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct nvmeio_inode;

enum nvmeio_claim_kind {
    NVMEIO_CLAIM_DIRECT,   /* a write past the page cache */
    NVMEIO_CLAIM_BUFFERED, /* a write through it */
    NVMEIO_CLAIM_FSYNC,
};

/* What a block of a write, or an fsync, claims of a file while it runs. Direct and
 * buffered writes of one folio exclude each other, and so do fsyncs of one file. Zeroed
 * while it claims nothing. */
struct nvmeio_claim {
    enum nvmeio_claim_state {
        NVMEIO_CLAIM_NONE,
        NVMEIO_CLAIM_NOTED,  /* runs; its range is in a slot of the inode */
        NVMEIO_CLAIM_LISTED, /* runs; it is in the inode's list */
        NVMEIO_CLAIM_WAITING,
    } state;
    enum nvmeio_claim_kind kind;
    struct nvmeio_inode *inode;
    uint64_t begin, end; /* in folios of the largest size */
    unsigned slot; /* the first to try; several claims at a time had better differ */
    struct nvmeio_claim *next, *previous;
    struct nvmeio_claim *blocker; /* WAITING: what it waits for; NULL: a noted one */
    struct nvmeio_claim *blocked, *blocked_next; /* claims that wait for this one */

    /* Called when a claim that waited may run. The inode's mutex is held, so it must
     * not call any function of this file. */
    void (*grant)(struct nvmeio_claim *claim);
    void *user; /* for grant() */
};

/* Return what is known of a file, and hold it. NULL if there is no memory. An inode of
 * 0 means a block device. */
struct nvmeio_inode *nvmeio_inode_get(uint64_t device, uint64_t number);
void nvmeio_inode_put(struct nvmeio_inode *inode);

/* Claim `bytes` from `offset` on, unless the claim conflicts with an earlier one. Then
 * it waits if grant() is set, and claims nothing otherwise. Returns whether it may run
 * now. While no buffered write runs or waits, a direct one takes no lock: it costs an
 * atomic operation here, and another when it ends. */
bool nvmeio_claim_begin(struct nvmeio_claim *claim, struct nvmeio_inode *inode,
                        enum nvmeio_claim_kind kind, int64_t offset, uint64_t bytes);

/* End a claim that runs, if there is one. Claims that waited for it may run now. */
void nvmeio_claim_end(struct nvmeio_claim *claim);

/* Give up a claim that waits. False if it has been granted meanwhile. */
bool nvmeio_claim_withdraw(struct nvmeio_claim *claim);

/* How many fsyncs of the file have reported lost data. */
uint32_t nvmeio_inode_losses(const struct nvmeio_inode *inode);

/* Return the result of an fsync that ended with 0 or -errno. Once one has reported lost
 * data, all of files that were opened before, when there were `losses`, report it too:
 * the kernel tells each descriptor only once. Its claim must not have ended yet. */
int nvmeio_inode_synced(struct nvmeio_inode *inode, uint32_t losses, int result);

#endif
