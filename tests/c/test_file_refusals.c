/* Answers of the system while a file is opened, from replaced functions: odd
 * alignments, and calls that fail unexpectedly. */
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

#include "file_internal.h"
#include "transfer.h"

/* statx()'s alignments of direct I/O, if `has_alignments`, or that it does not know
 * them; and the calls that fail. */
static struct {
    bool has_alignments, knows_none;
    uint32_t memory_align, offset_align;
    bool no_statfs, no_statx, no_status, no_flags, no_direct, no_duplicate, no_truncate;
    bool stranger, protected;
    int no_second, no_read; /* an errno, or 0 */
} answers;

int statx(int fd, const char *path, int flags, unsigned mask, struct statx *status)
{
    errno = EPERM;
    if (answers.no_status || answers.no_statx ||
        syscall(SYS_statx, fd, path, flags, mask, status) != 0)
        return -1;
    if (answers.knows_none)
        status->stx_mask &= ~0x2000u;
    if (!answers.has_alignments)
        return 0;
    status->stx_mask |= 0x2000u;
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

    if (command == F_SETFL && argument & O_DIRECT && answers.no_direct) {
        errno = EINVAL;
        return -1;
    }
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

    bool second = strncmp(path, "/proc/self/fd/", 14) == 0;
    if (second && answers.no_second) {
        errno = answers.no_second;
        /* One call is interrupted. */
        if (errno == EINTR)
            answers.no_second = 0;
        return -1;
    }
    if (flags & O_DIRECT && answers.no_direct) {
        errno = EINVAL;
        return -1;
    }
    if (flags & O_CREAT && answers.protected) {
        errno = flags & O_EXCL ? EEXIST : EACCES;
        return -1;
    }
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

uid_t geteuid(void)
{
    return (uid_t)syscall(SYS_geteuid) + answers.stranger;
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

/* The lowest free descriptor, which shows whether anything was left open. */
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

    answers.has_alignments = true;
    answers.memory_align = memory_align;
    answers.offset_align = offset_align;
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &info);
    CHECK(info.direct == direct);
    CHECK(info.offset_align == (direct ? offset_align : 1));
    CHECK(info.memory_align == (direct ? memory_align : 1));
    CHECK((fcntl(nvmeio_file_fd(file), F_GETFL, 0) & O_DIRECT) == 0);
    nvmeio_file_release(file);
    int error = open_again(path, O_RDWR, NVMEIO_DIRECT_ALWAYS);
    CHECK(error == (direct ? 0 : -EINVAL));
    if (error == 0)
        nvmeio_file_release(file);
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_ALWAYS, &file) == error);
    if (error == 0)
        nvmeio_file_release(file);
    answers.has_alignments = false;
    close(fd);
    CHECK(next_descriptor() == next);
}

/* Whatever the kernel reports, only powers of two below a limit are used. */
static void test_impossible_alignments_are_ignored(const char *path)
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
    /* Zeros are a refusal, though open(2) accepts the flag and reads succeed. */
    check_alignment(path, 0, 0, false);
    /* Without information: whole pages, because the probe reads one. */
    answers.knows_none = true;
    static const int modes[] = {O_RDWR, O_RDONLY, O_WRONLY};
    for (int i = 0; i < 3; i++) {
        CHECK(open_again(path, modes[i], NVMEIO_DIRECT_AUTO) == 0);
        nvmeio_file_get_info(file, &info);
        CHECK(info.direct && info.offset_align == PAGE && info.memory_align == PAGE);
        nvmeio_file_release(file);
    }
    /* The probing read reports that there is no O_DIRECT, or fails otherwise. */
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
    answers.knows_none = false;
}

/* With O_DIRECT as usual, and the care that FUSE needs. */
static void test_a_file_of_an_unknown_file_system_is_opened(const char *path)
{
    struct nvmeio_file_info known, unknown;

    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &known);
    nvmeio_file_release(file);
    answers.no_statfs = true;
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &unknown);
    CHECK(file->aside && !file->local && unknown.direct == known.direct);
    nvmeio_file_release(file);
    answers.no_statfs = false;
}

