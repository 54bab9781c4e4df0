"""A source that fails on demand: a small FUSE passthrough whose faults are the names of files in a directory.

    python -m tests.faultfs ROOT MOUNTPOINT FAULTS

While FAULTS/hang exists, READ, OPEN and LOOKUP of paths that contain a line of it do not answer;
while FAULTS/late exists, the first LOOKUP of each path that contains a line of it is answered later, with what was
true before; FAULTS/has-late says that there is one;
while FAULTS/hang-all exists, GETATTR, STATFS and GETXATTR do not either;
while FAULTS/hang-flush exists, FLUSH does not; FAULTS/has-flushed says that there is one;
while FAULTS/hang-write exists, WRITE does not; FAULTS/has-hung says that there is one;
while FAULTS/rctime exists, it is the extended attribute ceph.dir.rctime of every directory;
while FAULTS/enotconn exists, STATFS fails with ENOTCONN;
while FAULTS/edquot exists, FLUSH fails with EDQUOT;
while FAULTS/fsync exists, FSYNC and FSYNCDIR fail with EIO;
while FAULTS/fails exists, each line of it, such as `read EIO d0/f00000`, says which operation (lookup, open, read,
readdir, write or getxattr) fails how for paths that end in this;
FAULTS/numbers, read at the start, has inode numbers: each line of it, such as `2 d0`, is a number and a path;
while FAULTS/moved exists, each line of it, such as `5 /trash`, says where the object with that inode number is now, as
on MooseFS, which keeps a directory that was removed while it is open;
while FAULTS/statfs exists, each line of it, such as `f_files 0`, is a field of the answer to STATFS and its value;
while FAULTS/tick exists, it is the ctime and mtime of everything, in nanoseconds;
while FAULTS/no-ctime exists, every ctime is 0, as on archivemount;
while FAULTS/behind exists, times are so many seconds earlier, as of a source whose clock is late;
while FAULTS/squash exists, modes are checked, and root is nobody, as on an NFS server with root_squash;
while FAULTS/hidden exists, READDIR leaves out the names that are lines of it;
while FAULTS/folds exists, a name that is not there leads to what the same name in other letters leads to;
while FAULTS/short exists, READ of paths that end in it returns half of what was asked for.
"""

import errno
import os
import sys
from pathlib import Path

import pyfuse3
import trio

ROOT, MOUNTPOINT, FAULTS = (Path(argument) for argument in sys.argv[1:4])


