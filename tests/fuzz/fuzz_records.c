/* Records of a gather or scatter: refusals, merging and the places of bytes, compared
 * with plain loops over bytes. */
#include <errno.h>
#include <string.h>

#include "../c/check.h"
#include "input.h"
#include "records.h"

#define RECORDS_MAX 24
#define BYTES_MAX 40000u /* size of the file and of the memory, if bytes are moved */

struct situation {
    struct nvmeio_gather gather;
    struct nvmeio_extent_limits limits;
    int64_t file_size;
    int64_t offsets[RECORDS_MAX], sizes[RECORDS_MAX], places[RECORDS_MAX];
    /* Bytes [fail_from, fail_to) of the file cannot be read or written. */
    uint64_t fail_from, fail_to;
    size_t chunk_bytes;
};

/* The expected result for the records. */
struct model {
    int error;
    size_t offender;
    uint64_t bytes;
};

static char file_image[BYTES_MAX], file_expected[BYTES_MAX];
static char memory_expected[BYTES_MAX];
static int errors[RECORDS_MAX];

static int64_t size_of(const struct situation *s, size_t i)
{
    return s->sizes[s->gather.one_size ? 0 : i];
}

/* Mostly a number that fits into the buffers, sometimes any, or the largest. */
static int64_t invent_number(struct input *input)
{
    unsigned choice = input_choice(input, 31);

    if (choice == 31)
        return (int64_t)input_number(input, 8);
    int64_t number = (int64_t)input_size(input, BYTES_MAX - 1);
    return choice == 30 ? INT64_MAX - number : number;
}

static void invent(struct situation *s, struct input *input)
{
    unsigned flags = input_choice(input, 255);

    *s = (struct situation){.gather.op = flags & 1 ? NVMEIO_OP_WRITE : NVMEIO_OP_READ};
    s->gather.one_size = flags & 2;
    s->gather.places = flags & 4 ? s->places : NULL;
    s->gather.count = input_choice(input, RECORDS_MAX);
    s->gather.offsets = s->offsets;
    s->gather.sizes = s->sizes;
    s->gather.size = input_size(input, BYTES_MAX);
    s->gather.gap_max = input_size(input, UINT64_MAX);
    s->limits.op = s->gather.op;
    s->limits.align = 1u << input_choice(input, 13);
    s->limits.merged_bytes = (size_t)input_choice(input, 12) << 12;
    s->file_size = s->gather.op == NVMEIO_OP_WRITE ? INT64_MAX : invent_number(input);
    s->chunk_bytes = 64 + input_size(input, BYTES_MAX);
    if (flags & 8) {
        s->fail_from = input_size(input, BYTES_MAX);
        s->fail_to = s->fail_from + 1 + input_size(input, BYTES_MAX);
    }
    for (size_t i = 0; i < s->gather.count; i++) {
        s->offsets[i] = invent_number(input);
        s->sizes[i] = invent_number(input) % (flags & 16 ? 200 : BYTES_MAX);
        s->places[i] = invent_number(input);
    }
}

static bool overlap(int64_t a, int64_t a_size, int64_t b, int64_t b_size)
{
    return a < b + b_size && b < a + a_size && a_size > 0 && b_size > 0;
}

static int error_of(const struct situation *s, size_t i)
{
    int64_t size = size_of(s, i), end;

    if (s->offsets[i] < 0 || size < 0 || s->places[i] < 0)
        return -EINVAL;
    if (__builtin_add_overflow(s->offsets[i], size, &end))
        return -EOVERFLOW;
    if ((uint64_t)s->places[i] + (uint64_t)size > s->gather.size)
        return -EFAULT;
    return size > 0 && end > s->file_size ? -ENODATA : 0;
}

/* Whether a record shares bytes with an earlier one. */
static bool collides(const struct situation *s, size_t i)
{
    const int64_t *begins = s->gather.op == NVMEIO_OP_WRITE ? s->offsets : s->places;

    for (size_t j = 0; j < i; j++) {
        if (overlap(begins[i], size_of(s, i), begins[j], size_of(s, j)))
            return true;
    }
    return false;
}

