"""Forked processes: they begin as copies of this one, and so need no imports."""

import os
import socket
import sys
import traceback
from functools import partial

import torch


def forked(work):
    """Run ``work`` in a forked process and return its id. On an error the process exits with 1."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(status)


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_processes(count, work):
    """Run ``work(rank)`` in forked processes that can form a gloo group. All must succeed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])

    def begin(rank):
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
        # Accelerate would set more threads. They wait forever in a fork of a process that has had threads.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        work(rank)
        if torch.distributed.is_initialized():  # others may still read rank 0's store
            torch.distributed.barrier()

    children = [forked(partial(begin, rank)) for rank in range(count)]
    assert [exit_code(child) for child in children] == [0] * count
