#!/bin/bash
# Slurm epilog: unmount a dataset when the last job of this node that asked for it has ended. Cached data stay on the SSD:
# the next job that asks for the dataset starts warm.
set -u
for place in /run/cachefs-jobs/*/"$SLURM_JOB_ID"; do
    [ -e "$place" ] || continue
    rm -f "$place"
    name=$(basename "$(dirname "$place")")
    rmdir "/run/cachefs-jobs/$name" 2>/dev/null && systemctl stop "cachefs@$name"
done
exit 0