/* Fills in the places if the gather has none, as far as the records are valid. */
static struct model model_of(struct situation *s)
{
    struct model model = {0};

    for (size_t i = 0; i < s->gather.count; i++) {
        if (!s->gather.places)
            s->places[i] = (int64_t)model.bytes;
        model.offender = i;
        model.error = error_of(s, i);
        if (model.error)
            return model;
        model.bytes += (uint64_t)size_of(s, i);
    }
    for (size_t i = 0; i < s->gather.count && model.error == 0; i++) {
        model.offender = i;
        model.error = collides(s, i) ? -EEXIST : 0;
    }
    return model;
}

static bool shares(const struct nvmeio_record *record, uint64_t from, uint64_t to)
{
    return (uint64_t)record->offset < to &&
           from < (uint64_t)record->offset + record->size;
}

static uint64_t up(uint64_t number, uint64_t align)
{
    return (number / align + (number % align != 0)) * align;
}

/* Check an extent: it exactly covers records in file order, with gaps of at most
 * max_gap. */
static void check_extent(const struct situation *s,
                         const struct nvmeio_records *records,
                         const struct nvmeio_extent *extent)
{
    uint64_t align = s->limits.align;
    uint64_t from = (uint64_t)extent->offset, end = from;
    uint64_t cover = up(from + extent->size, align) - from / align * align;
    char *memory = s->gather.address;

    CHECK(extent->count > 0 && extent->first + extent->count <= records->count);
    for (size_t i = extent->first; i < extent->first + extent->count; i++) {
        const struct nvmeio_record *record = &records->list[i];
        uint64_t begin = (uint64_t)record->offset;
        CHECK(begin >= from && (i > extent->first || begin == from));
        if (begin > end) {
            CHECK(s->gather.op == NVMEIO_OP_READ && !extent->home);
            uint64_t gap_from = up(end, align), gap_to = begin / align * align;
            CHECK(gap_to <= gap_from || gap_to - gap_from <= s->gather.gap_max);
        }
        if (begin + record->size > end)
            end = begin + record->size;
        if (!extent->copied)
            CHECK(record->place == extent->home + (begin - from));
    }
    CHECK(end - from == extent->size);
    CHECK(extent->home || (extent->copied && cover <= s->limits.merged_bytes));
    if (extent->home)
        CHECK(extent->home >= memory &&
              extent->home + extent->size <= memory + s->gather.size);
}

/* Run a part of an extent as block.c does, in memory of exactly its size. */
static void carry_out(const struct situation *s, struct nvmeio_records *records,
                      const struct nvmeio_extent *extent, size_t begin, size_t end)
{
    char *in_file = file_image + extent->offset + begin;
    char *own = extent->home ? NULL : malloc(end - begin);
    char *source = own ? own : extent->home + begin;
    uint64_t from = (uint64_t)extent->offset + begin,
             to = (uint64_t)extent->offset + end;

    if (from < s->fail_to && s->fail_from < to) {
        nvmeio_records_fail(records, extent, begin, end, -EIO);
    } else if (s->gather.op == NVMEIO_OP_READ) {
        memcpy(source, in_file, end - begin);
        if (extent->copied)
            nvmeio_records_spread(records, extent, source, begin, end);
    } else {
        if (own)
            nvmeio_records_collect(records, extent, own, begin, end);
        memcpy(in_file, source, end - begin);
    }
    free(own);
}

/* Run all extents, or those that are repeated record by record. */
static void carry_out_all(const struct situation *s, struct nvmeio_records *records,
                          bool alone)
{
    struct nvmeio_extent extent;
    size_t next = 0;

    records->next = 0;
    while (alone ? nvmeio_records_next_alone(records, &extent)
                 : nvmeio_records_next(records, &s->limits, &extent)) {
        CHECK(alone ? extent.count == 1 : extent.first == next);
        next = extent.first + extent.count;
        check_extent(s, records, &extent);
        for (size_t at = 0;
             at < extent.size && extent.offset + extent.size <= BYTES_MAX;) {
            size_t end =
                at + s->chunk_bytes < extent.size ? at + s->chunk_bytes : extent.size;
            carry_out(s, records, &extent, at, end);
            at = end;
        }
    }
    CHECK(alone || next == records->count);
}

