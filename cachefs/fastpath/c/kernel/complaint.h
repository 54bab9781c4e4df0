/* Failures at /dev/fuse, on stderr, which is the daemon's log. A failure may repeat with each request, and nothing limits
   the size of the log while this process has it open: so at most one line a minute. */
#pragma once

void complain(const char *what); /* with the reason in errno */
