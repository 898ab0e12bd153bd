"""Build of the C extensions; all other settings are in pyproject.toml.

Here, because setuptools calls extension modules in pyproject.toml experimental and warns of them.
"""

import os
import runpy
import shlex
import sys
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Upon an editable installation setuptools warns that a folder of the current directory may be
# imported instead of the package. Every process of gadei-ps is started so that none is.
warnings.filterwarnings("ignore", message="(?s).*Editable installation")

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-Wall",
    "-Wextra",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-pthread",
)

LAUNCHER = "gadei_ps._launcher"


def named(*patterns):
    return sorted(str(path) for one in patterns for path in Path("native").glob(one))


class Build(build_ext):
    """Builds a program beside the extensions: it is installed like them."""

    def get_ext_filename(self, fullname):
        if fullname.endswith("_launcher"):
            return str(Path(*fullname.split(".")))
        return super().get_ext_filename(fullname)

    def build_extension(self, ext):
        if ext.name != LAUNCHER:
            super().build_extension(ext)
            return
        objects = self.compiler.compile(
            ext.sources, output_dir=self.build_temp, extra_postargs=ext.extra_compile_args
        )
        path = Path(self.get_ext_fullpath(ext.name))
        self.compiler.link_executable(
            objects,
            path.name,
            output_dir=str(path.parent),
            extra_postargs=shlex.split(os.environ.get("LDFLAGS", "")),
        )


# A source distribution lacks this script, and its header is right.
if Path("native/build_identity.py").is_file():
    try:
        runpy.run_path("native/build_identity.py")["main"]()
    except OSError as error:
        sys.exit(f"native/ps_build.h is stale and cannot be renewed: {error}")

setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension(LAUNCHER, sources=["native/launcher.c"], extra_compile_args=list(FLAGS)),
        Extension(
            "gadei_ps._native",
            sources=named("module*.c", "ps_*.c"),
            depends=named("*.h"),
            include_dirs=["native"],
            extra_compile_args=list(FLAGS),
        ),
    ],
)
