/* Blocks of files on FUSE and the like are carried out by threads, several at a time,
 * while the kernel serves other files of the same handle. */
#include <semaphore.h>
#include <sys/syscall.h>

#include "file_internal.h"
#include "transfer.h"

#define BLOCK (64 * KIB)
#define BLOCKS 8

/* Replace pread() in the library; it waits while `held_fd` is read. */
static atomic_int held_fd = -1;
static sem_t entered, released;

ssize_t pread(int fd, void *address, size_t size, off_t offset)
{
    if (fd == atomic_load(&held_fd)) {
        sem_post(&entered);
        while (sem_wait(&released))
            ;
    }
    return syscall(SYS_pread64, fd, address, size, offset);
}

static void test_other_files_do_not_wait(const char *engine)
{
    const char *slow_path = path_in(test_folder()), *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded slow_memory = guarded_new(BLOCKS * BLOCK, 0);
    struct guarded memory = guarded_new(BLOCK, 0);

    make_file(slow_path, BLOCKS * BLOCK, 1);
    make_file(path, BLOCK, 2);
    struct nvmeio_file *slow = open_file(slow_path, O_RDONLY, NVMEIO_DIRECT_NEVER);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    slow->aside = true;
    atomic_store(&held_fd, nvmeio_file_fd(slow));
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, slow, slow_memory.address, BLOCKS * BLOCK, 0);
    struct nvmeio_request *held = submit(handle, &t);
    for (int i = 0; i < BLOCKS; i++)
        while (sem_wait(&entered))
            ;
    for (int i = 0; i < 3; i++) {
        t = transfer_of(NVMEIO_OP_READ, file, memory.address, BLOCK, 0);
        CHECK(carry_out(handle, &t).result == BLOCK);
    }
    CHECK(!nvmeio_request_done(held));
    atomic_store(&held_fd, -1);
    for (int i = 0; i < BLOCKS; i++)
        sem_post(&released);
    CHECK(finish(held).result == BLOCKS * BLOCK);
    CHECK(file_holds(slow_path, slow_memory.address, BLOCKS * BLOCK, 0));
    CHECK(file_holds(path, memory.address, BLOCK, 0));
    nvmeio_file_release(slow);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    guarded_free(&slow_memory);
    guarded_free(&memory);
}

int main(void)
{
    const char *engine;

    begin();
    sem_init(&entered, 0, 0);
    sem_init(&released, 0, 0);
    FOR_EACH_ENGINE(engine)
    {
        if (strcmp(engine, "sync") != 0)
            test_other_files_do_not_wait(engine);
    }
    return 0;
}
