/* A file system over a folder that behaves like a mount of NFS: nfsfs FOLDER MOUNTPOINT
 * SECONDS.
 *
 * Each mount keeps attributes, names, names that are not there, and lists of folders
 * for SECONDS, whatever other mounts of FOLDER change.  Opening a file asks for its
 * attributes again and drops its cached pages (close-to-open), and closing it writes
 * them.  What was removed gives ESTALE.  flock(2) is served, an exclusive one only for
 * a descriptor open for writing; folders cannot be exchanged, and there are no files
 * without a name.  The process unmounts and ends at the end of its standard input.
 */
#define FUSE_USE_VERSION 34
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct node {
    struct node *next;
    int fd; /* O_PATH */
    dev_t device;
    ino_t number;
    uint64_t lookups;
};

static struct node root = {.lookups = 2};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static double seconds;
static struct fuse_session *session;

static struct node *node_of(fuse_ino_t ino)
{
    return ino == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)ino;
}

static void path_of(fuse_ino_t ino, char path[64])
{
    snprintf(path, 64, "/proc/self/fd/%d", node_of(ino)->fd);
}

/* Return 0, or ESTALE if the file has no name any more, as a server that has forgotten
 * it. */
static int stat_of(fuse_ino_t ino, struct stat *found)
{
    if (fstatat(node_of(ino)->fd, "", found, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    return found->st_nlink == 0 ? ESTALE : 0;
}

static void forget_one(struct node *node, uint64_t lookups)
{
    if (node == &root)
        return;
    pthread_mutex_lock(&mutex);
    node->lookups -= lookups;
    if (node->lookups == 0) {
        struct node **place = &root.next;
        while (*place != node)
            place = &(*place)->next;
        *place = node->next;
        close(node->fd);
        free(node);
    }
    pthread_mutex_unlock(&mutex);
}

static int find(fuse_ino_t parent, const char *name, struct fuse_entry_param *entry)
{
    struct stat found;
    int error = stat_of(parent, &found);
    if (error != 0)
        return error;
    memset(entry, 0, sizeof *entry);
    entry->attr_timeout = entry->entry_timeout = seconds;
    int fd = openat(node_of(parent)->fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    if (fstatat(fd, "", &entry->attr, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) < 0) {
        error = errno;
        close(fd);
        return error;
    }
    pthread_mutex_lock(&mutex);
    struct node *node = root.next;
    while (node != NULL &&
           !(node->number == entry->attr.st_ino && node->device == entry->attr.st_dev))
        node = node->next;
    if (node != NULL) {
        close(fd);
    } else {
        node = calloc(1, sizeof *node);
        *node = (struct node){root.next, fd, entry->attr.st_dev, entry->attr.st_ino, 0};
        root.next = node;
    }
    node->lookups++;
    pthread_mutex_unlock(&mutex);
    entry->ino = (uintptr_t)node;
    return 0;
}

static void reply_found(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry;
    int error = find(parent, name, &entry);
    if (error != 0)
        fuse_reply_err(request, error);
    else
        fuse_reply_entry(request, &entry);
}

static void op_init(void *data, struct fuse_conn_info *connection)
{
    (void)data;
    connection->want |= connection->capable & FUSE_CAP_FLOCK_LOCKS;
    connection->want &= ~(FUSE_CAP_READDIRPLUS | FUSE_CAP_AUTO_INVAL_DATA);
}

static void op_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    struct fuse_entry_param entry;
    int error = find(parent, name, &entry);
    if (error == ENOENT) {
        /* It is remembered that there is none. */
        memset(&entry, 0, sizeof entry);
        entry.entry_timeout = seconds;
        error = 0;
    }
    if (error != 0)
        fuse_reply_err(request, error);
    else
        fuse_reply_entry(request, &entry);
}

static void op_forget(fuse_req_t request, fuse_ino_t ino, uint64_t lookups)
{
    forget_one(node_of(ino), lookups);
    fuse_reply_none(request);
}

static void op_getattr(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
    struct stat found;
    (void)file;
    int error = stat_of(ino, &found);
    if (error != 0)
        fuse_reply_err(request, error);
    else
        fuse_reply_attr(request, &found, seconds);
}

static void op_setattr(fuse_req_t request, fuse_ino_t ino, struct stat *wanted, int set,
                       struct fuse_file_info *file)
{
    char path[64];
    struct stat found;
    int error = stat_of(ino, &found), failed = 0;
    if (error != 0) {
        fuse_reply_err(request, error);
        return;
    }
    path_of(ino, path);
    if (set & FUSE_SET_ATTR_MODE)
        failed |= chmod(path, wanted->st_mode);
    if (!failed && set & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID))
        failed |= fchownat(
            node_of(ino)->fd, "", set & FUSE_SET_ATTR_UID ? wanted->st_uid : (uid_t)-1,
            set & FUSE_SET_ATTR_GID ? wanted->st_gid : (gid_t)-1, AT_EMPTY_PATH);
    if (!failed && set & FUSE_SET_ATTR_SIZE)
        failed |= file ? ftruncate((int)file->fh, wanted->st_size)
                       : truncate(path, wanted->st_size);
    if (!failed && set & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME)) {
        struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
        if (set & FUSE_SET_ATTR_ATIME_NOW)
            times[0].tv_nsec = UTIME_NOW;
        else if (set & FUSE_SET_ATTR_ATIME)
            times[0] = wanted->st_atim;
        if (set & FUSE_SET_ATTR_MTIME_NOW)
            times[1].tv_nsec = UTIME_NOW;
        else if (set & FUSE_SET_ATTR_MTIME)
            times[1] = wanted->st_mtim;
        failed |= utimensat(AT_FDCWD, path, times, 0);
    }
    if (failed)
        fuse_reply_err(request, errno);
    else
        op_getattr(request, ino, file);
}