/* A failure leaves neither a descriptor nor a new file. */
static void test_a_failed_open_leaves_nothing(const char *path)
{
    const char *fresh = path_in(test_folder());
    int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC), next = next_descriptor();
    bool *const refusals[] = {&answers.no_status, &answers.no_flags,
                              &answers.no_truncate};

    CHECK(fd >= 0);
    for (int i = 0; i < 3; i++) {
        *refusals[i] = true;
        CHECK(open_again(path, O_RDWR | O_TRUNC, NVMEIO_DIRECT_AUTO) == -EIO);
        CHECK(open_again(fresh, O_RDWR | O_CREAT | O_TRUNC, NVMEIO_DIRECT_AUTO) ==
              -EIO);
        *refusals[i] = false;
        /* Without fstat() it is unknown whether the name still belongs to the file. */
        CHECK((access(fresh, F_OK) == 0) == (i == 0));
        unlink(fresh);
    }
    struct stat status;
    CHECK(stat(path, &status) == 0 && status.st_size == 2 * PAGE);
    answers.no_status = true;
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EIO);
    answers.no_status = false;
    answers.no_duplicate = true;
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EIO);
    answers.no_duplicate = false;
    /* Its O_NONBLOCK would disturb, and it cannot be opened without. */
    answers.no_second = EIO;
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EIO);
    answers.no_second = 0;
    CHECK(next_descriptor() == next);
    CHECK(close(fd) == 0);
}

static bool is_direct(void)
{
    struct nvmeio_file_info info;

    nvmeio_file_get_info(file, &info);
    return info.direct;
}

/* The lack is reported and passes: of the buffered descriptor when it is first needed,
 * of the direct one when a descriptor is duplicated. */
static void test_a_passing_lack_of_descriptors_does_not_end_direct_io(const char *path)
{
    static const int errors[] = {EMFILE, ENFILE, ENOMEM};
    int fd = open(path, O_RDWR | O_CLOEXEC), next = next_descriptor();

    for (int i = 0; i < 3; i++) {
        answers.no_second = errors[i];
        CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -errors[i]);
        CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_ALWAYS, &file) == -errors[i]);
        CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
        CHECK(!is_direct() || nvmeio_file_fd(file) == -errors[i]);
        answers.no_second = 0;
        CHECK(nvmeio_file_fd(file) >= 0);
        nvmeio_file_release(file);
    }
    answers.no_second = EINTR;
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == -EINTR);
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    answers.no_second = EINTR;
    bool direct = is_direct();
    CHECK(nvmeio_file_fd(file) >= 0 && is_direct() == direct);
    answers.no_second = 0;
    nvmeio_file_release(file);
    CHECK(next_descriptor() == next);
    CHECK(close(fd) == 0);
}

/* Without /proc nothing can be opened again.  A file that needs both descriptors uses
 * the buffered one, unless O_DIRECT was demanded. */
static void test_a_file_that_cannot_be_opened_again_is_buffered(const char *path)
{
    static char bytes[2 * PAGE];
    int fd = open(path, O_RDWR | O_CLOEXEC), next = next_descriptor();
    size_t position;

    fill(bytes, sizeof(bytes), 0, 1);
    answers.no_second = ENOENT;
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    bool direct = is_direct();
    CHECK(nvmeio_file_compare(file, 0, bytes, sizeof(bytes), &position) == 0);
    CHECK(nvmeio_file_compare(file, 0, bytes, sizeof(bytes), &position) == 0);
    CHECK(!is_direct() && nvmeio_file_size(file) == sizeof(bytes));
    CHECK((fcntl(nvmeio_file_fd(file), F_GETFL, 0) & O_DIRECT) == 0);
    nvmeio_file_release(file);
    /* Nor can it be switched to the page cache. */
    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    answers.no_duplicate = true;
    CHECK(!direct || nvmeio_file_fd(file) == -EIO);
    answers.no_duplicate = false;
    answers.no_flags = true;
    CHECK(!direct || nvmeio_file_fd(file) == -EACCES);
    answers.no_flags = false;
    CHECK(is_direct() == direct && next_descriptor() == next + 1);
    nvmeio_file_release(file);
    if (direct) {
        CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_ALWAYS) == 0);
        CHECK(nvmeio_file_fd(file) == -ENOENT && is_direct());
        CHECK(nvmeio_file_compare(file, 0, bytes, PAGE, &position) == -ENOENT);
        nvmeio_file_release(file);
    }
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_ALWAYS, &file) == -ENOENT);
    CHECK(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file) == 0);
    CHECK(!is_direct());
    nvmeio_file_release(file);
    answers.no_second = 0;
    CHECK(next_descriptor() == next);
    CHECK(close(fd) == 0);
}

