"""Builds the C++ CPU backend; everything else about the package is in pyproject.toml.

The extension is optional: where it can't be built, the package installs without it, and the backend reports
the reason from ``gspo_kernels/_C.unavailable``. ``GSPO_KERNELS_NO_EXT=1`` leaves it out on purpose.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NAME = "gspo_kernels._C"
SOURCES = [str(path) for path in sorted(Path("csrc").glob("*.cpp"))]
COMPILE_ARGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    # Vector pragmas without the OpenMP runtime. Never -ffast-math: it would change the importing thread.
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Loops that copy a block stay loops: memcpy's "rep movsb" is 20 times slower at some relative alignments.
    "-fno-tree-loop-distribute-patterns",
    "-fvisibility=hidden",
    "-Wall",
    # The stable ABI of PyTorch 2.11 and, through py_limited_api, that of Python 3.10.
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]

extension = Extension(NAME, SOURCES)
skip_reason = None
if os.environ.get("GSPO_KERNELS_NO_EXT", "0") not in ("", "0"):
    skip_reason = "it was left out of this build by GSPO_KERNELS_NO_EXT"
else:
    try:
        from torch.utils.cpp_extension import BuildExtension as build_ext
        from torch.utils.cpp_extension import CppExtension
    except ImportError as error:
        skip_reason = f"PyTorch can't be imported by the build ({error}); try --no-build-isolation"
    else:
        extension = CppExtension(NAME, SOURCES, extra_compile_args={"cxx": COMPILE_ARGS}, py_limited_api=True)


class OptionalBuild(build_ext):
    """Builds the extension, or records why that did not work."""

    def run(self) -> None:
        """Build the extension; never fail."""
        inplace, reason = self.inplace, skip_reason
        if reason is None:
            try:
                super().run()
            except (Exception, SystemExit) as error:
                summary = (str(error).strip() or type(error).__name__).splitlines()[0]
                reason = f"compiling it failed ({summary})"
            finally:
                self.inplace = inplace
        folder = Path(self.get_ext_fullpath(NAME)).parent
        note = folder / "_C.unavailable"
        if reason is None:
            note.unlink(missing_ok=True)
            return
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(reason + "\n")
        print(f"WARNING: gspo_kernels is built without its C++ CPU backend: {reason}", file=sys.stderr)
        self.distribution.ext_modules = []
        if not self.inplace:
            for left_by_an_earlier_build in folder.glob("_C*.so"):
                left_by_an_earlier_build.unlink()


class HonestWheel(bdist_wheel):
    """A wheel whose tag says whether it holds the extension."""

    def run(self) -> None:
        """Build first: only then is it known whether there is an extension."""
        self.run_command("build")
        if not self.distribution.has_ext_modules():
            self.root_is_pure, self.py_limited_api = True, False
        super().run()


setup(
    ext_modules=[extension],
    cmdclass={"build_ext": OptionalBuild, "bdist_wheel": HonestWheel},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
