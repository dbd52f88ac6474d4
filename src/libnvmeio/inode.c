/* inode.c -- lets direct and buffered writes of one file take turns, and keeps the
 * errors of its fsyncs. */
#include "inode.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fork.h"

/* As many direct writes as one worker has in flight by default can be noted. */
#define SLOTS 128u

/* How many slots a direct write tries before it is listed instead. */
#define TRIES 4u

/* A slot has the first folio of a claim, and in its lowest bits how many there are. */
#define COUNT_BITS 20u
#define COUNT_MASK ((UINT64_C(1) << COUNT_BITS) - 1)

#define BUCKETS 256u /* a power of two */

struct nvmeio_inode {
    uint64_t device, number;
    unsigned references;       /* guarded by `inodes_mutex` */
    struct nvmeio_inode *next; /* in its bucket */

    /* Direct writes that run and are not listed, in any slot; 0: none. New ones must be
     * listed while buffered writes run or wait. A direct write stores its slot and then
     * looks at `listing`; a buffered one the other way round. So one sees the other. */
    _Atomic uint64_t slots[SLOTS];
    atomic_bool listing;

    _Atomic uint32_t losses;
    _Atomic int error; /* that the last loss was reported with */

    pthread_mutex_t mutex;             /* guards what follows */
    struct nvmeio_claim *first, *last; /* listed and waiting, in order of arrival */
    unsigned listed[3];                /* by kind, waiting ones included */
    struct nvmeio_claim *draining;     /* they wait for noted ones */
};

static pthread_mutex_t inodes_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct nvmeio_inode *inodes[BUCKETS];

/* The size of the largest folio of the page cache, in which claims are compared, is 2
 * to the power of this. */
static unsigned folio_bits;

static struct nvmeio_inode **bucket_of(uint64_t device, uint64_t number)
{
    uint64_t mixed = (number ^ device << 32) * 0x9e3779b97f4a7c15u;

    return &inodes[mixed >> 32 & (BUCKETS - 1)];
}

static void inode_init(struct nvmeio_inode *inode)
{
    pthread_mutex_init(&inode->mutex, NULL);
    for (unsigned i = 0; i < SLOTS; i++)
        atomic_store_explicit(&inode->slots[i], 0, memory_order_relaxed);
    atomic_store(&inode->listing, false);
    inode->first = inode->last = inode->draining = NULL;
    memset(inode->listed, 0, sizeof(inode->listed));
}

struct nvmeio_inode *nvmeio_inode_get(uint64_t device, uint64_t number)
{
    struct nvmeio_inode **bucket = bucket_of(device, number);

    pthread_mutex_lock(&inodes_mutex);
    struct nvmeio_inode *inode = *bucket;
    while (inode && (inode->device != device || inode->number != number))
        inode = inode->next;
    if (!inode && (inode = calloc(1, sizeof(*inode)))) {
        inode->device = device;
        inode->number = number;
        inode_init(inode);
        inode->next = *bucket;
        *bucket = inode;
    }
    if (inode)
        inode->references++;
    pthread_mutex_unlock(&inodes_mutex);
    return inode;
}

void nvmeio_inode_put(struct nvmeio_inode *inode)
{
    if (!inode)
        return;
    pthread_mutex_lock(&inodes_mutex);
    bool last = --inode->references == 0;
    if (last) {
        struct nvmeio_inode **place = bucket_of(inode->device, inode->number);
        while (*place != inode)
            place = &(*place)->next;
        *place = inode->next;
    }
    pthread_mutex_unlock(&inodes_mutex);
    if (!last)
        return;
    pthread_mutex_destroy(&inode->mutex);
    free(inode);
}

static bool conflict(const struct nvmeio_claim *a, const struct nvmeio_claim *b)
{
    if (a->kind == NVMEIO_CLAIM_FSYNC || b->kind == NVMEIO_CLAIM_FSYNC)
        return a->kind == b->kind;
    return a->kind != b->kind && a->begin < b->end && b->begin < a->end;
}

/* Whether a direct write that is noted shares a folio with the claim. */
static bool meets_noted(const struct nvmeio_claim *claim)
{
    for (unsigned i = 0; i < SLOTS; i++) {
        uint64_t slot = atomic_load(&claim->inode->slots[i]);
        uint64_t begin = slot >> COUNT_BITS;
        if (slot && begin < claim->end && claim->begin < begin + (slot & COUNT_MASK))
            return true;
    }
    return false;
}

