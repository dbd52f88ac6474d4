/* records.h -- the records of a gather or scatter, in the order of the file, and the
 * extents in which they are carried out.
 *
 * Checks, arithmetic and copies: no system call, no lock. gather.c decides when an
 * extent is carried out. */
#ifndef NVMEIO_RECORDS_H
#define NVMEIO_RECORDS_H

#include <nvmeio/gather.h>

/* Records of at least this size are not merged with others, except those that go
 * through a bounce anyway: copying one costs more than another I/O. A copy of 32 KiB
 * takes 3 us, an I/O 2 us of CPU time (bench_gather.py). */
#define NVMEIO_RECORD_LARGE_BYTES (32u << 10)

/* A record from NVMEIO_RECORD_MEDIUM_BYTES to NVMEIO_RECORD_LARGE_BYTES is merged
 * across a gap only if the extent is then at most NVMEIO_BRIDGED_BYTES long: reading
 * and copying more would cost more than another I/O. A gather of 60 % of the 4 KiB rows
 * of a part of a file then reads 131 000 rows a second instead of 109 000. */
#define NVMEIO_RECORD_MEDIUM_BYTES (4u << 10)
#define NVMEIO_BRIDGED_BYTES (16u << 10)

struct nvmeio_record {
    int64_t offset;
    size_t size;
    char *place;
    size_t index; /* its index as submitted */
    size_t
        longs; /* the last long record up to this one: its place in the list, plus 1; or
                  0 */
    int error; /* 0 or -errno */
    bool shared; /* the error may be another record's, whose bytes were read with it */
    bool cached; /* the page cache had all of its extent */
};

struct nvmeio_records {
    size_t count;  /* how many are not empty or done */
    size_t bytes;  /* of all records together, also of those that are done */
    uint64_t ends; /* all their offsets and sizes, or-ed */
    size_t gap_max;
    size_t next; /* the first record that is in no extent yet */
    bool shared; /* some errors may be another record's */
    int error; /* once settled: the error of the failed record with the lowest index, or
                  0 */
    struct nvmeio_record list[];
};

/* Neighbouring records of the file that are transferred together. */
struct nvmeio_extent {
    size_t first, count; /* of the records */
    int64_t offset;
    size_t size;
    /* Where its bytes are in the caller's memory, if that is one contiguous place. If
     * it is NULL, the extent uses a bounce of at most
     * nvmeio_extent_limits.merged_bytes. */
    char *home;
    bool copied; /* the extent's bytes still have to be copied to some records */
};

struct nvmeio_extent_limits {
    enum nvmeio_op op;
    uint32_t align;      /* the device's, or 1 for the page cache */
    size_t merged_bytes; /* the largest extent that uses one bounce; 0: none does */
};

/* Whether the places of a gather are addresses, because it has no single memory. */
static inline bool nvmeio_gather_is_by_address(const struct nvmeio_gather *gather)
{
    return !gather->address && gather->size == SIZE_MAX && gather->places;
}

/* Copy, check and sort the records of a gather. The caller frees the result. Returns
 * NULL, with *error and *offender as for nvmeio_submit_gather(), if a record is invalid
 * or memory ran out. file_size is where reads must end; INT64_MAX if that is not
 * checked. */
struct nvmeio_records *nvmeio_records_new(const struct nvmeio_gather *gather,
                                          int64_t file_size, int *error,
                                          size_t *offender);

/* Form the next extent. Returns false past the last one. */
bool nvmeio_records_next(struct nvmeio_records *records,
                         const struct nvmeio_extent_limits *limits,
                         struct nvmeio_extent *extent);

/* Form the next extent of a single record, from the records whose error another may
 * have caused. Clears the error. Returns false past the last one. */
bool nvmeio_records_next_alone(struct nvmeio_records *records,
                               struct nvmeio_extent *extent);

/* Copy bytes [begin, end) of an extent from `source` to the places of their records. */
void nvmeio_records_spread(const struct nvmeio_records *records,
                           const struct nvmeio_extent *extent, const char *source,
                           size_t begin, size_t end);

/* Copy the other way: bytes [begin, end) of an extent from the places of their records
 * to `target`. */
void nvmeio_records_collect(const struct nvmeio_records *records,
                            const struct nvmeio_extent *extent, char *target,
                            size_t begin, size_t end);

/* Note that bytes [begin, end) of an extent have failed. */
void nvmeio_records_fail(struct nvmeio_records *records,
                         const struct nvmeio_extent *extent, size_t begin, size_t end,
                         int error);

/* Note that all records from this one on have failed. */
void nvmeio_records_fail_from(struct nvmeio_records *records, size_t first, int error);

/* Set records->error, and return the bytes of the records that did not fail. No extent
 * may be in flight any more. If any record failed, they are sorted by index from then
 * on. */
size_t nvmeio_records_settle(struct nvmeio_records *records);

/* Store at most `count` failures, and return how many records failed. Call it after
 * nvmeio_records_settle(). */
size_t nvmeio_records_failures(const struct nvmeio_records *records,
                               struct nvmeio_failure *failures, size_t count);

#endif
