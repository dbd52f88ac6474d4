/* What the system may say of a file that is opened, by functions that stand in for it:
 * odd alignments, and calls that fail where they never should. */
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

#include "file_internal.h"
#include "transfer.h"

/* What statx() shall say of direct I/O, once `told`; and which calls fail. */
static struct {
    bool told;
    uint32_t memory_align, offset_align;
    bool no_statfs, no_status, no_flags, no_duplicate, no_truncate;
    int no_second, no_read; /* an errno, or 0 */
} answers;

int statx(int fd, const char *path, int flags, unsigned mask, struct statx *status)
{
    if (!answers.told)
        return (int)syscall(SYS_statx, fd, path, flags, mask, status);
    memset(status, 0, sizeof(*status));
    memcpy((char *)status + 0x98, &answers.memory_align, 4);
    memcpy((char *)status + 0x9c, &answers.offset_align, 4);
    return 0;
}

int fstatfs(int fd, struct statfs *status)
{
    if (!answers.no_statfs)
        return (int)syscall(SYS_fstatfs, fd, status);
    errno = EIO;
    return -1;
}

int fstat(int fd, struct stat *status)
{
    if (!answers.no_status)
        return fstatat(fd, "", status, AT_EMPTY_PATH);
    errno = EIO;
    return -1;
}

int fcntl(int fd, int command, ...)
{
    va_list list;
    va_start(list, command);
    long argument = va_arg(list, long);
    va_end(list);

    if ((command == F_SETFL && answers.no_flags) ||
        (command == F_DUPFD_CLOEXEC && answers.no_duplicate)) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fcntl, fd, command, argument);
}

int open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    int mode = flags & O_CREAT ? va_arg(list, int) : 0;
    va_end(list);

    if (!answers.no_second || strncmp(path, "/proc/self/fd/", 14) != 0)
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    errno = answers.no_second;
    return -1;
}

ssize_t pread(int fd, void *address, size_t size, off_t offset)
{
    if (!answers.no_read)
        return syscall(SYS_pread64, fd, address, size, offset);
    errno = answers.no_read;
    return -1;
}

int ftruncate(int fd, off_t size)
{
    if (!answers.no_truncate)
        return (int)syscall(SYS_ftruncate, fd, size);
    errno = EIO;
    return -1;
}

static struct nvmeio_file *file;

static int open_again(const char *path, int flags, enum nvmeio_direct direct)
{
    return nvmeio_file_open(path, flags, direct, &file);
}

/* The lowest descriptor that is free: as before, if nothing was left open. */
static int next_descriptor(void)
{
    int fd = dup(STDERR_FILENO);
    CHECK(fd >= 0);
    close(fd);
    return fd;
}

static void check_alignment(const char *path, uint32_t memory_align,
                            uint32_t offset_align, bool direct)
{
    struct nvmeio_file_info info;
    int next = next_descriptor(), fd = open(path, O_RDWR | O_CLOEXEC);

    answers.told = true;
    answers.memory_align = memory_align;
    answers.offset_align = offset_align;
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &info);
    CHECK(info.direct == direct);
    CHECK(info.offset_align == (direct ? offset_align : 1));
    CHECK(info.memory_align == (direct ? memory_align : 1));
    nvmeio_file_release(file);
    int error = open_again(path, O_RDWR, NVMEIO_DIRECT_ALWAYS);
    CHECK(error == (direct ? 0 : -EINVAL));
    if (error == 0)
        nvmeio_file_release(file);
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_ALWAYS, &file) == error);
    if (error == 0)
        nvmeio_file_release(file);
    answers.told = false;
    close(fd);
    CHECK(next_descriptor() == next);
}

/* Whatever the kernel says, arithmetic is done with powers of two of a bounded size. */
static void test_alignments_that_cannot_be_are_no_alignments(const char *path)
{
    struct nvmeio_file_info info;

    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &info);
    nvmeio_file_release(file);
    if (!info.direct)
        SKIP("the file system has no O_DIRECT");
    check_alignment(path, 512, 4096, true);
    check_alignment(path, 4, 512, true);
    check_alignment(path, 3, 512, false);
    check_alignment(path, 512, 513, false);
    check_alignment(path, 0, 512, false);
    check_alignment(path, 512, 0, false);
    check_alignment(path, 1u << 31, 512, false);
    check_alignment(path, 512, 1u << 31, false);
    /* Nothing is known: whole pages, as one is read on trial. */
    answers.told = true;
    answers.memory_align = answers.offset_align = 0;
    static const int modes[] = {O_RDWR, O_RDONLY, O_WRONLY};
    for (int i = 0; i < 3; i++) {
        CHECK(open_again(path, modes[i], NVMEIO_DIRECT_AUTO) == 0);
        nvmeio_file_get_info(file, &info);
        CHECK(info.direct && info.offset_align == PAGE && info.memory_align == PAGE);
        nvmeio_file_release(file);
    }
    /* The read says that there is no O_DIRECT, or nothing of it. */
    static const int errors[] = {EINVAL, EOPNOTSUPP, EIO, ENODATA, EINTR, ENOMEM};
    for (int i = 0; i < 6; i++) {
        answers.no_read = errors[i];
        CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
        nvmeio_file_get_info(file, &info);
        CHECK(info.direct == (i >= 2));
        nvmeio_file_release(file);
        CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_ALWAYS) == (i < 2 ? -EINVAL : 0));
        if (i >= 2)
            nvmeio_file_release(file);
    }
    answers.no_read = 0;
    answers.told = false;
}

