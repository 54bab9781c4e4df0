/* The memory that the daemon and the fast path share: a memfd that both hold, so that it outlives either.
 *
 * It has what a successor must know: how the mount was set up, what was negotiated with the kernel, and the requests
 * that have been read from /dev/fuse and not been answered (hazard 9). `shared.py` has the same layout. */
#ifndef CACHEFS_SHARED_H
#define CACHEFS_SHARED_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "latency.h"

#define SHARED_MAGIC 0x48505443u /* "CTPH" */
#define SHARED_VERSION 6
#define MAX_THREADS 192
#ifndef SLOT_COUNT /* a test has fewer */
#define SLOT_COUNT 2048
#define PARKED_COUNT 8192
#endif
#define SLOT_BYTES (140u << 10) /* of one request: a WRITE of 128 KiB and what surrounds it */
#define PARKED_BYTES 1016 /* of one request that waits for its share of slots */
#define INIT_BYTES 128
#define OPERATIONS 64
#define YOUNG_ENTRIES 8192
#define ACCESS_LOGS 16 /* of the first serving threads */
#define ACCESS_ENTRIES 4096
#define ACCESS_UNIT_BITS 24
#define ACCESS_UNIT_MASK ((1u << ACCESS_UNIT_BITS) - 1)

enum shared_flag {
    PINS_EVERYTHING = 1, /* a read-only mount of a dataset that is complete */
    PINS_FILES = 2,      /* not --cache=none */
    NO_OPEN = 4,         /* nothing is mutable: OPEN, OPENDIR and FLUSH are answered ENOSYS (hazard 3) */
    READ_ONLY = 8,
    KEEPS_DATA = 16,     /* --cache=full: what is fetched is appended to the blob */
    LOGS_ACCESSES = 32,  /* the daemon wants to know what is read */
    EVICTS = 64,         /* the daemon makes room when it is asked to */
    READS_AHEAD = 128,   /* in large files */
    EVICTS_AHEAD = 256,  /* for what it wishes, too */
};

struct counters { /* one for each thread, so that counting needs no lock */
    uint64_t hits, hit_bytes, misses, miss_bytes;
    uint64_t answered, failed, corrupt;
    uint64_t source_opens, source_reads, source_fstats;
    uint64_t skipped_admissions, source_timeouts, guesses, guessed, prefetched, source_bytes;
    uint64_t disk_bytes, young_reads, reserved[6];
};
static_assert(sizeof(struct counters) == 192, "three cache lines");

/* READs of cached files, in a ring with one writer; the daemon looks at it now and then. */
struct access_log {
    _Atomic uint64_t written; /* entries so far */
    uint64_t reserved[7];
    struct access {
        uint64_t inode;
        uint64_t when_and_unit; /* microseconds << ACCESS_UNIT_BITS | chunk of the file */
    } entries[ACCESS_ENTRIES];
};

/* READs of young files (age.h) whose pages the kernel has: a ring. They leave it when those pages have been dropped, so
 * that whatever dies none is forgotten. */
struct young_files {
    _Atomic uint64_t written; /* entries so far; by the fast path */
    _Atomic uint64_t taken;   /* of those: done with; by the daemon */
    struct young_file {
        uint64_t inode;
        uint64_t due_ns; /* CLOCK_MONOTONIC: when its pages are to be dropped */
    } entries[YOUNG_ENTRIES];
};

struct slot_head {
    _Atomic uint64_t word;  /* generation << 8 | enum slot_state */
    _Atomic uint64_t unique; /* the kernel's */
    uint32_t length;        /* of the request */
    uint32_t parts;         /* a READ that was passed on in this many pieces */
    uint32_t attempts;      /* how many fast paths died with it in hand */
    _Atomic uint32_t caller; /* the process that waits for it; 0: it is of a version that did not say */
};

enum slot_state {
    SLOT_FREE,
    SLOT_READING,  /* a thread's own: what it reads next, or handles now. length 0: nothing yet */
    SLOT_QUEUED,   /* to be passed on */
    SLOT_PASSING,  /* being sent: it may have arrived or not */
    SLOT_PASSED,   /* Python has it */
    SLOT_IN_DOUBT, /* answered with an error, or about to be: a Python that died may have done it. Kept until a daemon has
                      been told */
    SLOT_ANSWERED, /* the kernel was answered (EINTR), Python's answer is still to come */
    SLOT_ANSWERING, /* Python's answer is on its way to the kernel: it may have arrived or not */
};

struct parked { /* a request that waits for its owner's share of slots (relay_lot.c) */
    _Atomic uint32_t length; /* 0: none */
    uint32_t reserved;
    uint8_t message[PARKED_BYTES];
};
static_assert(sizeof(struct parked) == 1024, "parked request");