static void op_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name,
                     mode_t mode)
{
    if (mkdirat(node_of(parent)->fd, name, mode) < 0)
        fuse_reply_err(request, errno);
    else
        reply_found(request, parent, name);
}

static void op_unlink(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    fuse_reply_err(request, unlinkat(node_of(parent)->fd, name, 0) < 0 ? errno : 0);
}

static void op_rmdir(fuse_req_t request, fuse_ino_t parent, const char *name)
{
    fuse_reply_err(request,
                   unlinkat(node_of(parent)->fd, name, AT_REMOVEDIR) < 0 ? errno : 0);
}

static void op_rename(fuse_req_t request, fuse_ino_t from, const char *old,
                      fuse_ino_t to, const char *new, unsigned flags)
{
    int failed = flags ? EINVAL : 0;
    if (!failed && renameat(node_of(from)->fd, old, node_of(to)->fd, new) < 0)
        failed = errno;
    fuse_reply_err(request, failed);
}

static void op_link(fuse_req_t request, fuse_ino_t ino, fuse_ino_t parent,
                    const char *name)
{
    char path[64];
    path_of(ino, path);
    if (linkat(AT_FDCWD, path, node_of(parent)->fd, name, AT_SYMLINK_FOLLOW) < 0)
        fuse_reply_err(request, errno);
    else
        reply_found(request, parent, name);
}

static void op_symlink(fuse_req_t request, const char *target, fuse_ino_t parent,
                       const char *name)
{
    if (symlinkat(target, node_of(parent)->fd, name) < 0)
        fuse_reply_err(request, errno);
    else
        reply_found(request, parent, name);
}

static void op_readlink(fuse_req_t request, fuse_ino_t ino)
{
    char target[4097] = {0};
    if (readlinkat(node_of(ino)->fd, "", target, sizeof target - 1) < 0)
        fuse_reply_err(request, errno);
    else
        fuse_reply_readlink(request, target);
}

/* Flags for the file below: always readable, for the reads of pages that are written in
 * part. */
static int flags_of(int flags)
{
    if ((flags & O_ACCMODE) == O_WRONLY)
        flags = (flags & ~O_ACCMODE) | O_RDWR;
    return (flags & ~(O_APPEND | O_NOFOLLOW | O_DIRECT)) | O_CLOEXEC;
}