/* With O_DIRECT as ever, and the care that FUSE needs. */
static void test_a_file_of_an_unknown_file_system_is_opened(const char *path)
{
    struct nvmeio_file_info known, unknown;

    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &known);
    nvmeio_file_release(file);
    answers.no_statfs = true;
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &unknown);
    CHECK(file->fuse && unknown.direct == known.direct);
    nvmeio_file_release(file);
    answers.no_statfs = false;
}

/* What fails leaves neither a descriptor nor a file that was not there before. */
static void test_what_cannot_be_opened_leaves_nothing(const char *path)
{
    const char *fresh = path_in(test_folder());
    int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC), next = next_descriptor();
    bool *const refusals[] = {&answers.no_status, &answers.no_flags,
                              &answers.no_truncate};

    CHECK(fd >= 0);
    for (int i = 0; i < 3; i++) {
        *refusals[i] = true;
        CHECK(open_again(fresh, O_RDWR | O_CREAT | O_TRUNC, NVMEIO_DIRECT_AUTO) ==
              -EIO);
        *refusals[i] = false;
        /* Without its status nobody can tell that the name is still the file's. */
        CHECK((access(fresh, F_OK) == 0) == (i == 0));
        unlink(fresh);
    }
    answers.no_status = true;
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EIO);
    answers.no_status = false;
    answers.no_duplicate = true;
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EIO);
    answers.no_duplicate = false;
    /* Its flag would disturb, and it cannot be opened without. */
    answers.no_second = EIO;
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EIO);
    answers.no_second = 0;
    CHECK(next_descriptor() == next);
    CHECK(close(fd) == 0);
}

/* It is told, and comes back; what is not there at all leads through the page cache. */
static void test_what_is_lacking_for_a_moment_costs_no_direct_io(const char *path)
{
    static const int errors[] = {EMFILE, ENFILE, ENOMEM, EINTR};
    struct nvmeio_file_info info;
    int next = next_descriptor();

    for (int i = 0; i < 4; i++) {
        answers.no_second = errors[i];
        CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == -errors[i]);
        CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_ALWAYS) == -errors[i]);
    }
    answers.no_second = ENOENT; /* no /proc */
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_ALWAYS) == -EINVAL);
    CHECK(next_descriptor() == next);
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &info);
    CHECK(!info.direct);
    nvmeio_file_release(file);
    answers.no_second = 0;
}

static void test_a_size_that_cannot_be_told_is_an_error(const char *path)
{
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    CHECK(nvmeio_file_size(file) == (int64_t)(2 * PAGE));
    answers.no_status = true;
    CHECK(nvmeio_file_size(file) == -EIO);
    answers.no_status = false;
    nvmeio_file_release(file);
}

static void test_a_file_knows_whether_it_is_at_a_path(const char *path)
{
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    CHECK(nvmeio_file_is_at(file, path) == 1);
    CHECK(nvmeio_file_is_at(file, test_folder()) == 0);
    CHECK(nvmeio_file_is_at(file, path_in(test_folder())) == -ENOENT);
    nvmeio_file_release(file);
}

static void test_a_comparison_ends_with_the_file(const char *path)
{
    static char bytes[3 * PAGE];
    size_t position;

    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    fill(bytes, 2 * PAGE, 0, 1);
    CHECK(nvmeio_file_compare(file, 0, bytes, 2 * PAGE, &position) == 0);
    CHECK(position == 2 * PAGE);
    CHECK(nvmeio_file_compare(file, 0, bytes, 3 * PAGE, &position) == -ENODATA);
    CHECK(position == 2 * PAGE);
    bytes[PAGE]++;
    CHECK(nvmeio_file_compare(file, 0, bytes, 2 * PAGE, &position) == 1);
    CHECK(position == PAGE);
    nvmeio_file_release(file);
    CHECK(open_again(path, O_WRONLY, NVMEIO_DIRECT_NEVER) == 0);
    CHECK(nvmeio_file_compare(file, 0, bytes, PAGE, &position) == -EBADF);
    nvmeio_file_release(file);
}

int main(void)
{
    static char bytes[2 * PAGE];

    begin();
    const char *path = path_in(test_folder());
    fill(bytes, sizeof(bytes), 0, 1);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    CHECK(write(fd, bytes, sizeof(bytes)) == (ssize_t)sizeof(bytes));
    close(fd);
    test_a_file_of_an_unknown_file_system_is_opened(path);
    test_what_cannot_be_opened_leaves_nothing(path);
    test_what_is_lacking_for_a_moment_costs_no_direct_io(path);
    test_a_size_that_cannot_be_told_is_an_error(path);
    test_a_file_knows_whether_it_is_at_a_path(path);
    test_a_comparison_ends_with_the_file(path);
    test_alignments_that_cannot_be_are_no_alignments(path);
    return 0;
}
