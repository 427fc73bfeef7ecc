"""``python -m benchmarks verdict DIR --last LAST``: whether a campaign is as good as the one before.

A campaign goes on whatever its stages do, and two campaigns differ in many small things; a nightly job
needs one answer. It is no where a stage did not finish, or where the spread of one of this package's ratios
lies wholly above its earlier one. Others' ratios and improvements are not judged, ``compare`` shows them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.compare import lines
from benchmarks.registry import CONTESTANTS


def unfinished(folder: Path) -> list[str]:
    """Stages of a campaign that are not done, and why.

    Raises:
        FileNotFoundError: the folder holds no campaign.
    """
    stages = json.loads((folder / "campaign.json").read_text())["stages"]
    return [f"{one['name']}: {one['status']}, {one['reason']}" for one in stages if one["status"] != "done"]


def slower(last: Path, now: Path) -> list[str]:
    """What of ours became slower than its spread."""
    return [
        f"{line.suite}, {line.case}: {line.contestant} takes {line.quotient:.2f} times its earlier ratio"
        for line in sorted(lines(last, now))
        if line.contestant in CONTESTANTS and CONTESTANTS[line.contestant].ours
        if not line.agrees and line.quotient > 1
    ]


def main(folder: Path, last: Path | None) -> int:
    """Print what is wrong; 0 if nothing is, 1 otherwise, 2 without a campaign or an earlier one."""
    try:
        found = unfinished(folder)
        if last is None:
            print("no earlier campaign to compare with")
        else:
            found += slower(last, folder)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(found) or "every stage is done, and nothing of ours is slower")
    return 1 if found else 0
