/* A full disk, on a loop device.  Skipped without root. */
#include <sys/stat.h>
#include <sys/wait.h>

#include "transfer.h"

#define DISK_BYTES (24 * MIB)

static char folder[256];
static char device[64];

/* Run a command of the system; its exit status. */
static int run(const char *format, const char *a, const char *b)
{
    char command[1024];

    snprintf(command, sizeof(command), format, a, b);
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void unmount(void)
{
    if (getpid() != test_pid)
        return;
    if (folder[0]) {
        (void)run("umount -l %s 2>/dev/null%s", folder, "");
        rmdir(folder);
    }
    if (device[0])
        (void)run("losetup -d %s 2>/dev/null%s", device, "");
    folder[0] = device[0] = '\0';
}

static void attach(const char *image)
{
    char command[512];

    snprintf(command, sizeof(command), "losetup --show -f %s 2>/dev/null", image);
    FILE *output = popen(command, "r");
    CHECK(output);
    if (!fgets(device, sizeof(device), output))
        device[0] = '\0';
    device[strcspn(device, "\n")] = '\0';
    pclose(output);
    if (!device[0])
        SKIP("losetup gives no loop device");
}

/* Mount a file system on `folder`. */
static void mount_disk(void)
{
    const char *image = path_in(test_folder());
    int fd = open(image, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

    CHECK(fd >= 0 && ftruncate(fd, DISK_BYTES) == 0);
    close(fd);
    attach(image);
    CHECK(run("mkfs.ext4 -q -F %s >/dev/null 2>&1%s", device, "") == 0);
    snprintf(folder, sizeof(folder), "%s.mount", image);
    CHECK(mkdir(folder, 0700) == 0);
    CHECK(run("mount %s %s", device, folder) == 0);
}

/* By the device, through bounces, and through the page cache. */
static void test_a_full_disk_is_an_error_and_keeps_landed_bytes(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    char path[512];

    snprintf(path, sizeof(path), "%s/full", folder);
    for (int way = 0; way < 3; way++) {
        struct guarded memory = guarded_new(2 * DISK_BYTES, way == 1);
        struct nvmeio_file *file =
            open_file(path, O_RDWR | O_CREAT,
                      way == 2 ? NVMEIO_DIRECT_NEVER : NVMEIO_DIRECT_AUTO);
        fill(memory.address, memory.size, 0, 4);
        struct nvmeio_outcome outcome =
            write_at(handle, file, memory.address, memory.size, 0);
        CHECK(outcome.result == -ENOSPC && !outcome.abandoned && outcome.got > 0);
        CHECK(nvmeio_file_size(file) == outcome.got);
        CHECK(file_holds(path, memory.address, (size_t)outcome.got, 0));
        nvmeio_file_release(file);
        unlink(path);
        sync();
        guarded_free(&memory);
    }
    nvmeio_handle_close(handle);
}

int main(void)
{
    const char *engine;

    begin();
    if (geteuid() != 0)
        SKIP("only root can mount a file system");
    atexit(unmount);
    mount_disk();
    FOR_EACH_ENGINE(engine)
    {
        test_a_full_disk_is_an_error_and_keeps_landed_bytes(engine);
    }
    return 0;
}
