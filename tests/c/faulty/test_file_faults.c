/* Faults while a file is opened, compared or truncated. */
#include "fault.h"
#include "transfer.h"

static bool is_direct(const char *path)
{
    struct nvmeio_file_info info;
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);

    nvmeio_file_get_info(file, &info);
    nvmeio_file_release(file);
    return info.direct;
}

/* If the kernel does not report the alignment, a read probes it. */
static void test_a_signal_does_not_cost_direct_io(void)
{
    const char *path = path_in("/dev/shm");

    make_file(path, 8192, 1);
    bool direct = is_direct(path);
    if (!direct)
        SKIP("the file system has no O_DIRECT");
    static const char *const faults[] = {"eintr@1", "eagain@1", "stat@2,eintr@1"};
    for (unsigned i = 0; i < 3; i++) {
        nvmeio_fault_configure(faults[i]);
        CHECK(is_direct(path));
        CHECK(nvmeio_fault_fired(i == 1 ? NVMEIO_FAULT_EAGAIN : NVMEIO_FAULT_EINTR) ==
              1);
    }
}

static void test_a_comparison_retries_passing_errors(void)
{
    static const char *const faults[] = {"eintr@1,eintr@2", "eagain@1,eagain@2"};
    const char *path = path_in(test_folder());
    char bytes[8192];
    size_t position;

    make_file(path, sizeof(bytes), 1);
    fill(bytes, sizeof(bytes), 0, 1);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);
    for (unsigned i = 0; i < 2; i++) {
        nvmeio_fault_configure(faults[i]);
        CHECK(nvmeio_file_compare(file, 0, bytes, sizeof(bytes), &position) == 0);
        CHECK(nvmeio_fault_fired(i ? NVMEIO_FAULT_EAGAIN : NVMEIO_FAULT_EINTR) == 2);
    }
    nvmeio_fault_configure("eagain=1000");
    CHECK(nvmeio_file_compare(file, 0, bytes, sizeof(bytes), &position) == -EAGAIN);
    nvmeio_fault_configure("");
    nvmeio_file_release(file);
}

/* The device refuses O_DIRECT at a transfer, although the file was opened with it. */
static void test_a_device_that_refuses_direct_io_is_used_through_the_page_cache(void)
{
    const char *path = path_in(test_folder()), *engine;
    struct guarded memory = guarded_new(PAGE, 0);
    char *bytes = memory.address, expected[PAGE];

    make_file(path, PAGE, 1);
    fill(expected, PAGE, 0, 1);
    if (!is_direct(path)) {
        guarded_free(&memory);
        return;
    }
    FOR_EACH_ENGINE(engine)
    {
        for (int demanded = 0; demanded < 2; demanded++) {
            struct nvmeio_config config = config_of(engine);
            struct nvmeio_handle *handle = open_handle(&config);
            struct nvmeio_file_info info;
            struct nvmeio_file *file = open_file(
                path, O_RDONLY, demanded ? NVMEIO_DIRECT_ALWAYS : NVMEIO_DIRECT_AUTO);

            cool(path);
            nvmeio_fault_configure(demanded ? "direct@1,seed=1" : "direct@1");
            int64_t result = read_at(handle, file, bytes, PAGE, 0).result;
            CHECK(nvmeio_fault_fired(NVMEIO_FAULT_DIRECT) == 1);
            nvmeio_fault_configure("");
            nvmeio_file_get_info(file, &info);
            CHECK(info.direct == demanded);
            if (demanded)
                CHECK(result == -EINVAL || result == -EOPNOTSUPP);
            else
                CHECK(result == (int64_t)PAGE && memcmp(bytes, expected, PAGE) == 0);
            CHECK(read_at(handle, file, bytes, PAGE, 0).result == (int64_t)PAGE);
            nvmeio_handle_close(handle);
            nvmeio_file_release(file);
        }
    }
    guarded_free(&memory);
}

/* The caller handles the signal and repeats the call; an interrupted open leaves no new
 * file. */
static void test_a_signal_ends_an_open(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_file *file;
    unsigned refused = 0;

    for (char fault[] = "signal@1"; fault[7] <= '3'; fault[7]++) {
        nvmeio_fault_configure(fault);
        int error = nvmeio_file_open(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO, &file);
        CHECK(error == (nvmeio_fault_fired(NVMEIO_FAULT_SIGNAL) ? -EINTR : 0));
        CHECK(error == 0 || access(path, F_OK));
        refused += error != 0;
        if (error == 0)
            nvmeio_file_release(file);
    }
    nvmeio_fault_configure("");
    CHECK(refused == 2);
}

/* Of eight random errors some are EINTR, and the others EIO. */
static void test_a_signal_does_not_prevent_a_truncation(void)
{
    const char *path = path_in(test_folder());
    unsigned cut = 0;

    make_file(path, PAGE, 1);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_NEVER);
    for (char fault[] = "truncate@1,seed=0"; fault[16] < '8'; fault[16]++) {
        nvmeio_fault_configure(fault);
        int error = nvmeio_file_truncate(file, fault[16]);
        CHECK(nvmeio_fault_fired(NVMEIO_FAULT_TRUNCATE) == 1);
        nvmeio_fault_configure("");
        CHECK(error == -EIO || (error == 0 && nvmeio_file_size(file) == fault[16]));
        cut += error == 0;
    }
    CHECK(cut > 0 && cut < 8);
    nvmeio_file_release(file);
}

int main(void)
{
    begin();
    test_a_signal_ends_an_open();
    test_a_device_that_refuses_direct_io_is_used_through_the_page_cache();
    test_a_comparison_retries_passing_errors();
    test_a_signal_does_not_prevent_a_truncation();
    test_a_signal_does_not_cost_direct_io();
    return 0;
}
