"""``python -m release``: builds what is published, checks it, and uses it as a stranger would."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from release import build, hub, install, version


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 all right, 1 something disagrees or is missing."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    versions = commands.add_parser("version", help="say whether version, changelog and tag agree")
    versions.add_argument("--tag", help="name of the tag to be released, such as v1.2.3")
    builds = commands.add_parser("build", help="source distribution and wheels")
    builds.add_argument(
        "kind", nargs="*", default=build.KINDS, help=f"of {', '.join(build.KINDS)}; default: all"
    )
    checks = commands.add_parser("check", help="metadata, stable ABI, platform tags, contents")
    hubs = commands.add_parser("hub", help="the losses as a kernel of the Hugging Face hub")
    hubs.add_argument("--out", type=Path, default=Path("dist/hub"), help="its folder")
    installs = commands.add_parser("install", help="wheels into bare environments, used there")
    installs.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    installs.add_argument("--torch", nargs="+", default=[None], help="versions of torch")
    for command in (builds, checks, installs):
        command.add_argument("--out", type=Path, default=Path("dist"), help="folder of the files")
    given = parser.parse_args(arguments)
    if given.command == "version":
        found = version.disagreements(tag=given.tag)
        print("\n".join(found) or version.stated())
        return bool(found)
    if given.command == "build":
        if unknown := set(given.kind) - set(build.KINDS):
            parser.error(f"unknown kind {', '.join(sorted(unknown))}; there are {', '.join(build.KINDS)}")
        build.build(given.out, given.kind)
    elif given.command == "check":
        build.check(given.out)
    elif given.command == "hub":
        try:
            hub.build(given.out)
        except FileExistsError as error:
            parser.error(str(error))
    else:
        wheels = [wheel for wheel in sorted(given.out.glob("gspo_kernels-*.whl")) if install.fits(wheel)]
        if not wheels:
            parser.error(f"{given.out}: no wheel for this machine, run `make dist-build`")
        for python, torch in product(given.python, given.torch):
            install.install(wheels, python, torch)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
