/* Included before the files of the relay: their system calls go to seams.c. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "common/shares.h"

void *seam_memset(void *to, int byte, size_t length);
void *seam_memcpy(void *to, const void *from, size_t length);
ssize_t seam_write(int fd, const void *data, size_t length);
ssize_t seam_writev(int fd, const struct iovec *parts, int count);
ssize_t seam_send(int fd, const void *data, size_t length, int flags);
ssize_t seam_recv(int fd, void *data, size_t length, int flags);
int seam_poll(struct pollfd *fds, nfds_t count, int timeout);
int seam_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);
int seam_lock(pthread_mutex_t *mutex);
int seam_unlock(pthread_mutex_t *mutex);
bool seam_full(const struct shares *shares, uint32_t owner);
FILE *seam_fopen(const char *path, const char *mode);

#define memset seam_memset
#define memcpy seam_memcpy
#define write seam_write
#define writev seam_writev
#define send seam_send
#define recv seam_recv
#define poll seam_poll
#define pthread_cond_wait seam_wait
#define pthread_mutex_lock seam_lock
#define pthread_mutex_unlock seam_unlock
#define shares_full seam_full
#define fopen seam_fopen
