/* Bytes are written and read back on every engine: any size, offset, address and
 * configuration, by the requested route. */
#include "transfer.h"

#define FILE_BYTES (768 * KIB)

/* The expected contents, and the file. */
struct model {
    const char *path;
    char *bytes;
};

static struct model model_new(const char *folder)
{
    struct model model = {path_in(folder), malloc(FILE_BYTES)};

    CHECK(model.bytes);
    make_file(model.path, FILE_BYTES, 1);
    fill(model.bytes, FILE_BYTES, 0, 1);
    return model;
}

static void round_trip(struct nvmeio_handle *handle, struct nvmeio_file *file,
                       struct model *model, struct nvmeio_transfer *t, size_t residue,
                       bool perform)
{
    static unsigned seed;
    struct guarded out = guarded_new(t->size, residue);
    struct guarded in = guarded_new(t->size, residue);
    size_t from = t->offset > 8192 ? (size_t)t->offset - 8192 : 0;
    size_t window = (size_t)t->offset + t->size + 16384 - from;
    int64_t size = (int64_t)t->size;

    fill(out.address, t->size, (uint64_t)t->offset, ++seed);
    *t = transfer_of(NVMEIO_OP_WRITE, file, out.address, t->size, t->offset);
    CHECK(carry_out_by(perform, handle, t).result == size);
    memcpy(model->bytes + t->offset, out.address, t->size);
    if (window > FILE_BYTES - from)
        window = FILE_BYTES - from;
    CHECK(file_holds(model->path, model->bytes + from, window, (int64_t)from));
    t->op = NVMEIO_OP_READ;
    t->address = in.address;
    CHECK(carry_out_by(perform, handle, t).result == size);
    CHECK(memcmp(in.address, out.address, t->size) == 0);
    guarded_free(&out);
    guarded_free(&in);
}

