/* The locks of the fast path, their order, and annotations that clang checks (`scripts/check-locks`).
 *
 * Clang 14 cannot name another field in an attribute of a C struct (`GUARDED_BY(lock)` next to `lock`). A process serves
 * one mount, so each lock exists once, as a variable, and attributes name that variable.
 *
 * GUARDED_BY: the field is used under this lock only. REQUIRES: the caller holds the lock; the function's name ends in
 * `_locked`. EXCLUDES: the function takes the lock itself. Fields without GUARDED_BY are constant after the start, atomic,
 * or used by one thread only, which a comment names. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#ifdef __clang__
#define ANNOTATION(attribute) __attribute__((attribute))
#else
#define ANNOTATION(attribute)
#endif
#define GUARDED_BY(lock) ANNOTATION(guarded_by(lock))
#define ACQUIRED_BEFORE(...) ANNOTATION(acquired_before(__VA_ARGS__))
#define REQUIRES(...) ANNOTATION(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) ANNOTATION(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) ANNOTATION(release_capability(__VA_ARGS__))
#define IS_LOCKED(lock) ANNOTATION(assert_capability(lock)) /* from the call of this function on */
#define UNCHECKED ANNOTATION(no_thread_safety_analysis)

struct ANNOTATION(capability("mutex")) lock {
    _Alignas(64) pthread_mutex_t mutex; /* in a cache line of its own */
};

#define LOCK_INIT {PTHREAD_MUTEX_INITIALIZER}

/* The lock order, from the innermost to the outermost: while a lock is held, only locks above it in this list are taken. */
extern struct lock buffer_lock; /* common/buffer.c */
extern struct lock daemon_lock; /* common/daemon.h: the connection to the daemon */
extern struct lock relay_lock;  /* relay/state.h: slots, the lot, Python's socket */
extern struct lock appender_lock ACQUIRED_BEFORE(daemon_lock); /* appender/append.c */
extern struct lock miss_lock ACQUIRED_BEFORE(buffer_lock, relay_lock, appender_lock); /* misses/miss_threads.h: fetches */
extern struct lock interrupt_lock ACQUIRED_BEFORE(relay_lock, miss_lock); /* serve/interrupt.c */
extern struct lock leader_lock; /* worker/worker.h: /dev/fuse; the leader takes all the others while it serves */

static inline UNCHECKED void lock_take(struct lock *lock) ACQUIRE(*lock)
{
    pthread_mutex_lock(&lock->mutex);
}

static inline UNCHECKED void lock_release(struct lock *lock) RELEASE(*lock)
{
    pthread_mutex_unlock(&lock->mutex);
}

/* Releases the lock while it waits for the condition. */
static inline UNCHECKED void lock_wait(struct lock *lock, pthread_cond_t *condition) REQUIRES(*lock)
{
    pthread_cond_wait(condition, &lock->mutex);
}

/* `deadline`: of the condition's clock. False: it has passed. */
static inline UNCHECKED bool lock_wait_until(struct lock *lock, pthread_cond_t *condition, const struct timespec *deadline)
    REQUIRES(*lock)
{
    return !pthread_cond_timedwait(condition, &lock->mutex, deadline);
}
