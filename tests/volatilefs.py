"""A FUSE source whose inode numbers do not stay, as with libfuse's interface with paths: a faultfs of another type.

    python -m tests.volatilefs ROOT MOUNTPOINT FAULTS [TYPE]

An object gets a number when it is looked up, and loses it when the kernel has forgotten the object. The number that was
given up last is given to the next object. FAULTS is as for faultfs; `numbers` does not apply. The mount table shows the
type fuse.TYPE; with the type rclone all extended attributes of files fail with EIO, as there.
"""

import errno
import os
import stat
import sys
from collections import Counter
from itertools import count

import pyfuse3

from tests.faultfs import FaultFs, serve

TYPE = sys.argv[4] if len(sys.argv) > 4 else "volatilefs"


class VolatileFs(FaultFs):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = {}
        self.unused: list[int] = []
        self.lookups: Counter[int] = Counter()
        self.new_numbers = count(2)

    def number_of(self, path, inode):
        if path not in self.numbers:
            self.numbers[path] = self.unused.pop() if self.unused else next(self.new_numbers)
        return self.numbers[path]

    async def lookup(self, parent_inode, name, ctx):
        entry = await super().lookup(parent_inode, name, ctx)
        self.lookups[entry.st_ino] += 1
        return entry

    async def create(self, parent_inode, name, mode, flags, ctx):
        info, entry = await super().create(parent_inode, name, mode, flags, ctx)
        self.lookups[entry.st_ino] += 1
        return info, entry

    async def mkdir(self, parent_inode, name, mode, ctx):
        path = self.paths[parent_inode] + b"/" + name
        os.mkdir(path, mode)
        entry = self.attributes(path)
        self.lookups[entry.st_ino] += 1
        return entry

    async def readdir(self, fh, start_id, token):
        names = sorted(os.listdir(self.paths[fh]))
        for index, name in enumerate(names[start_id:], start_id + 1):
            entry = self.attributes(self.paths[fh] + b"/" + name)
            if not pyfuse3.readdir_reply(token, name, entry, index):
                return
            self.lookups[entry.st_ino] += 1

    async def link(self, inode, new_parent_inode, new_name, ctx):
        path = self.paths[new_parent_inode] + b"/" + new_name
        os.link(self.paths[inode], path)
        entry = self.attributes(path)
        self.lookups[entry.st_ino] += 1
        return entry

    async def unlink(self, parent_inode, name, ctx):
        await super().unlink(parent_inode, name, ctx)
        self.numbers.pop(self.paths[parent_inode] + b"/" + name, None)

    async def rename(self, parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx):
        old, new = self.paths[parent_inode_old] + b"/" + name_old, self.paths[parent_inode_new] + b"/" + name_new
        os.rename(old, new)
        self.numbers.pop(new, None)
        for path in [path for path in self.numbers if path == old or path.startswith(old + b"/")]:
            number = self.numbers.pop(path)
            self.numbers[new + path[len(old) :]] = number
            self.paths[number] = new + path[len(old) :]

    async def getxattr(self, inode, name, ctx):
        if TYPE == "rclone" and stat.S_ISREG(os.lstat(self.paths[inode]).st_mode):
            raise pyfuse3.FUSEError(errno.EIO)
        return await super().getxattr(inode, name, ctx)

    async def listxattr(self, inode, ctx):
        raise pyfuse3.FUSEError(errno.EIO if TYPE == "rclone" else errno.EOPNOTSUPP)

    async def forget(self, inode_list):
        for number, lookups in inode_list:
            self.lookups[number] -= lookups
            if self.lookups[number] <= 0:
                del self.lookups[number]
                path = self.paths.pop(number, None)
                if path is not None and self.numbers.get(path) == number:
                    del self.numbers[path]
                self.unused.append(number)


if __name__ == "__main__":
    serve(VolatileFs(), "fsname=volatilefs", f"subtype={TYPE}")