class FaultFs(pyfuse3.Operations):
    def __init__(self) -> None:
        super().__init__()
        self.paths = {pyfuse3.ROOT_INODE: os.fsencode(ROOT)}
        self.late: set[bytes] = set()
        lines = (FAULTS / "numbers").read_text().splitlines() if (FAULTS / "numbers").exists() else []
        self.numbers = {
            os.fsencode(ROOT / path): int(number) for number, path in (line.split(" ", 1) for line in lines)
        }

    async def fault(self, path: bytes) -> None:
        while self.is_named(path, "hang"):
            await trio.sleep(0.02)

    def is_named(self, path: bytes, fault: str) -> bool:
        try:
            return any(part in path for part in (FAULTS / fault).read_bytes().splitlines() or [b""])
        except FileNotFoundError:
            return False

    def fail(self, operation: str, path: bytes) -> None:
        try:
            lines = (FAULTS / "fails").read_text().splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            which, name, end = line.split(" ", 2)
            if which == operation and path.endswith(end.encode()):
                raise pyfuse3.FUSEError(getattr(errno, name))

    def check(self, path: bytes, asked: int, ctx) -> None:
        if not (FAULTS / "squash").exists():
            return
        found = os.lstat(path)
        uid, groups = ctx.uid or 65534, set()
        if ctx.uid:
            status = Path(f"/proc/{ctx.pid}/status").read_text().partition("Groups:")[2].partition("\n")[0]
            groups = {ctx.gid, *map(int, status.split())}
        shift = 6 if uid == found.st_uid else 3 if found.st_gid in groups else 0
        if found.st_mode >> shift & asked != asked:
            raise pyfuse3.FUSEError(errno.EACCES)

    @staticmethod
    def folded(directory: bytes, name: bytes) -> bytes:
        """The name as the directory has it."""
        if not (FAULTS / "folds").exists() or os.path.lexists(directory + b"/" + name):
            return name
        return next((each for each in os.listdir(directory) if each.lower() == name.lower()), name)

    def path_of(self, inode: int) -> bytes:
        if (FAULTS / "moved").exists():
            for line in (FAULTS / "moved").read_text().splitlines():
                number, path = line.split(" ", 1)
                self.paths[int(number)], self.numbers[os.fsencode(path)] = os.fsencode(path), int(number)
        return self.paths[inode]

    async def fault_of_all(self) -> None:
        while (FAULTS / "hang-all").exists():
            await trio.sleep(0.02)

    def number_of(self, path, inode):
        return self.numbers.get(path, inode)

    def attributes(self, path, inode=None):
        try:
            found = os.lstat(path)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno) from None
        number = pyfuse3.ROOT_INODE if path == os.fsencode(ROOT) else self.number_of(path, found.st_ino)
        self.paths[number] = path
        entry = pyfuse3.EntryAttributes()
        for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime_ns", "st_mtime_ns", "st_ctime_ns"):
            setattr(entry, name, getattr(found, name))
        if (FAULTS / "tick").exists():
            entry.st_ctime_ns = entry.st_mtime_ns = int((FAULTS / "tick").read_text())
        if (FAULTS / "no-ctime").exists():
            entry.st_ctime_ns = 0
        if (FAULTS / "behind").exists():
            behind_ns = int((FAULTS / "behind").read_text()) * 10**9
            entry.st_ctime_ns, entry.st_mtime_ns = found.st_ctime_ns - behind_ns, found.st_mtime_ns - behind_ns
        entry.st_ino = number
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    async def lookup(self, parent_inode, name, ctx):
        path = self.path_of(parent_inode) + b"/" + self.folded(self.paths[parent_inode], name)
        await self.fault(path)
        self.fail("lookup", path)
        self.check(self.paths[parent_inode], 1, ctx)
        try:
            return self.attributes(path)
        finally:
            if path not in self.late:
                self.late.add(path)
                if self.is_named(path, "late"):
                    (FAULTS / "has-late").touch()
                while self.is_named(path, "late"):
                    await trio.sleep(0.02)
                self.late.remove(path)

    async def getattr(self, inode, ctx):
        await self.fault_of_all()
        return self.attributes(self.path_of(inode))

    async def setattr(self, inode, attr, fields, fh, ctx):
        if fields.update_size:
            os.truncate(self.paths[inode], attr.st_size)
        return self.attributes(self.paths[inode])

    async def opendir(self, inode, ctx):
        self.check(self.paths[inode], 4, ctx)
        return inode

    async def readdir(self, fh, start_id, token):
        self.fail("readdir", self.paths[fh])
        hidden = (FAULTS / "hidden").read_bytes().split() if (FAULTS / "hidden").exists() else []
        names = sorted(name for name in os.listdir(self.paths[fh]) if name not in hidden)
        for index, name in enumerate(names[start_id:], start_id + 1):
            if not pyfuse3.readdir_reply(token, name, self.attributes(self.paths[fh] + b"/" + name), index):
                return

    async def open(self, inode, flags, ctx):
        await self.fault(self.paths[inode])
        self.fail("open", self.paths[inode])
        self.check(self.paths[inode], {os.O_RDONLY: 4, os.O_WRONLY: 2, os.O_RDWR: 6}[flags & os.O_ACCMODE], ctx)
        return pyfuse3.FileInfo(fh=os.open(self.paths[inode], flags), keep_cache=False)

    async def create(self, parent_inode, name, mode, flags, ctx):
        path = self.paths[parent_inode] + b"/" + name
        self.check(self.paths[parent_inode], 3, ctx)
        fd = os.open(path, flags | os.O_CREAT, mode)
        os.fchown(fd, ctx.uid, ctx.gid)
        return pyfuse3.FileInfo(fh=fd), self.attributes(path)

    async def unlink(self, parent_inode, name, ctx):
        os.unlink(self.paths[parent_inode] + b"/" + name)

    async def rename(self, parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx):
        old, new = self.paths[parent_inode_old] + b"/" + name_old, self.paths[parent_inode_new] + b"/" + name_new
        os.rename(old, new)
        self.attributes(new)

    async def read(self, fh, off, size):
        path = os.readlink(f"/proc/self/fd/{fh}".encode())
        await self.fault(path)
        self.fail("read", path)
        is_short = (FAULTS / "short").exists() and path.endswith((FAULTS / "short").read_bytes())
        return os.pread(fh, size // 2 if is_short else size, off)

    async def readlink(self, inode, ctx):
        return os.readlink(self.paths[inode])

    async def write(self, fh, off, buf):
        while (FAULTS / "hang-write").exists():
            (FAULTS / "has-hung").touch()
            await trio.sleep(0.02)
        self.fail("write", os.readlink(f"/proc/self/fd/{fh}".encode()))
        return os.pwrite(fh, buf, off)

    async def flush(self, fh):
        while (FAULTS / "hang-flush").exists():
            (FAULTS / "has-flushed").touch()
            await trio.sleep(0.02)
        if (FAULTS / "edquot").exists():
            raise pyfuse3.FUSEError(errno.EDQUOT)

    async def fsync(self, fh, datasync):
        if (FAULTS / "fsync").exists():
            raise pyfuse3.FUSEError(errno.EIO)

    async def fsyncdir(self, fh, datasync):
        if (FAULTS / "fsync").exists():
            raise pyfuse3.FUSEError(errno.EIO)

    async def release(self, fh):
        os.close(fh)

    async def statfs(self, ctx):
        await self.fault_of_all()
        if (FAULTS / "enotconn").exists():
            raise pyfuse3.FUSEError(errno.ENOTCONN)
        found, answer = os.statvfs(ROOT), pyfuse3.StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"):
            setattr(answer, name, getattr(found, name))
        if (FAULTS / "statfs").exists():
            for line in (FAULTS / "statfs").read_text().splitlines():
                name, value = line.split()
                setattr(answer, name, int(value))
        return answer

    async def getxattr(self, inode, name, ctx):
        await self.fault_of_all()
        if name == b"ceph.dir.rctime" and (FAULTS / "rctime").exists():
            return (FAULTS / "rctime").read_bytes()
        self.fail("getxattr", self.paths[inode])
        raise pyfuse3.FUSEError(errno.ENODATA)


def serve(filesystem, *options):
    pyfuse3.init(filesystem, str(MOUNTPOINT), {"default_permissions", "allow_other", *options})
    trio.run(pyfuse3.main, 1, 2000)
    pyfuse3.close(unmount=False)


if __name__ == "__main__":
    serve(FaultFs(), "fsname=faultfs")