/* Whether a claim must wait, and for what. The mutex is held. */
static bool find_blocker(struct nvmeio_claim *claim)
{
    struct nvmeio_inode *inode = claim->inode;
    static const enum nvmeio_claim_kind opposite[] = {
        [NVMEIO_CLAIM_DIRECT] = NVMEIO_CLAIM_BUFFERED,
        [NVMEIO_CLAIM_BUFFERED] = NVMEIO_CLAIM_DIRECT,
        [NVMEIO_CLAIM_FSYNC] = NVMEIO_CLAIM_FSYNC,
    };

    claim->blocker = NULL;
    if (claim->kind == NVMEIO_CLAIM_BUFFERED && meets_noted(claim))
        return true;
    if (inode->listed[opposite[claim->kind]] == 0)
        return false;
    for (struct nvmeio_claim *c = inode->first; c && c != claim; c = c->next) {
        if (conflict(c, claim)) {
            claim->blocker = c;
            return true;
        }
    }
    return false;
}

/* The list of claims that wait for what this claim waits for. */
static struct nvmeio_claim **blocked_with(struct nvmeio_claim *claim)
{
    return claim->blocker ? &claim->blocker->blocked : &claim->inode->draining;
}

static void wait_for_blocker(struct nvmeio_claim *claim)
{
    struct nvmeio_claim **place = blocked_with(claim);

    while (*place)
        place = &(*place)->blocked_next;
    claim->blocked_next = NULL;
    *place = claim;
}

/* Grant the claims of a list that have nothing to wait for any more. */
static void reconsider(struct nvmeio_claim **list)
{
    struct nvmeio_claim *claim = *list, *next;

    for (*list = NULL; claim; claim = next) {
        next = claim->blocked_next;
        if (find_blocker(claim)) {
            wait_for_blocker(claim);
            continue;
        }
        claim->state = NVMEIO_CLAIM_LISTED;
        claim->grant(claim);
    }
}

static void list_claim(struct nvmeio_inode *inode, struct nvmeio_claim *claim)
{
    claim->next = claim->blocked = NULL;
    claim->previous = inode->last;
    if (inode->last)
        inode->last->next = claim;
    else
        inode->first = claim;
    inode->last = claim;
    if (inode->listed[claim->kind]++ == 0 && claim->kind == NVMEIO_CLAIM_BUFFERED)
        atomic_store(&inode->listing, true);
}

static void unlist_claim(struct nvmeio_inode *inode, struct nvmeio_claim *claim)
{
    if (claim->next)
        claim->next->previous = claim->previous;
    else
        inode->last = claim->previous;
    if (claim->previous)
        claim->previous->next = claim->next;
    else
        inode->first = claim->next;
    if (--inode->listed[claim->kind] == 0 && claim->kind == NVMEIO_CLAIM_BUFFERED)
        atomic_store(&inode->listing, false);
    claim->state = NVMEIO_CLAIM_NONE;
    reconsider(&claim->blocked);
}

/* Empty the slot of a direct write, and let those go on that waited for it. */
static void clear_slot(struct nvmeio_claim *claim)
{
    struct nvmeio_inode *inode = claim->inode;

    claim->state = NVMEIO_CLAIM_NONE;
    atomic_store(&inode->slots[claim->slot % SLOTS], 0);
    if (!atomic_load(&inode->listing))
        return;
    pthread_mutex_lock(&inode->mutex);
    reconsider(&inode->draining);
    pthread_mutex_unlock(&inode->mutex);
}

/* Note a direct write in a slot, unless buffered ones run or wait. */
static bool note_claim(struct nvmeio_claim *claim)
{
    struct nvmeio_inode *inode = claim->inode;
    uint64_t count = claim->end - claim->begin;
    uint64_t packed = claim->begin << COUNT_BITS | (count & COUNT_MASK);

    if (count > COUNT_MASK ||
        atomic_load_explicit(&inode->listing, memory_order_relaxed))
        return false;
    for (unsigned i = 0; i < TRIES; i++, claim->slot++) {
        uint64_t none = 0;
        if (!atomic_compare_exchange_strong(&inode->slots[claim->slot % SLOTS], &none,
                                            packed))
            continue;
        claim->state = NVMEIO_CLAIM_NOTED;
        if (!atomic_load(&inode->listing))
            return true;
        clear_slot(claim);
        return false;
    }
    return false;
}

