/* records.c -- the records of a gather: checked, sorted, merged into extents,
 * copied. */
#include "records.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "align.h"
#include "copy_internal.h"

/* A record of at least this size is long. A block finds the short ones that it touches
 * by a binary search, and looks at all long ones of its extent. */
#define LONG_BYTES ((int64_t)64 << 10)

/* Bits per digit of the radix sort. */
#define RADIX_BITS 8

static int64_t end_of(const struct nvmeio_record *record)
{
    return record->offset + (int64_t)record->size;
}

static int64_t extent_end(const struct nvmeio_extent *extent)
{
    return extent->offset + (int64_t)extent->size;
}

static int compare_lengths(const void *one, const void *other)
{
    const struct nvmeio_record *a = one, *b = other;

    if (a->size != b->size)
        return a->size > b->size ? -1 : 1;
    return a->index < b->index ? -1 : 1;
}

static int compare_indices(const void *one, const void *other)
{
    const struct nvmeio_record *a = one, *b = other;

    return a->index < b->index ? -1 : 1;
}

/* The key to sort by: the place in memory, or the offset in the file. */
static uint64_t key_of(const struct nvmeio_record *record, bool by_place)
{
    return by_place ? (uintptr_t)record->place : (uint64_t)record->offset;
}

static bool in_order(const struct nvmeio_records *records, bool by_place)
{
    const struct nvmeio_record *list = records->list;

    for (size_t i = 1; i < records->count; i++) {
        if (key_of(&list[i - 1], by_place) > key_of(&list[i], by_place))
            return false;
    }
    return true;
}

/* Sort by one digit, from one list to the other. Returns false, and moves nothing, if
 * the digit is the same in all records. */
static bool sort_digit(const struct nvmeio_record *from, struct nvmeio_record *to,
                       size_t count, bool by_place, unsigned shift)
{
    size_t starts[1 << RADIX_BITS] = {0};
    size_t mask = (1 << RADIX_BITS) - 1, next = 0;

    for (size_t i = 0; i < count; i++)
        starts[key_of(&from[i], by_place) >> shift & mask]++;
    if (starts[key_of(&from[0], by_place) >> shift & mask] == count)
        return false;
    for (size_t digit = 0; digit <= mask; digit++) {
        size_t with_it = starts[digit];
        starts[digit] = next;
        next += with_it;
    }
    for (size_t i = 0; i < count; i++)
        to[starts[key_of(&from[i], by_place) >> shift & mask]++] = from[i];
    return true;
}

/* A stable sort. qsort(3) takes three times as long from 1000 records on. */
static int sort(struct nvmeio_records *records, bool by_place)
{
    struct nvmeio_record *from = records->list, *to, *spare;

    if (in_order(records, by_place))
        return 0;
    to = spare = malloc(records->count * sizeof(*spare));
    if (!spare)
        return -ENOMEM;
    for (unsigned shift = 0; shift < 64; shift += RADIX_BITS) {
        if (sort_digit(from, to, records->count, by_place, shift)) {
            struct nvmeio_record *sorted = to;
            to = from;
            from = sorted;
        }
    }
    if (from == spare)
        memcpy(records->list, spare, records->count * sizeof(*spare));
    free(spare);
    return 0;
}

/* Of records that begin together, put the longest first, because it may contain the
 * others. */
static void sort_lengths(struct nvmeio_records *records)
{
    struct nvmeio_record *list = records->list;

    for (size_t first = 0, end; first < records->count; first = end) {
        bool longer = false;
        for (end = first + 1;
             end < records->count && list[end].offset == list[first].offset; end++)
            longer |= list[end].size > list[end - 1].size;
        if (longer)
            qsort(&list[first], end - first, sizeof(*list), compare_lengths);
    }
}

/* Check one record. Returns 0 or its error. */
static int check_record(const struct nvmeio_gather *gather, int64_t file_size,
                        int64_t offset, int64_t size, int64_t place)
{
    if (offset < 0 || size < 0 || place < 0)
        return -EINVAL;
    if (size > INT64_MAX - offset)
        return -EOVERFLOW;
    if ((uint64_t)place > gather->size ||
        (uint64_t)size > gather->size - (uint64_t)place || size > INT64_MAX - place)
        return -EFAULT;
    if (size > 0 && place == 0 && nvmeio_gather_is_by_address(gather))
        return -EFAULT;
    if (size > 0 && offset + size > file_size)
        return -ENODATA;
    return 0;
}