/* As tmpfs before Linux 6.6.  The kernel may create a file and then refuse it. */
static void test_a_file_system_without_direct_io_is_used_buffered(const char *path)
{
    const char *fresh = path_in(test_folder());
    int next = next_descriptor();

    answers.no_direct = true;
    for (int made = 0; made < 2; made++) {
        const char *name = made ? fresh : path;
        int flags = O_RDWR | (made ? O_CREAT | O_EXCL : 0);
        CHECK(open_again(name, flags | O_TRUNC, NVMEIO_DIRECT_ALWAYS) == -EINVAL);
        CHECK((access(name, F_OK) != 0) == made);
        CHECK(open_again(name, flags, NVMEIO_DIRECT_AUTO) == 0);
        CHECK(!is_direct() && nvmeio_file_fd(file) == next);
        CHECK((fcntl(next, F_GETFL, 0) & (O_DIRECT | O_NONBLOCK)) == 0);
        CHECK(nvmeio_file_size(file) == (made ? 0 : (int64_t)(2 * PAGE)));
        nvmeio_file_release(file);
    }
    answers.no_direct = false;
    CHECK(next_descriptor() == next);
}

/* As under a filter of system calls that is older than statx(2). */
static void test_a_file_is_known_without_statx(const char *path)
{
    struct nvmeio_file_info info, plain;

    CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &info);
    nvmeio_file_release(file);
    answers.no_statx = true;
    CHECK(open_again(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO) == 0);
    nvmeio_file_get_info(file, &plain);
    CHECK(plain.device == info.device && plain.inode == info.inode);
    CHECK(plain.direct == info.direct);
    CHECK(plain.memory_align == (info.direct ? PAGE : 1));
    CHECK(nvmeio_file_is_at(file, path) == 1);
    nvmeio_file_release(file);
    CHECK(open_again(test_folder(), O_RDONLY, NVMEIO_DIRECT_AUTO) == -EISDIR);
    answers.no_statx = false;
}

/* In a folder like /tmp the kernel can refuse O_CREAT, and nothing else, for another
 * user's file (fs.protected_regular); only calls with O_CREAT are refused. */
static void test_another_users_file_is_opened_with_the_requested_flags(const char *path)
{
    int next = next_descriptor();

    for (int kind = 0; kind < 4; kind++) {
        answers.stranger = kind & 1;
        answers.protected = kind & 2;
        CHECK(open_again(path, O_RDWR, NVMEIO_DIRECT_AUTO) == 0);
        nvmeio_file_release(file);
        int error = open_again(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
        CHECK(error == (kind == 3 ? -EACCES : 0));
        if (error == 0)
            nvmeio_file_release(file);
    }
    answers.stranger = answers.protected = false;
    CHECK(next_descriptor() == next);
}

static void test_an_unknown_size_is_an_error(const char *path)
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
    test_a_failed_open_leaves_nothing(path);
    test_a_passing_lack_of_descriptors_does_not_end_direct_io(path);
    test_a_file_that_cannot_be_opened_again_is_buffered(path);
    test_a_file_system_without_direct_io_is_used_buffered(path);
    test_a_file_is_known_without_statx(path);
    test_another_users_file_is_opened_with_the_requested_flags(path);
    test_an_unknown_size_is_an_error(path);
    test_a_file_knows_whether_it_is_at_a_path(path);
    test_a_comparison_ends_with_the_file(path);
    test_impossible_alignments_are_ignored(path);
    return 0;
}
