/* A forked child that lacks a resource at its first use of a handle, and has it later.
 * */
#include <sys/wait.h>

#include "fault.h"
#include "transfer.h"

#define SIZE ((size_t)10000)

/* Runs in the child: both attempts to start workers fail, in its first call and in the
 * submission. */
static void use(struct nvmeio_handle *handle, struct nvmeio_file *file,
                const char *fault, int error)
{
    char bytes[SIZE], expected[SIZE];

    fill(expected, SIZE, 0, 1);
    nvmeio_fault_configure(fault);
    int64_t result = read_at(handle, file, bytes, SIZE, 0).result;
    CHECK(result == error || (error == -EMFILE && result == -ENFILE));
    CHECK(nvmeio_fault_fired(NVMEIO_FAULT_MEMORY) +
              nvmeio_fault_fired(NVMEIO_FAULT_THREADS) +
              nvmeio_fault_fired(NVMEIO_FAULT_DESCRIPTORS) ==
          2);
    nvmeio_fault_configure("");
    CHECK(read_at(handle, file, bytes, SIZE, 0).result == (int64_t)SIZE);
    CHECK(memcmp(bytes, expected, SIZE) == 0);
    nvmeio_handle_close(handle);
}

/* Of memory, the second occasion is the request, and the third a look at the page
 * cache. */
int main(void)
{
    static const struct {
        const char *fault;
        int error;
    } cases[] = {{"memory@1,memory@4", -ENOMEM},
                 {"threads@1,threads@2", -EAGAIN},
                 {"descriptors@1,descriptors@2", -EMFILE}};
    const char *path, *engine;

    begin();
    path = path_in(test_folder());
    make_file(path, SIZE, 1);
    FOR_EACH_ENGINE(engine)
    {
        struct nvmeio_config config = config_of(engine);
        config.workers = 3;
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        struct nvmeio_handle *handle = open_handle(&config);
        for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
            pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0) {
                use(handle, file, cases[i].fault, cases[i].error);
                _exit(0);
            }
            int status;
            CHECK(waitpid(child, &status, 0) == child && status == 0);
        }
        nvmeio_handle_close(handle);
        nvmeio_file_release(file);
    }
    return 0;
}
