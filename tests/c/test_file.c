/* What is opened and what is refused, what is left of a file when a write fails, and
 * that nothing of the caller's is changed. */
#include <dirent.h>
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

static void test_what_has_no_offsets_is_refused_at_once(void)
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

static void test_descriptors_that_cannot_serve_are_refused(void)
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

/* Who opened with O_DSYNC relies on it, whichever way the bytes go. */
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

static void test_created_is_only_what_was_made_or_emptied(void)
{
    static const struct {
        int flags;
        bool there, created;
    } cases[] = {
        {O_CREAT, false, true},
        {O_CREAT, true, false},
        {O_CREAT | O_EXCL, false, true},
        {O_CREAT | O_TRUNC, true, true},
        {O_TRUNC, true, true},
        {O_EXCL, true, false},
        {0, true, false},
    };
    const char *path = path_in(test_folder());

    for (int i = 0; i < 7; i++) {
        struct nvmeio_file_info info;
        unlink(path);
        if (cases[i].there)
            make_file(path, 10, 1);
        struct nvmeio_file *file =
            open_file(path, O_RDWR | cases[i].flags, NVMEIO_DIRECT_AUTO);
        nvmeio_file_get_info(file, &info);
        CHECK(info.created == cases[i].created);
        CHECK(info.readable && info.writable);
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

/* An ordinary write far out leaves a hole before it, and so does ours. */
static void test_a_write_far_out_in_a_new_file_takes_no_more_than_its_bytes(void)
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

/* Files may grow to `limit`; what hits the limit gets EFBIG instead of a signal. */
static void limit_files(rlim_t limit)
{
    struct rlimit now;

    signal(SIGXFSZ, SIG_IGN);
    CHECK(getrlimit(RLIMIT_FSIZE, &now) == 0);
    now.rlim_cur = limit;
    CHECK(setrlimit(RLIMIT_FSIZE, &now) == 0);
}

static void test_a_failed_write_leaves_no_bytes_that_nobody_wrote(const char *engine)
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

/* Ranks write their parts into one file, each through a file of its own. */
static void test_what_others_wrote_survives_a_failed_write(void)
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

/* A write that begins while a file is being cut back: the library's ftruncate() is this
 * one, which gives the other write time to come through, if nothing holds it up. */
static struct nvmeio_file *rivals_file;
static atomic_bool rival_may_go, rival_is_done;

static void *write_page(void *argument)
{
    static const char page[PAGE];

    while (!atomic_load(&rival_may_go))
        usleep(100);
    nvmeio_file_note_end(rivals_file, PAGE);
    CHECK(pwrite(nvmeio_file_fd(rivals_file), page, PAGE, 0) == (ssize_t)PAGE);
    atomic_store(&rival_is_done, true);
    return argument;
}

int ftruncate(int fd, off_t size)
{
    if (rivals_file) {
        atomic_store(&rival_may_go, true);
        for (int i = 0; i < 1000 && !atomic_load(&rival_is_done); i++)
            usleep(100);
    }
    return (int)syscall(SYS_ftruncate, fd, size);
}

/* By the same open, or another one of the same file. */
static void test_cutting_back_spares_a_write_that_begins_meanwhile(bool another)
{
    const char *path = path_in(test_folder());
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *second = open_file(path, O_RDWR, NVMEIO_DIRECT_NEVER);
    const int64_t end = 3 * (int64_t)PAGE;
    pthread_t thread;

    nvmeio_file_note_end(file, end);
    CHECK(nvmeio_file_truncate(file, end) == 0);
    rivals_file = another ? second : file;
    CHECK(pthread_create(&thread, NULL, write_page, NULL) == 0);
    nvmeio_file_cut_back(file, 0, end);
    pthread_join(thread, NULL);
    rivals_file = NULL;
    CHECK(nvmeio_file_size(file) == (int64_t)PAGE);
    nvmeio_file_release(second);
    nvmeio_file_release(file);
}

static void test_cutting_back_spares_what_others_are_about_to_write(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_file *other = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *elsewhere =
        open_file(path_in(test_folder()), O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *on_another_device =
        open_file(path_in("/dev/shm"), O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);

    CHECK(nvmeio_file_truncate(file, 1000) == 0);
    nvmeio_file_note_end(file, 1000);
    nvmeio_file_note_end(other, 600);
    nvmeio_file_note_end(elsewhere, 900);
    nvmeio_file_note_end(on_another_device, 900);
    nvmeio_file_cut_back(file, 100, 1000);
    CHECK(nvmeio_file_size(file) == 600);
    /* No longer in flight, but that is not known. */
    nvmeio_file_release(other);
    CHECK(nvmeio_file_truncate(file, 1000) == 0);
    nvmeio_file_cut_back(file, 100, 1000);
    CHECK(nvmeio_file_size(file) == 600);
    /* Nobody has it open, so nobody writes. */
    nvmeio_file_release(file);
    file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    nvmeio_file_note_end(file, 600);
    nvmeio_file_cut_back(file, 100, 600);
    CHECK(nvmeio_file_size(file) == 100);
    nvmeio_file_release(file);
    nvmeio_file_release(elsewhere);
    nvmeio_file_release(on_another_device);
}

/* Nobody knows what a child writes to what it has inherited. */
static void test_what_a_child_has_inherited_is_not_cut(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);

    CHECK(nvmeio_file_truncate(file, 1000) == 0);
    nvmeio_file_note_end(file, 1000);
    pid_t child = fork();
    if (child == 0) {
        nvmeio_file_release(file);
        file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
        nvmeio_file_note_end(file, 1000);
        nvmeio_file_cut_back(file, 900, 1000);
        CHECK(nvmeio_file_size(file) == 900);
        nvmeio_file_release(file);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    nvmeio_file_cut_back(file, 100, 1000);
    CHECK(nvmeio_file_size(file) == 900);
    nvmeio_file_release(file);
}

/* Though the parent has the same file open, and the child has inherited that open. */
static void test_a_child_cuts_back_what_it_has_opened_itself(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_file *inherited =
        open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);

    pid_t child = fork();
    if (child == 0) {
        struct nvmeio_file *own = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
        CHECK(nvmeio_file_truncate(own, 1000) == 0);
        nvmeio_file_note_end(own, 1000);
        nvmeio_file_cut_back(own, 100, 1000);
        CHECK(nvmeio_file_size(own) == 100);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    nvmeio_file_release(inherited);
}

/* A child does not know what its parent writes: it makes nothing longer or shorter
 * but by writing. */
static void test_a_child_does_not_set_the_length_of_its_parents_file(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(MIB, 0);

    CHECK(nvmeio_file_is_ours(file));
    make_file(path, 200 * KIB, 1);
    pid_t child = fork();
    if (child == 0) {
        struct nvmeio_handle *handle = open_handle(&config);
        CHECK(!nvmeio_file_is_ours(file));
        limit_files(300 * KIB);
        CHECK(write_at(handle, file, memory.address, MIB, 200 * KIB).result == -EFBIG);
        nvmeio_handle_close(handle);
        nvmeio_file_release(file);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(nvmeio_file_size(file) >= (int64_t)(200 * KIB));
    CHECK(nvmeio_file_size(file) <= (int64_t)(300 * KIB));
    guarded_free(&memory);
    nvmeio_file_release(file);
}

static void test_what_a_write_has_not_made_longer_is_not_cut(void)
{
    enum { SIZE = 256 * 1024 };
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine_at(0));
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *first = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *second = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(SIZE, 0);
    struct nvmeio_request *request;

    fill(memory.address, SIZE, 0, 8);
    CHECK(write_at(handle, second, memory.address, SIZE, 0).result == SIZE);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_WRITE, first, memory.address, SIZE, 0);
    nvmeio_handle_stop(handle);
    CHECK(nvmeio_submit(handle, &t, &request) == -EPIPE);
    CHECK(nvmeio_file_size(first) == SIZE);
    CHECK(file_holds(path, memory.address, SIZE, 0));
    nvmeio_file_release(first);
    nvmeio_file_release(second);
    nvmeio_handle_close(handle);
    guarded_free(&memory);
}

/* There is one descriptor left, and two are needed. */
static void test_an_open_that_fails_leaves_the_files_as_they_were(void)
{
    const char *old = path_in(test_folder()), *new = path_in(test_folder());
    struct nvmeio_file *file;
    struct rlimit before, now;
    struct nvmeio_file_info info;

    make_file(old, 1000, 1);
    file = open_file(old, O_RDWR, NVMEIO_DIRECT_AUTO);
    nvmeio_file_get_info(file, &info);
    nvmeio_file_release(file);
    if (info.direct) {
        int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
        close(next);
        CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
        now = before;
        now.rlim_cur = (rlim_t)next + 1;
        CHECK(setrlimit(RLIMIT_NOFILE, &now) == 0);
        int truncated = nvmeio_file_open(old, O_RDWR | O_CREAT | O_TRUNC,
                                         NVMEIO_DIRECT_AUTO, &file);
        int created =
            nvmeio_file_open(new, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO, &file);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK(truncated == -EMFILE && created == -EMFILE);
        CHECK(access(new, F_OK) != 0);
    }
    file = open_file(old, O_RDONLY, NVMEIO_DIRECT_AUTO);
    CHECK(nvmeio_file_size(file) == 1000);
    nvmeio_file_release(file);
}

static void test_a_file_that_was_there_is_never_cut(void)
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

static unsigned descriptors_open(void)
{
    DIR *folder = opendir("/proc/self/fd");
    unsigned count = 0;

    CHECK(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static void test_descriptors_are_all_given_back(void)
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

int main(void)
{
    const char *engine;

    begin();
    test_what_has_no_offsets_is_refused_at_once();
    test_descriptors_that_cannot_serve_are_refused();
    test_a_file_system_without_direct_io_is_read_buffered();
    test_flags_of_the_caller_stay_as_they_are();
    test_synchronous_descriptors_stay_synchronous();
    test_created_is_only_what_was_made_or_emptied();
    test_compare_finds_the_first_difference();
    test_a_write_far_out_in_a_new_file_takes_no_more_than_its_bytes();
    FOR_EACH_ENGINE(engine)
    {
        test_a_failed_write_leaves_no_bytes_that_nobody_wrote(engine);
    }
    test_what_others_wrote_survives_a_failed_write();
    test_cutting_back_spares_a_write_that_begins_meanwhile(false);
    test_cutting_back_spares_a_write_that_begins_meanwhile(true);
    test_cutting_back_spares_what_others_are_about_to_write();
    test_what_a_child_has_inherited_is_not_cut();
    test_a_child_cuts_back_what_it_has_opened_itself();
    test_a_child_does_not_set_the_length_of_its_parents_file();
    test_what_a_write_has_not_made_longer_is_not_cut();
    test_an_open_that_fails_leaves_the_files_as_they_were();
    test_a_file_that_was_there_is_never_cut();
    test_descriptors_are_all_given_back();
    return 0;
}
