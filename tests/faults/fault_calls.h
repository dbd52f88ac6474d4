/* fault_calls.h -- replacements of the library's system calls in the test build.
 *
 * The compiler includes it before every file of the library except fault*.c, so that
 * the calls below go through fault_calls.c, and only the library's.  The system's
 * headers then declare the names on the right. */
#ifndef NVMEIO_FAULT_CALLS_H
#define NVMEIO_FAULT_CALLS_H

/* The engines of engine.c too. */
struct nvmeio_engine_ops;
const struct nvmeio_engine_ops *
nvmeio_fault_engine(const struct nvmeio_engine_ops *real);
#define NVMEIO_ENGINE_HANDED_OUT nvmeio_fault_engine

/* Calls that transfer or wait. */
#define pread nvmeio_faulty_pread
#define pwrite nvmeio_faulty_pwrite
#define fsync nvmeio_faulty_fsync
#define fdatasync nvmeio_faulty_fdatasync
#define read nvmeio_faulty_read
#define write nvmeio_faulty_write
#define ppoll nvmeio_faulty_ppoll
#define sem_wait nvmeio_faulty_sem_wait
#define io_uring_submit nvmeio_faulty_io_uring_submit
#define io_uring_submit_and_wait nvmeio_faulty_io_uring_submit_and_wait
#define pthread_cond_wait nvmeio_faulty_pthread_cond_wait

/* Calls that wake other threads.  These only pause. */
#define pthread_mutex_lock nvmeio_faulty_pthread_mutex_lock
#define pthread_mutex_unlock nvmeio_faulty_pthread_mutex_unlock
#define pthread_cond_broadcast nvmeio_faulty_pthread_cond_broadcast
#define pthread_join nvmeio_faulty_pthread_join
#define sem_post nvmeio_faulty_sem_post
#define eventfd_write nvmeio_faulty_eventfd_write

/* Calls that release.  These only pause. */
#define close nvmeio_faulty_close
#define unlink nvmeio_faulty_unlink
#define munlock nvmeio_faulty_munlock
#define io_uring_queue_exit nvmeio_faulty_io_uring_queue_exit

/* Calls that set up. */
#define io_uring_queue_init_params nvmeio_faulty_io_uring_queue_init_params
#define pthread_create nvmeio_faulty_pthread_create

/* Memory. */
#define malloc nvmeio_faulty_malloc
#define calloc nvmeio_faulty_calloc
#define strdup nvmeio_faulty_strdup
#define tsearch nvmeio_faulty_tsearch
#define posix_memalign nvmeio_faulty_posix_memalign
#define mmap nvmeio_faulty_mmap
#define munmap nvmeio_faulty_munmap
#define mlock nvmeio_faulty_mlock
#define mincore nvmeio_faulty_mincore
#define madvise nvmeio_faulty_madvise

/* Calls that the C library has no function for: of AIO, memory and futexes. */
#define syscall nvmeio_faulty_syscall

/* Files. */
#define open nvmeio_faulty_open
#define fcntl nvmeio_faulty_fcntl
#define eventfd nvmeio_faulty_eventfd
#define fopen nvmeio_faulty_fopen
#define fstat nvmeio_faulty_fstat
#define fchmod nvmeio_faulty_fchmod
#define stat(path, status) nvmeio_faulty_stat(path, status) /* and not the struct */
#define lstat nvmeio_faulty_lstat
#define fstatfs nvmeio_faulty_fstatfs
#define statx nvmeio_faulty_statx
#define ftruncate nvmeio_faulty_ftruncate
#define ioctl nvmeio_faulty_ioctl

/* This process. */
#define getrlimit nvmeio_faulty_getrlimit
#define sched_getaffinity nvmeio_faulty_sched_getaffinity

#endif