static void all_sizes(const struct nvmeio_config *config, struct model *model)
{
    size_t block = (config->block_bytes + 4095) / 4096 * 4096;
    const size_t sizes[] = {
        0,    1,    511,   512,       513,
        4095, 4096, block, block + 1, 2 * block * config->queue_depth};
    static const struct {
        int64_t offset;
        size_t residue;
    } places[] = {{0, 0},   {0, 1},     {512, 512}, {4096, 64},
                  {777, 0}, {777, 777}, {5121, 0},  {4096 + 511, 511}};
    struct nvmeio_handle *handle = open_handle(config);
    struct nvmeio_file *file = open_file(model->path, O_RDWR, NVMEIO_DIRECT_AUTO);

    for (unsigned i = 0; i < 10; i++)
        for (unsigned j = 0; j < 8; j++)
            for (int perform = 0; perform < 2; perform++) {
                size_t limit = FILE_BYTES - (size_t)places[j].offset;
                struct nvmeio_transfer t = {
                    .size = sizes[i] < limit ? sizes[i] : limit,
                    .offset = places[j].offset,
                };
                round_trip(handle, file, model, &t, places[j].residue, perform);
            }
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* Uses the last `shape_count` shapes, because a disk is slow at small writes. */
static void test_every_size_offset_and_configuration(const char *folder,
                                                     int shape_count)
{
    static const struct {
        size_t block_bytes;
        unsigned depth, workers;
    } shapes[] = {{1, 1, 1}, {4096, 3, 3}, {64 * KIB, 4, 1}};
    struct model model = model_new(folder);
    const char *engine;

    FOR_EACH_ENGINE(engine)
    {
        for (int i = 3 - shape_count; i < 3; i++)
            for (int single = shape_count == 3 ? 0 : 1; single < 2; single++) {
                struct nvmeio_config config = config_of(engine);
                config.block_bytes = shapes[i].block_bytes;
                config.queue_depth = shapes[i].depth;
                config.workers = shapes[i].workers;
                config.single_submit = single;
                all_sizes(&config, &model);
            }
    }
    free(model.bytes);
}

/* Every pair of residues of the offset and of the address modulo a sector. */
static void test_every_residue_of_offset_and_address(void)
{
    struct model model = model_new(test_folder());
    const char *engine;

    FOR_EACH_ENGINE(engine)
    {
        struct nvmeio_config config = config_of(engine);
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(model.path, O_RDWR, NVMEIO_DIRECT_AUTO);
        for (int64_t offset = 4096; offset < 4096 + 512; offset += 73)
            for (size_t residue = 0; residue < 512; residue += 73) {
                struct nvmeio_transfer t = {.size = 9000, .offset = offset};
                round_trip(handle, file, &model, &t, residue, false);
            }
        nvmeio_file_release(file);
        nvmeio_handle_close(handle);
    }
    free(model.bytes);
}

static struct nvmeio_stats difference(struct nvmeio_handle *handle,
                                      struct nvmeio_stats *before)
{
    struct nvmeio_stats now, change;

    nvmeio_handle_stats(handle, &now);
    change = now;
    change.requests -= before->requests;
    change.bytes_direct -= before->bytes_direct;
    change.bytes_buffered -= before->bytes_buffered;
    change.bytes_bounced -= before->bytes_bounced;
    *before = now;
    return change;
}

struct route_case {
    enum nvmeio_direct direct;
    enum nvmeio_bounce bounce;
    int64_t offset;
    size_t residue;
    size_t size, direct_bytes, buffered_bytes; /* the rest is bounced */
};

static const struct route_case route_cases[] = {
    /* Aligned transfers go directly to the device, unless that is disabled. */
    {NVMEIO_DIRECT_AUTO, NVMEIO_BOUNCE_AUTO, 4096, 0, 40960, 40960, 0},
    {NVMEIO_DIRECT_ALWAYS, NVMEIO_BOUNCE_AUTO, 4096, 0, 40960, 40960, 0},
    {NVMEIO_DIRECT_NEVER, NVMEIO_BOUNCE_AUTO, 4096, 0, 40960, 0, 40960},
    {NVMEIO_DIRECT_AUTO, NVMEIO_BOUNCE_ALWAYS, 4096, 0, 40960, 0, 0},
    /* Unaligned addresses go through bounces or the page cache. */
    {NVMEIO_DIRECT_AUTO, NVMEIO_BOUNCE_AUTO, 4096, 1, 40960, 0, 0},
    {NVMEIO_DIRECT_AUTO, NVMEIO_BOUNCE_NEVER, 4096, 1, 40960, 0, 40960},
    {NVMEIO_DIRECT_ALWAYS, NVMEIO_BOUNCE_NEVER, 4096, 1, 40960, 0, 40960},
    /* Ragged ends: 4096 - 1000 bytes before the first page boundary, 1000 at the end.
     */
    {NVMEIO_DIRECT_AUTO, NVMEIO_BOUNCE_AUTO, 5096, 1000, 40960, 36864, 4096},
};

static void check_route(const struct route_case *c, const char *engine,
                        const char *path)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_stats before = {0}, change;

    config.bounce = c->bounce;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, c->direct);
    struct guarded memory = guarded_new(c->size, c->residue);
    for (int perform = 0; perform < 2; perform++)
        for (int op = 0; op < 2; op++) {
            struct nvmeio_transfer t =
                transfer_of(op ? NVMEIO_OP_WRITE : NVMEIO_OP_READ, file, memory.address,
                            c->size, c->offset);
            cool(path);
            CHECK(carry_out_by(perform, handle, &t).result == (int64_t)c->size);
            change = difference(handle, &before);
            CHECK(change.requests == 1);
            CHECK(change.bytes_direct == c->direct_bytes);
            CHECK(change.bytes_buffered == c->buffered_bytes);
            CHECK(change.bytes_bounced ==
                  c->size - c->direct_bytes - c->buffered_bytes);
        }
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_statistics_show_the_requested_route(const char *folder)
{
    const char *path = path_in(folder);
    struct nvmeio_file_info info;
    const char *engine;

    make_file(path, 256 * KIB, 2);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    nvmeio_file_get_info(file, &info);
    nvmeio_file_release(file);
    if (!info.direct || info.offset_align == 1) {
        fprintf(stderr, "no O_DIRECT with an alignment in %s\n", folder);
        return;
    }
    FOR_EACH_ENGINE(engine)
    {
        for (unsigned i = 0; i < sizeof(route_cases) / sizeof(route_cases[0]); i++)
            check_route(&route_cases[i], engine, path);
    }
}

static void test_a_read_past_the_end_moves_nothing_and_reports_what_there_is(void)
{
    static const int64_t offsets[] = {0, 4096, 9999, 10000, 20000};
    const char *path = path_in(test_folder());
    const char *engine;

    make_file(path, 10000, 3);
    FOR_EACH_ENGINE(engine)
    {
        struct nvmeio_config config = config_of(engine);
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        for (int i = 0; i < 5; i++) {
            struct guarded memory = guarded_new(10001, 0);
            int64_t there = offsets[i] < 10000 ? 10000 - offsets[i] : 0;
            memset(memory.address, CANARY, memory.size);
            struct nvmeio_outcome outcome =
                read_at(handle, file, memory.address, memory.size, offsets[i]);
            CHECK(outcome.result == -ENODATA && outcome.got == there);
            memory.size = 0;
            guarded_free(&memory);
        }
        nvmeio_file_release(file);
        nvmeio_handle_close(handle);
    }
}

