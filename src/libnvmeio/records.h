/* records.h -- the records of a gather or scatter, in the order of the file, and the
 * extents that are carried out together.
 *
 * Checks, arithmetic and copies: no system call, no lock.  When an extent is carried
 * out is gather.c's. */
#ifndef NVMEIO_RECORDS_H
#define NVMEIO_RECORDS_H

#include <nvmeio/gather.h>

/* A record that can go straight between the device and its place is not merged with
 * others from here on: copying it would cost more than another I/O (a copy of 32 KiB
 * takes 3 us, an I/O 2 us of CPU time; bench_gather.py). */
#define NVMEIO_RECORD_LARGE_BYTES (32u << 10)

/* Where there is a record from here on, a gap is read for nothing only in an extent
 * that is no longer than this: what else is read and copied costs more than another
 * I/O.  Rows of 4 KiB, 60 % of a part of a file: 131 000 a second, without this 109
 * 000. */
#define NVMEIO_RECORD_MEDIUM_BYTES (4u << 10)
#define NVMEIO_BRIDGED_BYTES (16u << 10)

struct nvmeio_record {
    int64_t offset;
    size_t size;
    char *place;
    size_t index; /* as it was submitted */
    int error;    /* 0 or -errno */
    bool shared;  /* that may be another's, whose bytes were read with it */
    bool cached;  /* the page cache had all of the extent that begins with it */
};

struct nvmeio_records {
    size_t count; /* of those that are not empty */
    size_t bytes; /* of all of them */
    bool whole;   /* every one begins and ends at whole pages of the file */
    size_t gap_max;
    size_t next; /* the first that is in no extent yet */
    bool shared; /* there are such errors */
    int error;   /* once settled: of the failed record with the lowest index, or 0 */
    struct nvmeio_record list[];
};

/* Neighbours in the file that are carried out together. */
struct nvmeio_extent {
    size_t first, count; /* of the records */
    int64_t offset;
    size_t size;
    /* Where all of it lies one behind another, or NULL: then it goes through a bounce
     * of at most nvmeio_extent_limits.merged_bytes. */
    char *home;
    bool copied; /* some records are not in place when the extent is */
};

struct nvmeio_extent_limits {
    enum nvmeio_op op;
    uint32_t align;      /* of what the device reads, 1 for the page cache */
    size_t merged_bytes; /* of an extent that goes through one bounce; 0: none does */
};

/* Take over and check the records: NULL with *error, as nvmeio_submit_gather() tells
 * it.  file_size: what there is to read; of a write INT64_MAX. */
struct nvmeio_records *nvmeio_records_new(const struct nvmeio_gather *gather,
                                          int64_t file_size, int *error,
                                          size_t *offender);

/* The next extent; false past the last one. */
bool nvmeio_records_next(struct nvmeio_records *records,
                         const struct nvmeio_extent_limits *limits,
                         struct nvmeio_extent *extent);

/* The next extent of one record alone, of those whose errors may be others'; it is as
 * if it had not failed. */
bool nvmeio_records_next_alone(struct nvmeio_records *records,
                               struct nvmeio_extent *extent);

/* Bring bytes [begin, end) of an extent from `source`, where the first of them lies, to
 * the places of the records that want them. */
void nvmeio_records_spread(const struct nvmeio_records *records,
                           const struct nvmeio_extent *extent, const char *source,
                           size_t begin, size_t end);

/* The other way: collect them at `target`. */
void nvmeio_records_collect(const struct nvmeio_records *records,
                            const struct nvmeio_extent *extent, char *target,
                            size_t begin, size_t end);

/* Note that bytes [begin, end) of an extent have failed. */
void nvmeio_records_fail(struct nvmeio_records *records,
                         const struct nvmeio_extent *extent, size_t begin, size_t end,
                         int error);

/* Note that all from a record on have failed. */
void nvmeio_records_fail_from(struct nvmeio_records *records, size_t first, int error);

/* No extent is under way any more: returns the bytes of the records that did not fail,
 * and notes the error.  Where there is one, the records are in the order of their
 * indices from then on. */
size_t nvmeio_records_settle(struct nvmeio_records *records);

/* What has failed, once settled: how many records, of which at most `count` are stored.
 */
size_t nvmeio_records_failures(const struct nvmeio_records *records,
                               struct nvmeio_failure *failures, size_t count);

#endif