/* Fill in the records that are not empty or done. */
static int fill(struct nvmeio_records *records, const struct nvmeio_gather *gather,
                int64_t file_size, size_t *offender)
{
    int64_t next_place = 0;

    for (size_t i = 0; i < gather->count; i++) {
        int64_t offset = gather->offsets[i];
        int64_t size = gather->sizes[gather->one_size ? 0 : i];
        int64_t place = gather->places ? gather->places[i] : next_place;
        int error = check_record(gather, file_size, offset, size, place);
        if (error) {
            *offender = i;
            return error;
        }
        next_place = place + size;
        records->bytes += (size_t)size;
        if (size == 0 || i < gather->done)
            continue;
        records->list[records->count++] = (struct nvmeio_record){
            .offset = offset,
            .size = (size_t)size,
            /* As a number, because C has no sums with a null pointer. */
            .place = (char *)((uintptr_t)gather->address + (uintptr_t)place),
            .index = i,
        };
        records->ends |= (uint64_t)offset | (uint64_t)size;
    }
    return 0;
}

/* Whether any two records up to this index share bytes. The list is sorted by place or
 * by offset. */
static bool overlap(const struct nvmeio_records *records, bool by_place, size_t last)
{
    uint64_t end = 0;

    for (size_t i = 0; i < records->count; i++) {
        const struct nvmeio_record *record = &records->list[i];
        if (record->index > last)
            continue;
        if (key_of(record, by_place) < end)
            return true;
        end = key_of(record, by_place) + record->size;
    }
    return false;
}

/* Find the first record, by index, that shares bytes with a record of a lower index: a
 * binary search for the lowest index up to which any overlap. SIZE_MAX if there is
 * none. The list is sorted by place or by offset. */