static void test_arguments_out_of_range_are_refused(void)
{
    struct nvmeio_config config = config_of("sync");
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_request *request;
    char byte;
    const char *path = path_in(test_folder());

    make_file(path, 1, 0);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_WRITE, file, &byte, 1, 0);
    CHECK(nvmeio_submit(handle, &t, &request) == -EBADF);
    t = transfer_of(NVMEIO_OP_READ, file, &byte, 1, -1);
    CHECK(nvmeio_submit(handle, &t, &request) == -EINVAL);
    t = transfer_of(NVMEIO_OP_READ, file, &byte, 2, INT64_MAX - 1);
    CHECK(nvmeio_submit(handle, &t, &request) == -EOVERFLOW);
    t = transfer_of(NVMEIO_OP_READ, file, NULL, 1, 0);
    CHECK(nvmeio_submit(handle, &t, &request) == -EINVAL);
    t = transfer_of(NVMEIO_OP_READ, NULL, &byte, 1, 0);
    CHECK(nvmeio_submit(handle, &t, &request) == -EINVAL);
    t = transfer_of((enum nvmeio_op)7, file, &byte, 1, 0);
    CHECK(nvmeio_submit(handle, &t, &request) == -EINVAL);
    nvmeio_file_release(file);
    file = open_file(path, O_WRONLY, NVMEIO_DIRECT_AUTO);
    t = transfer_of(NVMEIO_OP_READ, file, &byte, 1, 0);
    CHECK(nvmeio_submit(handle, &t, &request) == -EBADF);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_options_beyond_their_limits_are_refused(void)
{
    struct nvmeio_config good = config_of("sync");
    struct nvmeio_handle *handle;

    for (int i = 0; i < 7; i++) {
        struct nvmeio_config bad = good;
        size_t *blocks[] = {&bad.block_bytes, &bad.block_bytes};
        unsigned *counts[] = {&bad.queue_depth, &bad.queue_depth, &bad.workers,
                              &bad.workers};
        const size_t block_values[] = {0, NVMEIO_BLOCK_BYTES_MAX + 1};
        const unsigned values[] = {0, NVMEIO_QUEUE_DEPTH_MAX + 1, 0,
                                   NVMEIO_WORKERS_MAX + 1};
        if (i < 2)
            *blocks[i] = block_values[i];
        else if (i < 6)
            *counts[i - 2] = values[i - 2];
        else
            bad.engine = "steam";
        CHECK(nvmeio_handle_open(&bad, &handle) == -EINVAL);
    }
}

/* Two writes in flight share a page but no byte: one ends in its middle through the
 * page cache, the other begins at a sector of it. */
static void test_neighbours_in_one_page_do_not_undo_each_other(void)
{
    const char *path = path_in(test_folder());
    const char *engine;

    FOR_EACH_ENGINE(engine)
    {
        struct nvmeio_config config = config_of(engine);
        config.workers = 4;
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file =
            open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
        char *bytes;
        CHECK(posix_memalign((void **)&bytes, PAGE, 4 * PAGE) == 0);
        for (unsigned round = 0; round < 200; round++) {
            fill(bytes, 4 * PAGE, 0, round);
            struct nvmeio_transfer left =
                transfer_of(NVMEIO_OP_WRITE, file, bytes, 5000, 0);
            struct nvmeio_transfer right =
                transfer_of(NVMEIO_OP_WRITE, file, bytes + 5120, 4 * PAGE - 5120, 5120);
            struct nvmeio_request *a = submit(handle, round & 1 ? &left : &right);
            struct nvmeio_request *b = submit(handle, round & 1 ? &right : &left);
            CHECK(finish(a).result > 0 && finish(b).result > 0);
            CHECK(file_holds(path, bytes, 5000, 0));
            CHECK(file_holds(path, bytes + 5120, 4 * PAGE - 5120, 5120));
            struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = file};
            CHECK(round % 16 || carry_out(handle, &sync).result == 0);
        }
        free(bytes);
        nvmeio_file_release(file);
        nvmeio_handle_close(handle);
    }
}

int main(void)
{
    begin();
    test_arguments_out_of_range_are_refused();
    test_options_beyond_their_limits_are_refused();
    test_every_size_offset_and_configuration(test_folder(), 1);
    test_every_size_offset_and_configuration("/dev/shm", 3);
    test_every_residue_of_offset_and_address();
    /* Transfers that faults cut short continue through the page cache. */
    if (!getenv("NVMEIO_FAULTS")) {
        test_statistics_show_the_requested_route(test_folder());
        test_statistics_show_the_requested_route("/dev/shm");
    }
    test_a_read_past_the_end_moves_nothing_and_reports_what_there_is();
    test_neighbours_in_one_page_do_not_undo_each_other();
    return 0;
}
