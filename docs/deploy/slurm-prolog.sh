#!/bin/bash
# Slurm prolog: mount the dataset that a job asks for, and warm it up in the background.
#
#   slurm.conf:  Prolog=/etc/slurm/prolog.d/cachefs.sh  Epilog=/etc/slurm/epilog.d/cachefs.sh
#   job:         sbatch --comment=cachefs:imagenet …    → mounts as /etc/cachefs/imagenet.toml says
#
# A prolog that fails drains the node. A cache that cannot be mounted must not do that: the job then finds no files at the
# mountpoint and fails itself.
set -u
comment=$(scontrol show job "$SLURM_JOB_ID" --oneliner | grep -o 'Comment=cachefs:[A-Za-z0-9._-]*' || true)
name=${comment#Comment=cachefs:}
[ -n "$name" ] && [ -f "/etc/cachefs/$name.toml" ] || exit 0

mkdir -p "/run/cachefs-jobs/$name"
touch "/run/cachefs-jobs/$name/$SLURM_JOB_ID"
systemctl start "cachefs@$name" || { logger -t cachefs "cachefs@$name does not start"; exit 0; }
mountpoint=$(sed -n 's/^mountpoint *= *"\(.*\)".*/\1/p' "/etc/cachefs/$name.toml")
cachefs warmup --background "$mountpoint" || logger -t cachefs "no warm-up of $mountpoint"
exit 0
