#!/bin/bash
# Slurm epilog: unmount a dataset when the last job of this node that asked for it has ended. Cached data stay on the SSD:
# the next job that asks for the dataset starts warm.
set -u
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # slurmd sets none
for place in /run/cachefs-jobs/*/"$SLURM_JOB_ID"; do
    [ -e "$place" ] || continue
    name=$(basename "$(dirname "$place")")
    exec 9>"/run/cachefs-jobs/$name.lock"
    flock 9 # against a prolog that mounts for the next job at this moment
    rm -f "$place"
    rmdir "/run/cachefs-jobs/$name" 2>/dev/null && systemctl stop "cachefs@$name"
    exec 9>&-
done
exit 0
