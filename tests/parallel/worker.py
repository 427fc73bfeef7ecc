"""One of several gloo processes: ``python -m tests.parallel.worker MODULE RANK SIZE STORE RESULT``.

It runs every case of ``MODULE.CASES[SIZE]`` and writes what each had to say, "" where it passed.
"""

import importlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=60)


def main(module, rank, size, store, result):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size), timeout=LIMIT
    )
    said = {}
    for case in importlib.import_module(module).CASES[int(size)]:
        try:
            case()
            said[case.__name__] = ""
        except Exception:
            said[case.__name__] = traceback.format_exc()
        dist.barrier()
    Path(result).write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
