#!/bin/bash
# Slurm epilog: unmount when the last job of this node that asked for a dataset is over. What is cached stays on the SSD:
# the next job that asks for it starts warm.
set -u
for place in /run/cachefs-jobs/*/"$SLURM_JOB_ID"; do
    [ -e "$place" ] || continue
    rm -f "$place"
    name=$(basename "$(dirname "$place")")
    rmdir "/run/cachefs-jobs/$name" 2>/dev/null && systemctl stop "cachefs@$name"
done
exit 0