static void op_open(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
    char path[64];
    struct stat found;
    int error = stat_of(ino, &found);
    if (error != 0) {
        fuse_reply_err(request, error);
        return;
    }
    path_of(ino, path);
    int fd = open(path, flags_of(file->flags) & ~(O_CREAT | O_EXCL));
    if (fd < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    file->fh = (uint64_t)fd;
    fuse_lowlevel_notify_inval_inode(session, ino, -1, 0);
    fuse_reply_open(request, file);
}

static void op_create(fuse_req_t request, fuse_ino_t parent, const char *name,
                      mode_t mode, struct fuse_file_info *file)
{
    struct fuse_entry_param entry;
    int fd = openat(node_of(parent)->fd, name,
                    flags_of(file->flags) | O_CREAT | O_NOFOLLOW, mode);
    int error = fd < 0 ? errno : find(parent, name, &entry);
    if (error != 0) {
        if (fd >= 0)
            close(fd);
        fuse_reply_err(request, error);
        return;
    }
    file->fh = (uint64_t)fd;
    fuse_reply_create(request, &entry, file);
}

static void op_read(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset,
                    struct fuse_file_info *file)
{
    struct fuse_bufvec buffer = FUSE_BUFVEC_INIT(size);
    (void)ino;
    buffer.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
    buffer.buf[0].fd = (int)file->fh;
    buffer.buf[0].pos = offset;
    fuse_reply_data(request, &buffer, 0);
}

static void op_write(fuse_req_t request, fuse_ino_t ino, const char *bytes, size_t size,
                     off_t offset, struct fuse_file_info *file)
{
    (void)ino;
    ssize_t written = pwrite((int)file->fh, bytes, size, offset);
    if (written < 0)
        fuse_reply_err(request, errno);
    else
        fuse_reply_write(request, (size_t)written);
}

static void op_fsync(fuse_req_t request, fuse_ino_t ino, int only_data,
                     struct fuse_file_info *file)
{
    (void)ino;
    (void)only_data;
    fuse_reply_err(request, fsync((int)file->fh) < 0 ? errno : 0);
}

static void op_flush(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
    (void)ino;
    (void)file;
    fuse_reply_err(request, 0);
}

static void op_release(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
    (void)ino;
    close((int)file->fh);
    fuse_reply_err(request, 0);
}

static void op_flock(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file,
                     int how)
{
    (void)ino;
    int flags = fcntl((int)file->fh, F_GETFL);
    if ((how & LOCK_EX) && (flags & O_ACCMODE) == O_RDONLY)
        fuse_reply_err(request, EBADF);
    else
        fuse_reply_err(request, flock((int)file->fh, how) < 0 ? errno : 0);
}

static void op_opendir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file)
{
    struct stat found;
    int error = stat_of(ino, &found);
    if (error != 0) {
        fuse_reply_err(request, error);
        return;
    }
    int fd = openat(node_of(ino)->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    file->fh = (uintptr_t)fdopendir(fd);
    /* Lists are kept, as long as the attributes of the folder are. */
    file->cache_readdir = file->keep_cache = 1;
    fuse_reply_open(request, file);
}

static void op_readdir(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset,
                       struct fuse_file_info *file)
{
    DIR *folder = (DIR *)(uintptr_t)file->fh;
    char *buffer = malloc(size);
    size_t used = 0;
    struct dirent *entry;
    (void)ino;
    seekdir(folder, offset);
    while ((entry = readdir(folder)) != NULL) {
        struct stat found = {.st_ino = entry->d_ino,
                             .st_mode = (mode_t)entry->d_type << 12};
        size_t needed = fuse_add_direntry(request, buffer + used, size - used,
                                          entry->d_name, &found, telldir(folder));
        if (needed > size - used)
            break;
        used += needed;
    }
    fuse_reply_buf(request, buffer, used);
    free(buffer);
}

static void op_releasedir(fuse_req_t request, fuse_ino_t ino,
                          struct fuse_file_info *file)
{
    (void)ino;
    closedir((DIR *)(uintptr_t)file->fh);
    fuse_reply_err(request, 0);
}

static void op_fsyncdir(fuse_req_t request, fuse_ino_t ino, int only_data,
                        struct fuse_file_info *file)
{
    (void)ino;
    (void)only_data;
    fuse_reply_err(request, fsync(dirfd((DIR *)(uintptr_t)file->fh)) < 0 ? errno : 0);
}

static void op_statfs(fuse_req_t request, fuse_ino_t ino)
{
    struct statvfs found;
    (void)ino;
    if (fstatvfs(root.fd, &found) < 0)
        fuse_reply_err(request, errno);
    else
        fuse_reply_statfs(request, &found);
}

static const struct fuse_lowlevel_ops operations = {
    .init = op_init,
    .lookup = op_lookup,
    .forget = op_forget,
    .getattr = op_getattr,
    .setattr = op_setattr,
    .mkdir = op_mkdir,
    .unlink = op_unlink,
    .rmdir = op_rmdir,
    .rename = op_rename,
    .link = op_link,
    .symlink = op_symlink,
    .readlink = op_readlink,
    .open = op_open,
    .create = op_create,
    .read = op_read,
    .write = op_write,
    .fsync = op_fsync,
    .flush = op_flush,
    .release = op_release,
    .flock = op_flock,
    .opendir = op_opendir,
    .readdir = op_readdir,
    .releasedir = op_releasedir,
    .fsyncdir = op_fsyncdir,
    .statfs = op_statfs,
};

static void *end_with_input(void *mountpoint)
{
    char byte;
    while (read(0, &byte, 1) > 0)
        ;
    char command[4200];
    snprintf(command, sizeof command, "umount -l '%s'", (char *)mountpoint);
    _exit(system(command) == 0 ? 0 : 1);
}

int main(int count, char **words)
{
    if (count != 4) {
        fprintf(stderr, "usage: nfsfs FOLDER MOUNTPOINT SECONDS\n");
        return 2;
    }
    seconds = atof(words[3]);
    root.fd = open(words[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
    char *options[] = {"nfsfs",
                       "-ofsname=nvmeio-nfsfs,default_permissions,allow_other"};
    struct fuse_args arguments = FUSE_ARGS_INIT(2, options);
    session = fuse_session_new(&arguments, &operations, sizeof operations, NULL);
    if (root.fd < 0 || session == NULL || fuse_session_mount(session, words[2]) != 0)
        return 1;
    pthread_t waiting;
    pthread_create(&waiting, NULL, end_with_input, words[2]);
    struct fuse_loop_config config = {.clone_fd = 0, .max_idle_threads = 10};
    int failed = fuse_session_loop_mt(session, &config);
    fuse_session_unmount(session);
    return failed != 0;
}
