#!/bin/bash
# Slurm prolog: mount the dataset that a job asks for, and warm it up in the background.
#
#   slurm.conf:  Prolog=/etc/slurm/prolog.d/cachefs.sh  Epilog=/etc/slurm/epilog.d/cachefs.sh
#   job:         sbatch --comment=cachefs:imagenet …    → mounts as /etc/cachefs/imagenet.toml says
#
# /etc/default/cachefs-slurm may set what happens to a job whose dataset cannot be mounted:
#   ON_FAILURE=continue   the job starts, and finds an empty directory (the default)
#   ON_FAILURE=cancel     the job is cancelled; the node stays in use
#   ON_FAILURE=drain      Slurm drains the node and requeues the job, as for any prolog that fails. A job that asks for
#                         a dataset that does not exist is cancelled: its user must not be able to drain nodes.
#   SLURM_BIN=/opt/slurm/bin   where squeue and scancel are, if not in a usual place
# and PATH, if cachefs is neither in a usual place nor in /opt/cachefs/bin.
set -u
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/cachefs/bin # slurmd sets none
ON_FAILURE=continue SLURM_BIN=/opt/slurm/bin
[ ! -r /etc/default/cachefs-slurm ] || . /etc/default/cachefs-slurm
PATH=$PATH:$SLURM_BIN

fail() { # fail MODE MESSAGE
    logger -t cachefs "job $SLURM_JOB_ID: $2"
    case $1 in
        continue) exit 0 ;;
        cancel) scancel "$SLURM_JOB_ID" && exit 0 ;;
    esac
    exit 1
}

comment=${SLURM_JOB_COMMENT-$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %k)}
[[ $comment =~ (^|[[:space:],])cachefs:([A-Za-z0-9._-]+) ]] || exit 0
name=${BASH_REMATCH[2]}
file=/etc/cachefs/$name.toml
if [ ! -f "$file" ]; then
    [ "$ON_FAILURE" = continue ] || ON_FAILURE=cancel
    fail "$ON_FAILURE" "there is no $file"
fi
cachefs=$(command -v cachefs) || fail "$ON_FAILURE" "there is no command cachefs: set PATH in /etc/default/cachefs-slurm"

mkdir -p /run/cachefs-jobs
exec 9>"/run/cachefs-jobs/$name.lock"
flock 9 # against an epilog that unmounts for the last job at this moment
mkdir -p "/run/cachefs-jobs/$name"
touch "/run/cachefs-jobs/$name/$SLURM_JOB_ID"
systemctl start "cachefs@$name" || fail "$ON_FAILURE" "cachefs@$name does not start: run journalctl -u cachefs@$name"
exec 9>&-

# The interpreter of cachefs parses the file.
mountpoint=$("$(dirname "$(readlink -f "$cachefs")")/python3" -c \
    'import sys, tomllib; print(tomllib.load(open(sys.argv[1], "rb"))["mountpoint"])' "$file") &&
    "$cachefs" warmup --background "$mountpoint" >/dev/null || logger -t cachefs "job $SLURM_JOB_ID: no warm-up of $name"
exit 0
