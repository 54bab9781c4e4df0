"""Builds the fast path, a program in C. Without a compiler, liblmdb or xxhash the package installs all the same.

With CACHEFS_DISTRIBUTE=1 (`make dist`) the program contains LMDB, so that the wheel runs on machines without liblmdb.
The build then fails if the program cannot be built, and the wheel's tag names the oldest glibc that it runs on.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # the build runs elsewhere
from cachefs.contract import c_header

C = Path("cachefs/fastpath/c")
SOURCES = sorted(str(path) for path in C.glob("*/*.c"))
HEADERS = sorted(str(path) for path in C.glob("*/*.h"))
FLAGS = ["-std=gnu11", "-O2", "-g", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-pthread"]
DISTRIBUTE = os.environ.get("CACHEFS_DISTRIBUTE") == "1"


class BuildProgram(build_ext):
    """An executable in place of a shared library, next to the package's modules."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name("cachefs-fastpath"))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a daemon may be running it
        c_header.write(C)
        here = f"-ffile-prefix-map={Path.cwd()}=."
        try:
            objects = self.compiler.compile(
                ext.sources,
                output_dir=self.build_temp,
                include_dirs=[str(C)],
                extra_preargs=[*FLAGS, *([here] if DISTRIBUTE else [])],
                depends=ext.depends,
            )
            self.compiler.link_executable(
                objects,
                target.name,
                output_dir=str(target.parent),
                libraries=[":liblmdb.a" if DISTRIBUTE else "lmdb", "pthread"],
                target_lang="c",
            )
        except Exception as error:
            if DISTRIBUTE:
                raise
            print(f"cachefs: the fast path was not built, Python serves alone: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The program needs no version of Python, and of the platform only glibc."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        if DISTRIBUTE and platform.startswith("linux_"):
            platform = platform.replace("linux", f"manylinux_{self.oldest_glibc()}", 1)
        return "py3", "none", platform

    def oldest_glibc(self) -> str:
        (program,) = Path(self.bdist_dir).glob("**/cachefs-fastpath")
        needed = subprocess.run(["objdump", "-T", program], capture_output=True, text=True, check=True).stdout
        return "_".join(map(str, max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", needed))))


setup(
    ext_modules=[Extension("cachefs.fastpath.program", SOURCES, depends=HEADERS, optional=not DISTRIBUTE)],
    cmdclass={"build_ext": BuildProgram, "bdist_wheel": PlatformWheel},
)
