"""One of several gloo processes: ``python -m tests.parallel.worker SIZE STORE RANK RESULT MODULE...``.

It runs the cases of the modules that a group of SIZE can run, and writes what each had to say, "" where it
passed.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parallel.ranks import cases_of

LIMIT = timedelta(seconds=60)


def main(size, store, rank, result, *modules):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size), timeout=LIMIT
    )
    said = {}
    for name, case in cases_of(int(size), modules).items():
        try:
            case()
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
        dist.barrier()
    Path(result).write_text(json.dumps(said))
    dist.destroy_process_group()
    # gloo's threads have been seen to abort a process that was done while its interpreter was taken down
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