struct shared {
    uint32_t magic, version, slot_count, slot_bytes;
    /* How the mount was set up: written by the daemon before the fast path starts. */
    uint32_t flags, threads, fetch_threads, reserved;
    uint64_t seed, small_file_bytes, reconnect_timeout_ns, source_timeout_ns, simulate_latency_ns, root_device;
    /* Written by the daemon at any time. */
    _Atomic uint64_t run, floor;
    _Atomic uint64_t serving;         /* 0: answer nothing from the index */
    _Atomic uint64_t capacity_bytes;  /* of the blob */
    _Atomic uint64_t committed_bytes; /* records of the blob that the index has */
    _Atomic uint64_t settled;         /* reports up to this number are in the index, or will never be */
    /* Written by the fast path, but for the last one. */
    uint32_t init_length;             /* of the kernel's INIT, 0: not arrived */
    uint32_t init_passed;             /* to the Python that is there now */
    uint8_t init[INIT_BYTES];
    _Atomic uint64_t generation;      /* of slots, never used twice */
    _Atomic uint64_t pending_bytes;   /* records that were appended and are not settled */
    _Atomic uint64_t held_bytes;      /* payload that is being fetched or waits to be appended */
    _Atomic uint64_t reported;        /* the last number given to a report, by this fast path or its predecessors */
    _Atomic uint64_t stuck;           /* fetches that took too long and have not come back */
    _Atomic uint64_t pid;             /* of the fast path that ran last */
    _Atomic uint64_t passed[OPERATIONS]; /* requests that were passed on, by opcode; the last: all others */
    _Atomic uint64_t wishes_done;     /* of those that the daemon sent: fetched, or not wanted any more */
    _Atomic uint64_t wish_jobs;       /* the daemon's: how many are fetched at once; 0: as many as readers do not mind */
    uint64_t settle_ns;               /* how the mount was set up, too (age.h); 0: by a daemon that knew of no other than SETTLE_NS */
    _Atomic uint64_t clock_offset_ns; /* the daemon's: from CLOCK_BOOTTIME to the time of day (age.h); 0: by a daemon that did not say */
    _Atomic uint64_t strict_floor;    /* the daemon's (counts); 0: by a daemon that knew of none */
    _Alignas(4096) struct counters counters[MAX_THREADS];
    struct access_log accesses[ACCESS_LOGS];
    struct slot_head slots[SLOT_COUNT];
    struct latencies latencies[LATENCY_COPIES];
    struct young_files young;
    struct parked parked[PARKED_COUNT];
};
static_assert(offsetof(struct shared, counters) == 4096, "shared page");

/* Those of the thread that counts in `counters`. */
static inline struct latencies *latencies_of(struct shared *shared, const struct counters *counters)
{
    return &shared->latencies[(size_t)(counters - shared->counters) % LATENCY_COPIES];
}

#define SHARED_HEAD_BYTES ((sizeof(struct shared) + 4095) & ~(size_t)4095)
#define SHARED_BYTES (SHARED_HEAD_BYTES + (size_t)SLOT_COUNT * SLOT_BYTES)

/* Messages on the control socket (SOCK_SEQPACKET), each with this head. */
enum control_type {
    CONTROL_ATTACH = 1,   /* daemon → fast path: serve me; descriptors: the fuse socket's two ends */
    CONTROL_ATTACHED = 2, /* fast path → daemon */
    CONTROL_HANDOVER = 3, /* daemon → fast path: give me what you hold (a takeover) */
    CONTROL_HELD = 4,     /* fast path → daemon; descriptors: /dev/fuse, shared memory, source, blob, listening socket */
    CONTROL_IN_DOUBT = 5, /* fast path → daemon: a change that a dead daemon may or may not have made */
    CONTROL_SLAB = 6,     /* fast path → daemon: needs one; daemon → fast path: a = its offset in the blob */
    CONTROL_FILLED = 7,   /* fast path → daemon: an array of struct filled */
    CONTROL_CORRUPT = 8,  /* fast path → daemon: of inode a, offset b, the record at the blob offset that follows */
    CONTROL_REFUSED = 9,  /* fast path → daemon: the blob cannot be written, errno a */
    CONTROL_ROOM = 10,    /* fast path → daemon: a record has none, a: number; and back: what can go has gone, a: the same */
    CONTROL_WISH = 11,    /* daemon → fast path: an array of struct wish, to be fetched when nobody minds */
    CONTROL_TOLD = 12,    /* fast path → daemon: all that an earlier daemon granted has been reported, and is not written to */
    CONTROL_SOURCE = 13,  /* daemon → fast path: it was mounted anew; descriptor: its root */
};

struct filled { /* one unit that was appended to the blob; its checksums follow */
    uint64_t report, inode, offset, version, blob_offset, record_bytes;
    uint32_t length, checksums;
};
static_assert(sizeof(struct filled) == 56, "report of a filled unit");

struct wish { /* the unit of a file that holds the byte at `offset` */
    uint64_t inode, offset;
};

struct control {
    uint32_t type, length; /* of what follows */
    uint64_t a, b;
};
static_assert(sizeof(struct control) == 24, "control message");

#define ATTACH_SAME_PYTHON 1 /* a: the Python that has the passed requests is alive */

#endif
