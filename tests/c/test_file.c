/* Opening files and refusals, failed writes, and the caller's descriptors, which must
 * not change. */
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "file_internal.h"
#include "transfer.h"

static void test_files_without_offsets_are_refused_at_once(void)
{
    const char *fifo = path_in(test_folder());
    struct nvmeio_file *file;
    int pair[2];

    CHECK(mkfifo(fifo, 0600) == 0);
    CHECK(nvmeio_file_open(fifo, O_RDONLY, NVMEIO_DIRECT_AUTO, &file) == -EINVAL);
    CHECK(nvmeio_file_open(fifo, O_WRONLY, NVMEIO_DIRECT_AUTO, &file) == -EINVAL);
    CHECK(nvmeio_file_open(fifo, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO, &file) ==
          -EINVAL);
    CHECK(nvmeio_file_open(".", O_RDONLY, NVMEIO_DIRECT_AUTO, &file) == -EISDIR);
    CHECK(nvmeio_file_open(".", O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO, &file) ==
          -EISDIR);
    CHECK(nvmeio_file_open("/dev/null", O_RDWR, NVMEIO_DIRECT_AUTO, &file) == -EINVAL);
    CHECK(nvmeio_file_open("no such file", O_RDONLY, NVMEIO_DIRECT_AUTO, &file) ==
          -ENOENT);
    CHECK(pipe2(pair, O_CLOEXEC) == 0);
    CHECK(nvmeio_file_dup(pair[0], NVMEIO_DIRECT_AUTO, &file) == -EINVAL);
    close(pair[0]);
    close(pair[1]);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    CHECK(nvmeio_file_dup(pair[1], NVMEIO_DIRECT_AUTO, &file) == -EINVAL);
    close(pair[0]);
    close(pair[1]);
    CHECK(nvmeio_file_dup(-1, NVMEIO_DIRECT_AUTO, &file) == -EBADF);
}

static void test_unusable_descriptors_are_refused(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_file *file;

    make_file(path, 10, 1);
    int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EINVAL);
    close(fd);
    fd = open(path, O_PATH | O_CLOEXEC);
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EBADF);
    close(fd);
    fd = open(".", O_RDONLY | O_CLOEXEC);
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EISDIR);
    close(fd);
}

static void test_a_file_system_without_direct_io_is_read_buffered(void)
{
    struct nvmeio_file_info info;
    struct nvmeio_file *file;

    CHECK(nvmeio_file_open("/proc/version", O_RDONLY, NVMEIO_DIRECT_ALWAYS, &file) ==
          -EINVAL);
    file = open_file("/proc/version", O_RDONLY, NVMEIO_DIRECT_AUTO);
    nvmeio_file_get_info(file, &info);
    CHECK(!info.direct && info.memory_align == 1 && info.offset_align == 1);
    nvmeio_file_release(file);
}

