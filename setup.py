"""Builds the fast path, a program in C. Without a compiler, liblmdb or xxhash the package installs all the same."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # the build runs elsewhere
from cachefs.contract import c_header

C = Path("cachefs/fastpath/c")
SOURCES = sorted(str(path) for path in C.glob("*/*.c"))
FLAGS = ["-std=gnu11", "-O2", "-g", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-pthread"]


class BuildProgram(build_ext):
    """An executable in place of a shared library, next to the package's modules."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_name("cachefs-fastpath"))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a daemon may be running it
        c_header.write(C)
        try:
            objects = self.compiler.compile(
                ext.sources,
                output_dir=self.build_temp,
                include_dirs=[str(C)],
                extra_preargs=FLAGS,
                depends=ext.depends,
            )
            self.compiler.link_executable(
                objects, target.name, output_dir=str(target.parent), libraries=["lmdb", "pthread"], target_lang="c"
            )
        except Exception as error:
            print(f"cachefs: the fast path was not built, Python serves alone: {error}", file=sys.stderr)


setup(
    ext_modules=[
        Extension(
            "cachefs.fastpath.program",
            SOURCES,
            depends=sorted(str(path) for path in C.glob("*/*.h")),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildProgram},
)
