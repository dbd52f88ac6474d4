/* What fails while a file is opened, and what then is made of it. */
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

int main(void)
{
    begin();
    test_a_signal_does_not_cost_direct_io();
    return 0;
}
