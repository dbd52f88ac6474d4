/* What fails while a file is opened or compared, and what then is made of it. */
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

/* Where the kernel does not tell the alignment, a read is tried. */
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

static void test_a_comparison_waits_for_what_passes(void)
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

int main(void)
{
    begin();
    test_a_comparison_waits_for_what_passes();
    test_a_signal_does_not_cost_direct_io();
    return 0;
}