static size_t find_overlap(const struct nvmeio_records *records, bool by_place,
                           size_t count)
{
    size_t low = 0, high = count;

    if (!overlap(records, by_place, SIZE_MAX))
        return SIZE_MAX;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (overlap(records, by_place, middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static void note_longs(struct nvmeio_records *records)
{
    size_t last = 0;

    for (size_t i = 0; i < records->count; i++) {
        if (records->list[i].size >= (size_t)LONG_BYTES)
            last = i + 1;
        records->list[i].longs = last;
    }
}

/* Sort the records by offset, and check that they do not overlap: for a read in memory,
 * for a write in the file. */
static int check_overlap(struct nvmeio_records *records,
                         const struct nvmeio_gather *gather, size_t *offender)
{
    size_t found = SIZE_MAX;
    int error;

    if (gather->op == NVMEIO_OP_READ && gather->places) {
        error = sort(records, true);
        if (error)
            return error;
        found = find_overlap(records, true, gather->count);
    }
    error = sort(records, false);
    if (error)
        return error;
    sort_lengths(records);
    note_longs(records);
    if (gather->op == NVMEIO_OP_WRITE)
        found = find_overlap(records, false, gather->count);
    if (found == SIZE_MAX)
        return 0;
    *offender = found;
    return -EEXIST;
}

struct nvmeio_records *nvmeio_records_new(const struct nvmeio_gather *gather,
                                          int64_t file_size, int *error,
                                          size_t *offender)
{
    struct nvmeio_records *records = NULL;

    *error = -EINVAL;
    if (gather->count > 0 && (!gather->offsets || !gather->sizes))
        return NULL;
    if (gather->done > (gather->op == NVMEIO_OP_READ ? gather->count : 0))
        return NULL;
    *error = -ENOMEM;
    if (gather->count < (SIZE_MAX - sizeof(*records)) / sizeof(records->list[0]))
        records = malloc(sizeof(*records) + gather->count * sizeof(records->list[0]));
    if (!records)
        return NULL;
    *records = (struct nvmeio_records){.gap_max = gather->gap_max};
    *error = fill(records, gather, file_size, offender);
    if (*error == 0)
        *error = check_overlap(records, gather, offender);
    if (*error) {
        free(records);
        return NULL;
    }
    return records;
}

int nvmeio_gather_check(const struct nvmeio_gather *gather, size_t *offender)
{
    int error;

    *offender = SIZE_MAX;
    free(nvmeio_records_new(gather, INT64_MAX, &error, offender));
    return error;
}

/* Whether a record, or an extent with a home, is not merged: it is large, and its ends
 * do not force it through a bounce anyway. */
static bool is_alone(const struct nvmeio_extent_limits *limits, bool cached,
                     int64_t begin, int64_t end)
{
    if (end - begin < NVMEIO_RECORD_LARGE_BYTES)
        return false;
    return cached || limits->op == NVMEIO_OP_WRITE ||
           (uint64_t)(begin | end) % limits->align == 0;
}

/* Whether an extent and one more record should share a bounce. */
static bool mergeable(const struct nvmeio_records *records,
                      const struct nvmeio_extent_limits *limits,
                      const struct nvmeio_extent *extent,
                      const struct nvmeio_record *record)
{
    bool cached = records->list[extent->first].cached;
    int64_t end =
        extent_end(extent) > end_of(record) ? extent_end(extent) : end_of(record);
    uint64_t cover = nvmeio_round_up((uint64_t)end, limits->align) -
                     nvmeio_round_down((uint64_t)extent->offset, limits->align);

    if (cover > limits->merged_bytes)
        return false;
    if (extent->home && is_alone(limits, cached, extent->offset, extent_end(extent)))
        return false;
    if (is_alone(limits, cached, record->offset, end_of(record)))
        return false;
    if (limits->op == NVMEIO_OP_WRITE)
        return record->offset == extent_end(extent);
    uint64_t from = nvmeio_round_up((uint64_t)extent_end(extent), limits->align);
    uint64_t to = nvmeio_round_down((uint64_t)record->offset, limits->align);
    if (to <= from)
        return true;
    return to - from <= records->gap_max &&
           (record->size < NVMEIO_RECORD_MEDIUM_BYTES ||
            record->size >= NVMEIO_RECORD_LARGE_BYTES || cover <= NVMEIO_BRIDGED_BYTES);
}

/* Add one more record to an extent, if it fits. */
static bool take(const struct nvmeio_records *records,
                 const struct nvmeio_extent_limits *limits,
                 struct nvmeio_extent *extent, const struct nvmeio_record *record)
{
    if (end_of(record) <= extent_end(extent)) {
        extent->copied |=
            !extent->home ||
            record->place != extent->home + (record->offset - extent->offset);
        return true;
    }
    if (record->cached != records->list[extent->first].cached)
        return false;
    if (extent->home && !extent->copied && record->offset == extent_end(extent) &&
        record->place == extent->home + extent->size) {
        extent->size += record->size;
        return true;
    }
    if (!mergeable(records, limits, extent, record))
        return false;
    extent->home = NULL;
    extent->copied = true;
    extent->size = (size_t)(end_of(record) - extent->offset);
    return true;
}

static struct nvmeio_extent extent_of(const struct nvmeio_records *records,
                                      size_t index)
{
    const struct nvmeio_record *record = &records->list[index];

    return (struct nvmeio_extent){
        .first = index,
        .offset = record->offset,
        .size = record->size,
        .home = record->place,
    };
}

bool nvmeio_records_next(struct nvmeio_records *records,
                         const struct nvmeio_extent_limits *limits,
                         struct nvmeio_extent *extent)
{
    if (records->next == records->count)
        return false;
    const struct nvmeio_record *record = &records->list[records->next];
    *extent = extent_of(records, records->next);
    do {
        extent->count++;
        records->next++;
        record++;
    } while (records->next < records->count && take(records, limits, extent, record));
    return true;
}

bool nvmeio_records_next_alone(struct nvmeio_records *records,
                               struct nvmeio_extent *extent)
{
    while (records->next < records->count && !records->list[records->next].shared)
        records->next++;
    if (records->next == records->count)
        return false;
    records->list[records->next].error = 0;
    *extent = extent_of(records, records->next++);
    extent->count = 1;
    return true;
}

/* The part of one record in a range of an extent: `size` bytes from `at` in the extent,
 * which belong at `place`. */
struct share {
    size_t record;
    size_t at;
    size_t size;
    char *place;
};

/* Goes through the records that have a share in the range [begin, end) of an extent. */
struct walk {
    const struct nvmeio_records *records;
    const struct nvmeio_extent *extent;
    size_t begin, end;
    size_t next;  /* the next record that may be short */
    size_t longs; /* before those: the next long record to look at, plus 1; or 0 */
};

/* The first record of an extent that begins at this offset of the file or behind it. */
static size_t find_first(const struct nvmeio_records *records,
                         const struct nvmeio_extent *extent, int64_t offset)
{
    size_t low = extent->first, high = extent->first + extent->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (records->list[middle].offset < offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct walk walk_of(const struct nvmeio_records *records,
                           const struct nvmeio_extent *extent, size_t begin, size_t end)
{
    struct walk walk = {records, extent, begin, end, 0, 0};

    walk.next =
        find_first(records, extent, extent->offset + (int64_t)begin - LONG_BYTES);
    if (walk.next > extent->first)
        walk.longs = records->list[walk.next - 1].longs;
    return walk;
}

static bool share_of(const struct walk *walk, size_t index, struct share *share)
{
    const struct nvmeio_record *record = &walk->records->list[index];
    size_t from = (size_t)(record->offset - walk->extent->offset);
    size_t to = from + record->size;
    size_t at = from > walk->begin ? from : walk->begin;

    if (to > walk->end)
        to = walk->end;
    if (at >= to)
        return false;
    *share = (struct share){index, at, to - at, record->place + (at - from)};
    return true;
}

static bool next_share(struct walk *walk, struct share *share)
{
    const struct nvmeio_extent *extent = walk->extent;
    const struct nvmeio_record *list = walk->records->list;
    int64_t end = extent->offset + (int64_t)walk->end;

    while (walk->longs > extent->first) {
        size_t index = walk->longs - 1;
        walk->longs = index > 0 ? list[index - 1].longs : 0;
        if (share_of(walk, index, share))
            return true;
    }
    while (walk->next < extent->first + extent->count && list[walk->next].offset < end)
        if (share_of(walk, walk->next++, share))
            return true;
    return false;
}

void nvmeio_records_spread(const struct nvmeio_records *records,
                           const struct nvmeio_extent *extent, const char *source,
                           size_t begin, size_t end)
{
    struct walk walk = walk_of(records, extent, begin, end);
    struct share share;

    while (next_share(&walk, &share)) {
        const char *from = source + (share.at - begin);
        if (from != share.place)
            nvmeio_copy_cold(share.place, from, share.size);
    }
}

void nvmeio_records_collect(const struct nvmeio_records *records,
                            const struct nvmeio_extent *extent, char *target,
                            size_t begin, size_t end)
{
    struct walk walk = walk_of(records, extent, begin, end);
    struct share share;

    while (next_share(&walk, &share))
        nvmeio_copy_cold(target + (share.at - begin), share.place, share.size);
}

void nvmeio_records_fail(struct nvmeio_records *records,
                         const struct nvmeio_extent *extent, size_t begin, size_t end,
                         int error)
{
    struct walk walk = walk_of(records, extent, begin, end);
    struct share share;

    while (next_share(&walk, &share)) {
        struct nvmeio_record *record = &records->list[share.record];
        if (record->error)
            continue;
        record->error = error;
        /* Past the end of the file, every missing byte is the record's own. */
        record->shared |= extent->count > 1 && error != -ENODATA;
        records->shared |= record->shared;
    }
}

void nvmeio_records_fail_from(struct nvmeio_records *records, size_t first, int error)
{
    for (size_t i = first; i < records->count; i++) {
        if (records->list[i].error == 0)
            records->list[i].error = error;
    }
}

size_t nvmeio_records_settle(struct nvmeio_records *records)
{
    size_t got = records->bytes;

    for (size_t i = 0; i < records->count; i++) {
        const struct nvmeio_record *record = &records->list[i];
        if (record->error)
            got -= record->size;
    }
    if (got == records->bytes)
        return got;
    qsort(records->list, records->count, sizeof(records->list[0]), compare_indices);
    for (size_t i = 0; i < records->count && records->error == 0; i++)
        records->error = records->list[i].error;
    return got;
}

size_t nvmeio_records_failures(const struct nvmeio_records *records,
                               struct nvmeio_failure *failures, size_t count)
{
    size_t found = 0;

    for (size_t i = 0; i < records->count; i++) {
        const struct nvmeio_record *record = &records->list[i];
        if (record->error == 0)
            continue;
        if (found < count)
            failures[found] = (struct nvmeio_failure){
                .index = record->index,
                .error = record->error,
                .offset = record->offset,
                .size = record->size,
            };
        found++;
    }
    return found;
}