/* Not for file systems on which a server may delay a call. */
static void test_local_file_systems_are_recognized(void)
{
    struct nvmeio_file *in_memory =
        open_file(path_in("/dev/shm"), O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *other =
        open_file("/proc/version", O_RDONLY, NVMEIO_DIRECT_AUTO);

    CHECK(in_memory->local && in_memory->in_memory && !in_memory->aside);
    CHECK(!other->local && !other->in_memory && !other->aside);
    nvmeio_file_release(in_memory);
    nvmeio_file_release(other);
}

static void test_flags_of_the_caller_stay_as_they_are(void)
{
    static const int kinds[] = {0, O_DIRECT, O_NONBLOCK, O_DIRECT | O_NONBLOCK,
                                O_DSYNC};
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_handle *handle = open_handle(&config);

    make_file(path, 100 * KIB, 1);
    for (int i = 0; i < 5; i++)
        for (int direct = 0; direct < 3; direct++) {
            struct guarded memory = guarded_new(90000, 3);
            struct nvmeio_file *file;
            int fd = open(path, O_RDWR | O_CLOEXEC | kinds[i]);
            CHECK(fd >= 0);
            int flags = fcntl(fd, F_GETFL);
            CHECK(nvmeio_file_dup(fd, (enum nvmeio_direct)direct, &file) == 0);
            CHECK(read_at(handle, file, memory.address, 90000, 77).result == 90000);
            CHECK(file_holds(path, memory.address, 90000, 77));
            CHECK(write_at(handle, file, memory.address, 90000, 77).result == 90000);
            CHECK(fcntl(fd, F_GETFL) == flags && lseek(fd, 0, SEEK_CUR) == 0);
            nvmeio_file_release(file);
            CHECK(fcntl(fd, F_GETFL) == flags);
            close(fd);
            guarded_free(&memory);
        }
    nvmeio_handle_close(handle);
}

/* A caller who opened with O_DSYNC relies on it, for any route. */
static void test_synchronous_descriptors_stay_synchronous(void)
{
    static const int kinds[] = {O_DSYNC, O_SYNC, O_SYNC | O_DIRECT,
                                O_DSYNC | O_NONBLOCK};
    const char *path = path_in(test_folder());

    make_file(path, PAGE, 1);
    for (int i = 0; i < 4; i++) {
        struct nvmeio_file *file;
        int fd = open(path, O_RDWR | O_CLOEXEC | kinds[i]);
        CHECK(fd >= 0 && nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == 0);
        int wanted = kinds[i] & O_SYNC;
        CHECK((fcntl(file->fd, F_GETFL) & O_SYNC) == wanted);
        CHECK(file->direct_fd < 0 ||
              (fcntl(file->direct_fd, F_GETFL) & O_SYNC) == wanted);
        nvmeio_file_release(file);
        close(fd);
    }
}

/* O_NONBLOCK is set only during the open, O_DIRECT stays. */
static void test_an_open_file_is_direct_and_blocks(void)
{
    const char *path = path_in(test_folder());

    make_file(path, PAGE, 1);
    for (int direct = 0; direct < 2; direct++) {
        struct nvmeio_file *file =
            open_file(path, O_RDWR, direct ? NVMEIO_DIRECT_AUTO : NVMEIO_DIRECT_NEVER);
        int fd = nvmeio_file_fd(file);
        CHECK(!(fcntl(fd, F_GETFL) & (O_DIRECT | O_NONBLOCK)));
        CHECK((file->direct_fd >= 0) == file->info.direct);
        CHECK(!file->info.direct ||
              (fcntl(file->direct_fd, F_GETFL) & (O_DIRECT | O_NONBLOCK)) == O_DIRECT);
        nvmeio_file_release(file);
    }
}

static void test_compare_finds_the_first_difference(void)
{
    enum { SIZE = 600 * 1024 };
    const char *path = path_in(test_folder());
    static char bytes[SIZE];
    size_t position;

    make_file(path, SIZE, 1);
    fill(bytes, SIZE, 0, 1);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    CHECK(nvmeio_file_size(file) == SIZE);
    CHECK(nvmeio_file_compare(file, 0, bytes, SIZE, &position) == 0);
    bytes[300001]++;
    CHECK(nvmeio_file_compare(file, 1, bytes + 1, SIZE - 1, &position) == 1);
    CHECK(position == 300000);
    CHECK(nvmeio_file_compare(file, SIZE - 10, bytes + SIZE - 10, 11, &position) ==
          -ENODATA);
    nvmeio_file_release(file);
}

static off_t blocks_of(const char *path)
{
    struct stat status;

    CHECK(stat(path, &status) == 0);
    return status.st_blocks * 512;
}

/* As an ordinary write does, one far past the end leaves a hole before it. */
static void test_a_write_far_past_the_end_takes_only_its_own_space(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(MIB, 0);
    const int64_t far_out = INT64_C(1) << 42;

    fill(memory.address, MIB, 0, 5);
    CHECK(write_at(handle, file, memory.address, MIB, far_out).result == (int64_t)MIB);
    CHECK(nvmeio_file_size(file) == far_out + (int64_t)MIB);
    CHECK(file_holds(path, memory.address, MIB, far_out));
    CHECK(blocks_of(path) < (off_t)(2 * MIB));
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* Files may grow to `limit`; beyond it writes fail with EFBIG instead of a signal. */
static void limit_files(rlim_t limit)
{
    struct rlimit now;

    signal(SIGXFSZ, SIG_IGN);
    CHECK(getrlimit(RLIMIT_FSIZE, &now) == 0);
    now.rlim_cur = limit;
    CHECK(setrlimit(RLIMIT_FSIZE, &now) == 0);
}

static void test_a_failed_write_leaves_no_unwritten_bytes(const char *engine)
{
    static const size_t sizes[] = {100 * KIB, 1000 * KIB};
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(1000 * KIB, 0);

    fill(memory.address, memory.size, 0, 6);
    for (int direct = 0; direct < 3; direct += 2)
        for (int i = 0; i < 2; i++) {
            unlink(path);
            struct nvmeio_file *file =
                open_file(path, O_RDWR | O_CREAT, (enum nvmeio_direct)direct);
            limit_files(90 * KIB);
            struct nvmeio_outcome outcome =
                write_at(handle, file, memory.address, sizes[i], 0);
            limit_files(RLIM_INFINITY);
            CHECK(outcome.result == -EFBIG && !outcome.abandoned);
            CHECK(outcome.got <= (int64_t)(90 * KIB));
            CHECK(nvmeio_file_size(file) <= outcome.got);
            CHECK(file_holds(path, memory.address, (size_t)outcome.got, 0));
            nvmeio_file_release(file);
        }
    guarded_free(&memory);
    nvmeio_handle_close(handle);
    test_path_count--;
}

/* Ranks write their parts into one file, each through its own open file. */
static void test_bytes_of_others_survive_a_failed_write(void)
{
    enum { PART = 256 * 1024 };
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(PART, 0);

    fill(memory.address, PART, 0, 7);
    for (int order = 0; order < 2; order++) {
        unlink(path);
        struct nvmeio_file *second =
            open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
        struct nvmeio_file *first =
            open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
        if (order)
            CHECK(write_at(handle, first, memory.address, PART, 0).result == PART);
        limit_files(PART);
        CHECK(write_at(handle, second, memory.address, PART, PART).result == -EFBIG);
        limit_files(RLIM_INFINITY);
        if (!order)
            CHECK(write_at(handle, first, memory.address, PART, 0).result == PART);
        CHECK(file_holds(path, memory.address, PART, 0));
        CHECK(nvmeio_file_size(first) <= PART);
        nvmeio_file_release(first);
        nvmeio_file_release(second);
    }
    guarded_free(&memory);
    nvmeio_handle_close(handle);
}

/* A child's write extends the file itself, and fails in the child. */
static void test_a_failed_write_of_a_child_leaves_the_bytes_before_it(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine_at(0));
    struct guarded memory = guarded_new(MIB, 0);

    make_file(path, 200 * KIB, 1);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    pid_t child = fork();
    if (child == 0) {
        struct nvmeio_handle *handle = open_handle(&config);
        limit_files(300 * KIB);
        struct nvmeio_outcome outcome =
            write_at(handle, file, memory.address, MIB, 200 * KIB);
        CHECK(outcome.result == -EFBIG);
        CHECK(nvmeio_file_size(file) <= (int64_t)(200 * KIB) + outcome.got);
        nvmeio_handle_close(handle);
        nvmeio_file_release(file);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    fill(memory.address, 200 * KIB, 0, 1);
    CHECK(file_holds(path, memory.address, 200 * KIB, 0));
    guarded_free(&memory);
    nvmeio_file_release(file);
}

static void limit_descriptors(rlim_t limit)
{
    struct rlimit now;

    CHECK(getrlimit(RLIMIT_NOFILE, &now) == 0);
    now.rlim_cur = limit;
    CHECK(setrlimit(RLIMIT_NOFILE, &now) == 0);
}

static bool is_direct(const struct nvmeio_file *file)
{
    struct nvmeio_file_info info;

    nvmeio_file_get_info(file, &info);
    return info.direct;
}

/* A file has one descriptor, and a second one for the page cache. */
static void test_a_missing_descriptor_fails_only_transfers_that_need_it(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(2 * PAGE, 0);
    char *bytes = memory.address;
    struct rlimit before;
    struct nvmeio_file *file, *second;

    fill(bytes, memory.size, 0, 9);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
    close(next);
    limit_descriptors((rlim_t)next + 1);
    file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    CHECK(nvmeio_file_open(path, O_RDWR, NVMEIO_DIRECT_AUTO, &second) == -EMFILE);
    if (is_direct(file)) {
        CHECK(write_at(handle, file, bytes, 2 * PAGE, 0).result == 2 * PAGE);
        memset(bytes, 0, PAGE);
        struct nvmeio_outcome outcome = write_at(handle, file, bytes, PAGE + 1, 0);
        CHECK(outcome.result == -EMFILE && outcome.got == 0);
        limit_descriptors(before.rlim_cur);
        fill(bytes, memory.size, 0, 9);
        CHECK(file_holds(path, bytes, 2 * PAGE, 0));
    }
    limit_descriptors(before.rlim_cur);
    CHECK(write_at(handle, file, bytes, PAGE + 1, 1).result == PAGE + 1);
    CHECK(file_holds(path, bytes, PAGE + 1, 1));
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    guarded_free(&memory);
}

/* In a folder open to everybody, as a user whose umask removes his own rights. */
static void as_anybody(void (*test)(bool has_direct))
{
    const char *folder = path_in(test_folder());

    make_file(folder, PAGE, 1);
    struct nvmeio_file *file = open_file(folder, O_RDONLY, NVMEIO_DIRECT_AUTO);
    bool has_direct = is_direct(file);
    nvmeio_file_release(file);
    unlink(folder);
    CHECK(mkdir(folder, 0700) == 0 && chmod(folder, 0777) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(chdir(folder) == 0);
        CHECK(geteuid() != 0 || setuid(65534) == 0);
        test(has_direct);
        _exit(0);
    }
    int status, fd = open(folder, O_PATH | O_CLOEXEC);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(unlinkat(fd, "data", 0) == 0 && close(fd) == 0 && rmdir(folder) == 0);
    CHECK(status == 0);
}

static mode_t mode_of(const char *path)
{
    struct stat status;

    CHECK(stat(path, &status) == 0);
    return status.st_mode & 07777;
}

static void make_without_rights(bool has_direct)
{
    static const mode_t masks[] = {0222, 0666, 0};
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(3 * PAGE, 0);
    char *bytes = memory.address;

    fill(bytes, memory.size, 0, 10);
    for (int i = 0; i < 3; i++)
        for (int demanded = 0; demanded <= has_direct; demanded++) {
            unlink("data");
            umask(masks[i]);
            struct nvmeio_file *file =
                open_file("data", O_RDWR | O_CREAT,
                          demanded ? NVMEIO_DIRECT_ALWAYS : NVMEIO_DIRECT_AUTO);
            CHECK(mode_of("data") == (0666 & ~masks[i]));
            CHECK(is_direct(file) == has_direct);
            CHECK(write_at(handle, file, bytes, 3 * PAGE, 0).result == 3 * PAGE);
            CHECK(write_at(handle, file, bytes, 2 * PAGE + 9, 5).result ==
                  2 * PAGE + 9);
            memset(bytes, 0, memory.size);
            CHECK(read_at(handle, file, bytes, 2 * PAGE + 9, 5).result == 2 * PAGE + 9);
            CHECK(is_direct(file) == has_direct);
            nvmeio_file_release(file);
            CHECK(chmod("data", 0600) == 0);
            CHECK(file_holds("data", bytes, 2 * PAGE + 9, 5));
            fill(bytes, memory.size, 0, 10);
            CHECK(file_holds("data", bytes, 2 * PAGE + 9, 5));
        }
    nvmeio_handle_close(handle);
    guarded_free(&memory);
}

/* The rights are gone, but open files stay open. */
static void take_rights_away(bool has_direct)
{
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(2 * PAGE, 0);
    char *bytes = memory.address;
    struct nvmeio_outcome outcome;

    fill(bytes, memory.size, 0, 11);
    for (int demanded = 0; demanded <= has_direct; demanded++) {
        make_file("data", 0, 1);
        struct nvmeio_file *file = open_file(
            "data", O_RDWR, demanded ? NVMEIO_DIRECT_ALWAYS : NVMEIO_DIRECT_AUTO);
        CHECK(chmod("data", 0) == 0);
        CHECK(write_at(handle, file, bytes, 2 * PAGE, 0).result == 2 * PAGE);
        CHECK(is_direct(file) == has_direct);
        outcome = write_at(handle, file, bytes, PAGE + 1, 1);
        if (demanded)
            CHECK(outcome.result == -EACCES && outcome.got == 0 && is_direct(file));
        else
            CHECK(outcome.result == PAGE + 1 && !is_direct(file));
        CHECK(read_at(handle, file, bytes, 2 * PAGE, 0).result == 2 * PAGE);
        CHECK(chmod("data", 0600) == 0);
        CHECK(file_holds("data", bytes, 2 * PAGE, 0));
        fill(bytes, memory.size, 0, 11);
        CHECK(file_holds("data", bytes, demanded ? 2 * PAGE : PAGE + 1, !demanded));
        nvmeio_file_release(file);
    }
    nvmeio_handle_close(handle);
    guarded_free(&memory);
}

/* The caller's descriptor is never changed, so the other one must be opened. */
static void duplicate_without_rights(bool has_direct)
{
    struct nvmeio_file *file;

    for (int direct = 0; direct <= has_direct; direct++) {
        unlink("data");
        int fd = open("data", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
        CHECK(fd >= 0 && fcntl(fd, F_SETFL, direct ? O_DIRECT : 0) == 0);
        int error = nvmeio_file_dup(fd, NVMEIO_DIRECT_ALWAYS, &file);
        CHECK(error == -EACCES);
        error = nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file);
        CHECK(error == (direct ? -EACCES : 0));
        if (error == 0) {
            CHECK(!is_direct(file));
            nvmeio_file_release(file);
        }
        CHECK(mode_of("data") == 0444);
        close(fd);
    }
}

static void *open_page_cache(void *argument)
{
    return (void *)(intptr_t)nvmeio_file_fd(argument);
}

static void test_threads_get_the_same_descriptor(void)
{
    const char *path = path_in(test_folder());

    make_file(path, 10, 1);
    unsigned before = descriptors_open();
    for (int i = 0; i < 100; i++) {
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        pthread_t threads[4];
        CHECK(descriptors_open() == before + 1);
        for (int j = 0; j < 4; j++)
            CHECK(pthread_create(&threads[j], NULL, open_page_cache, file) == 0);
        for (int j = 0; j < 4; j++) {
            void *fd;
            CHECK(pthread_join(threads[j], &fd) == 0);
            CHECK((intptr_t)fd == nvmeio_file_fd(file));
        }
        CHECK(descriptors_open() == before + (is_direct(file) ? 2 : 1));
        nvmeio_file_release(file);
    }
    CHECK(descriptors_open() == before);
}

static void test_an_existing_file_is_never_truncated(void)
{
    enum { SIZE = 400 * 1024 };
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(SIZE, 0);

    make_file(path, SIZE / 2, 1);
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_WRITE, file, memory.address, SIZE, 0);
    limit_files(SIZE / 2);
    CHECK(carry_out(handle, &t).result == -EFBIG);
    limit_files(RLIM_INFINITY);
    CHECK(nvmeio_file_size(file) == SIZE / 2);
    nvmeio_file_release(file);
    guarded_free(&memory);
    nvmeio_handle_close(handle);
}

static void test_all_descriptors_are_closed(void)
{
    static const int kinds[] = {0, O_DIRECT, O_NONBLOCK, O_DIRECT | O_NONBLOCK};
    const char *path = path_in(test_folder());
    unsigned before = descriptors_open();
    struct nvmeio_file *file;

    make_file(path, 10, 1);
    for (int direct = 0; direct < 3; direct++) {
        nvmeio_file_release(open_file(path, O_RDWR, (enum nvmeio_direct)direct));
        for (int i = 0; i < 4; i++) {
            int fd = open(path, O_RDWR | O_CLOEXEC | kinds[i]);
            CHECK(fd >= 0);
            CHECK(nvmeio_file_dup(fd, (enum nvmeio_direct)direct, &file) == 0);
            nvmeio_file_release(file);
            close(fd);
            CHECK(descriptors_open() == before);
        }
    }
    CHECK(nvmeio_file_open("/proc/version", O_RDONLY, NVMEIO_DIRECT_ALWAYS, &file) ==
          -EINVAL);
    CHECK(descriptors_open() == before);
}

/* A size that was seen before counts for reads, but not after a truncation. */
static void test_a_read_past_a_new_end_touches_no_memory(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of("sync");
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(2 * PAGE, 0);

    make_file(path, 2 * PAGE, 1);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    CHECK(read_at(handle, file, memory.address, 2 * PAGE, 0).result == 2 * PAGE);
    CHECK(nvmeio_file_truncate(file, PAGE) == 0);
    memset(memory.address, 7, 2 * PAGE);
    CHECK(read_at(handle, file, memory.address, 2 * PAGE, 0).result == -ENODATA);
    for (size_t i = 0; i < 2 * PAGE; i++)
        CHECK(memory.address[i] == 7);
    /* Another process is not noticed before the read meets the end. */
    CHECK(nvmeio_file_truncate(file, 2 * PAGE) == 0);
    CHECK(read_at(handle, file, memory.address, 2 * PAGE, 0).result == 2 * PAGE);
    CHECK(truncate(path, PAGE) == 0);
    struct nvmeio_outcome outcome = read_at(handle, file, memory.address, 2 * PAGE, 0);
    CHECK(outcome.result == -ENODATA && outcome.got == PAGE);
    nvmeio_file_release(file);
    guarded_free(&memory);
    nvmeio_handle_close(handle);
}

int main(void)
{
    const char *engine;

    begin();
    test_files_without_offsets_are_refused_at_once();
    test_unusable_descriptors_are_refused();
    test_a_file_system_without_direct_io_is_read_buffered();
    test_local_file_systems_are_recognized();
    test_flags_of_the_caller_stay_as_they_are();
    test_synchronous_descriptors_stay_synchronous();
    test_an_open_file_is_direct_and_blocks();
    test_compare_finds_the_first_difference();
    test_a_write_far_past_the_end_takes_only_its_own_space();
    FOR_EACH_ENGINE(engine)
    {
        test_a_failed_write_leaves_no_unwritten_bytes(engine);
    }
    test_bytes_of_others_survive_a_failed_write();
    test_a_failed_write_of_a_child_leaves_the_bytes_before_it();
    test_a_missing_descriptor_fails_only_transfers_that_need_it();
    test_threads_get_the_same_descriptor();
    as_anybody(make_without_rights);
    as_anybody(take_rights_away);
    as_anybody(duplicate_without_rights);
    test_an_existing_file_is_never_truncated();
    test_all_descriptors_are_closed();
    test_a_read_past_a_new_end_touches_no_memory();
    return 0;
}