bool nvmeio_claim_begin(struct nvmeio_claim *claim, struct nvmeio_inode *inode,
                        enum nvmeio_claim_kind kind, int64_t offset, uint64_t bytes)
{
    uint64_t last = (uint64_t)offset + (bytes > 0 ? bytes - 1 : 0);

    claim->inode = inode;
    claim->kind = kind;
    claim->begin = (uint64_t)offset >> folio_bits;
    claim->end = (last >> folio_bits) + 1;
    if (kind == NVMEIO_CLAIM_DIRECT && note_claim(claim))
        return true;
    pthread_mutex_lock(&inode->mutex);
    list_claim(inode, claim);
    bool runs = !find_blocker(claim);
    claim->state = runs ? NVMEIO_CLAIM_LISTED : NVMEIO_CLAIM_WAITING;
    if (!runs && claim->grant)
        wait_for_blocker(claim);
    else if (!runs)
        unlist_claim(inode, claim);
    pthread_mutex_unlock(&inode->mutex);
    return runs;
}

void nvmeio_claim_end(struct nvmeio_claim *claim)
{
    struct nvmeio_inode *inode = claim->inode;

    if (claim->state == NVMEIO_CLAIM_NOTED)
        clear_slot(claim);
    if (claim->state == NVMEIO_CLAIM_NONE)
        return;
    pthread_mutex_lock(&inode->mutex);
    unlist_claim(inode, claim);
    pthread_mutex_unlock(&inode->mutex);
}

bool nvmeio_claim_withdraw(struct nvmeio_claim *claim)
{
    struct nvmeio_inode *inode = claim->inode;

    pthread_mutex_lock(&inode->mutex);
    bool waits = claim->state == NVMEIO_CLAIM_WAITING;
    if (waits) {
        struct nvmeio_claim **place = blocked_with(claim);
        while (*place != claim)
            place = &(*place)->blocked_next;
        *place = claim->blocked_next;
        unlist_claim(inode, claim);
    }
    pthread_mutex_unlock(&inode->mutex);
    return waits;
}

uint32_t nvmeio_inode_losses(const struct nvmeio_inode *inode)
{
    return atomic_load(&inode->losses);
}

/* Whether an error of fsync(2) means that writes may be lost, and not only that the
 * call was not carried out. */
static bool reports_loss(int error)
{
    return error < 0 && error != -ECANCELED && error != -EINTR && error != -EAGAIN &&
           error != -EINVAL && error != -ENOMEM && error != -EBADF && error != -ENOSYS;
}

int nvmeio_inode_synced(struct nvmeio_inode *inode, uint32_t losses, int result)
{
    if (reports_loss(result)) {
        atomic_store(&inode->error, result);
        atomic_fetch_add(&inode->losses, 1);
    } else if (result == 0 && atomic_load(&inode->losses) != losses) {
        result = atomic_load(&inode->error);
    }
    return result;
}

static void lock_inodes(void)
{
    pthread_mutex_lock(&inodes_mutex);
}

static void unlock_inodes(void)
{
    pthread_mutex_unlock(&inodes_mutex);
}

/* A forked child has none of the threads whose claims these are. */
static void forget_claims(void)
{
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct nvmeio_inode *inode = inodes[i]; inode; inode = inode->next)
            inode_init(inode);
    pthread_mutex_unlock(&inodes_mutex);
}

static struct nvmeio_fork_hooks fork_hooks = {
    .prepare = lock_inodes,
    .parent = unlock_inodes,
    .child = forget_claims,
};

/* A folio has at most 2^11 pages, and no more than a huge page of the processor, which
 * is 2^9 pages of 4 KiB (MAX_PAGECACHE_ORDER in the kernel's include/linux/pagemap.h).
 */
static unsigned find_folio_bits(void)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), largest = page << 11;
    unsigned long long huge = 0;
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "re");

    if (file) {
        if (fscanf(file, "%llu", &huge) != 1)
            huge = 0;
        fclose(file);
    }
    if (huge == 0)
        huge = page << 9;
    if (huge < largest)
        largest = huge;
    return 63 - (unsigned)__builtin_clzll(largest);
}

__attribute__((constructor)) static void start_inodes(void)
{
    folio_bits = find_folio_bits();
    nvmeio_fork_hook(&fork_hooks);
}