/* Only records of a gather with unreadable bytes have failed; records that a scatter
 * wrote together with such bytes may fail too. */
static void check_outcome(const struct situation *s, struct nvmeio_records *records)
{
    struct nvmeio_failure failures[RECORDS_MAX];
    uint64_t failed_bytes = 0;
    size_t count, got = nvmeio_records_settle(records);

    memset(errors, 0, sizeof(errors));
    count = nvmeio_records_failures(records, failures, RECORDS_MAX);
    for (size_t i = 0; i < count; i++) {
        CHECK(i == 0 || failures[i - 1].index < failures[i].index);
        CHECK(failures[i].offset == s->offsets[failures[i].index]);
        CHECK((int64_t)failures[i].size == size_of(s, failures[i].index));
        failed_bytes += failures[i].size;
        errors[failures[i].index] = failures[i].error;
    }
    CHECK(got + failed_bytes == records->bytes);
    CHECK(records->error == (count ? failures[0].error : 0));
    for (size_t i = 0; i < records->count; i++) {
        const struct nvmeio_record *record = &records->list[i];
        bool hit = shares(record, s->fail_from, s->fail_to);
        bool failed = errors[record->index] == -EIO;
        CHECK(failed == hit || (failed && s->gather.op == NVMEIO_OP_WRITE));
    }
}

/* Bytes of successful records are in place, and no others have changed. */
static void check_bytes(const struct situation *s)
{
    char *memory = s->gather.address;

    for (size_t i = 0; i < s->gather.count; i++) {
        size_t size = (size_t)size_of(s, i);
        if (size == 0)
            continue;
        char *in_file = file_expected + s->offsets[i];
        char *in_memory = memory_expected + s->places[i];
        if (s->gather.op == NVMEIO_OP_READ)
            memcpy(in_memory, errors[i] ? memory + s->places[i] : in_file, size);
        else
            memcpy(in_file, errors[i] ? file_image + s->offsets[i] : in_memory, size);
    }
    CHECK(memcmp(memory, memory_expected, s->gather.size) == 0);
    CHECK(memcmp(file_image, file_expected, BYTES_MAX) == 0);
}

static void fill(struct situation *s)
{
    static char pattern[2 * BYTES_MAX];

    for (size_t i = 0; pattern[1] == 0 && i < sizeof(pattern); i++)
        pattern[sizeof(pattern) - 1 - i] = (char)(i * 31 + i / 251);
    memcpy(file_image, pattern, BYTES_MAX);
    memcpy(file_expected, pattern, BYTES_MAX);
    memcpy(memory_expected, pattern + BYTES_MAX, BYTES_MAX);
    memcpy(s->gather.address, memory_expected, s->gather.size);
}

static int64_t end_of(const struct nvmeio_records *records)
{
    int64_t last = 0;

    for (size_t i = 0; i < records->count; i++) {
        int64_t end = records->list[i].offset + (int64_t)records->list[i].size;
        last = end > last ? end : last;
    }
    return last;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, size};
    struct situation s;
    struct nvmeio_records *records;
    size_t offender = SIZE_MAX;
    int error;

    invent(&s, &input);
    s.gather.address = malloc(s.gather.size + 1);
    struct model model = model_of(&s);
    records = nvmeio_records_new(&s.gather, s.file_size, &error, &offender);
    CHECK(error == model.error && (records != NULL) == (error == 0));
    if (error)
        CHECK(offender == model.offender);
    if (records && end_of(records) <= BYTES_MAX) {
        CHECK(records->bytes == model.bytes);
        fill(&s);
        carry_out_all(&s, records, false);
        if (s.gather.op == NVMEIO_OP_READ && records->shared)
            carry_out_all(&s, records, true);
        check_outcome(&s, records);
        check_bytes(&s);
    }
    free(records);
    free(s.gather.address);
    return 0;
}
