"""A reward function in a process of its own: what never returns, even without Python's lock, can be killed.

``python -m gspo_kernels.trainer.rewards.process`` is that process. Both ends speak pickle over its standard
input and output; what the function prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import pickle
import signal
import subprocess
import sys
import weakref
from typing import IO, Any, cast

from gspo_kernels.trainer.input_errors import RewardError
from gspo_kernels.trainer.rewards.loading import RewardFunction, find_reward, name_of, place_of


class ProcessReward:
    """Calls a reward function in a process that starts now and lives until `kill` or the end of this one.

    The source is a specification ("module:function"), or a function that can be pickled: one of an importable
    module, or a `functools.partial` of one. A `RewardError` says that it cannot be loaded there.
    """

    def __init__(self, source: str | RewardFunction) -> None:
        self.function = find_reward(source) if isinstance(source, str) else source
        self.__name__ = name_of(self.function)
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def __call__(self, **arguments: Any) -> Any:
        """Return what the function returns; a `RewardError` says that it raised, or its process ended."""
        return self._ask(self._process or self._start(), arguments)

    def kill(self) -> None:
        """End the process at once; the next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", ProcessReward.__module__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, process.kill)
        self._ask(process, self._source)
        self._process = process
        return process

    def _ask(self, process: subprocess.Popen[bytes], question: Any) -> Any:
        assert process.stdin is not None and process.stdout is not None
        try:
            message = pickle.dumps(question)
        except Exception as error:
            what = f"reward function {self.__name__} or its arguments"
            raise RewardError(f"{what} cannot be sent to a process of its own: {error!r}") from error
        try:
            process.stdin.write(message)
            process.stdin.flush()
            succeeded, answer = pickle.load(process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            process.kill()
            self._process = None
            what = f"the process of reward function {self.__name__}"
            raise RewardError(f"{what} ended with status {process.wait()}") from error
        if not succeeded:
            raise RewardError(f"reward function {self.__name__} {answer}")
        return answer


def serve(requests: io.BufferedReader, answers: IO[bytes]) -> None:
    """Take a function, or the specification of one, from the first request; then answer calls to the end."""
    function: Any = None
    while requests.peek(1):
        try:
            request, values = pickle.load(requests), None
            if function is None:
                function = find_reward(request) if isinstance(request, str) else request
            else:
                values = function(**request)
                values = asyncio.run(values) if inspect.iscoroutine(values) else values
            message = pickle.dumps((True, values))
        except (Exception, SystemExit) as error:
            message = pickle.dumps((False, f"raised {error!r}{place_of(error, function)}"))
        answers.write(message)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends this process
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(cast(io.BufferedReader, sys.stdin.buffer), channel)
