"""A vLLM server, by its published HTTP interface.

Completions come from ``/v1/completions`` with token ids in and out, or from ``/inference/v1/generate`` where
they are to say what could have been drawn; a teacher's log-probs of given tokens from ``/v1/completions``, as
those of a prompt. Weights reach it through a directory: the server must be started
with ``VLLM_SERVER_DEV_MODE=1``, which opens ``/collective_rpc`` and ``/reset_prefix_cache``, and see the
directory under the same path.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from gspo_kernels.trainer.engines.teacher import Scored
from gspo_kernels.trainer.engines.vllm import Answer
from gspo_kernels.trainer.input_errors import EngineError

_Found = TypeVar("_Found")

_START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"
_GENERATE = "/inference/v1/generate"
"""Its own endpoint, from tokens to tokens, that alone says what could have been drawn."""


class VLLMServer:
    """One server, which may have several GPUs and replicas behind its address.

    Args:
        url: where it listens, as ``http://localhost:8000``.
        section: of the configuration, which has its ``url`` and ``model``.
        model: the name under which it serves the model; None: the only one that it serves.
        timeout: seconds that one answer may take, and a reload as well.
        at_once: requests that wait for an answer at the same time.

    The key of a server that asks for one is taken from ``VLLM_API_KEY``, as vLLM does.
    """

    def __init__(
        self, url: str, *, model: str | None, timeout: float, at_once: int, section: str = "engine"
    ) -> None:
        self.url = url.rstrip("/")
        self.name = f"the vLLM server at {self.url}"
        self.model = model
        self.section = section
        self.timeout = timeout
        self.at_once = at_once
        self._open = build_opener(ProxyHandler({})).open  # a proxy is for what lies outside
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )

    def check(self) -> None:
        """Raise an `EngineError` unless the server answers and serves the model."""
        answer = self._ask("/v1/models")
        try:
            # Adapters are listed as well, with the model that they change as their parent.
            served = [each["id"] for each in answer["data"] if each.get("parent") is None]
        except (KeyError, TypeError, AttributeError) as error:
            raise self._unexpected("/v1/models", answer) from error
        if self.model is None and len(served) == 1:
            self.model = served[0]
        if self.model not in served:
            which = f"{self.section}.model must be one of" if served else "it serves"
            raise EngineError(
                f"{self.name} does not serve {self.model!r}; {which} {', '.join(served) or 'nothing'}"
            )

    def complete(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], *, masks: bool = False
    ) -> list[Answer]:
        """See `Service.complete`: one request for each prompt, as each has a seed of its own."""
        pairs = zip(prompts, options, strict=True)
        return self._all([partial(self._complete, prompt, own, masks) for prompt, own in pairs])

    def score(self, sequences: Sequence[list[int]], top_k: int) -> list[list[Scored]]:
        """See `Scorer.score`; requests as in `complete`."""
        return self._all([partial(self._score, sequence, top_k) for sequence in sequences])

    def tokenize(self, text: str) -> list[int]:
        """See `Scorer.tokenize`."""
        request = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = self._ask("/tokenize", request)
        try:
            return list(map(int, answer["tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise self._unexpected("/tokenize", answer) from error

    def _all(self, requests: Sequence[Callable[[], _Found]]) -> list[_Found]:
        """What each request returns, several of them under way at a time.

        The first that fails ends all: what waits is not asked any more, and what is asked is left behind in
        daemon threads, which keep no program from ending.
        """
        waiting: SimpleQueue[tuple[Future[_Found], Callable[[], _Found]]] = SimpleQueue()
        answers: list[Future[_Found]] = []
        for request in requests:
            answers.append(Future())
            waiting.put((answers[-1], request))

        def ask() -> None:
            with suppress(Empty):
                while True:
                    answer, request = waiting.get_nowait()
                    try:
                        answer.set_result(request())
                    except BaseException as error:
                        answer.set_exception(error)
                        return

        for _ in range(min(self.at_once, len(requests))):
            threading.Thread(target=ask, name="gspo request", daemon=True).start()
        try:
            done, _ = wait(answers, return_when=FIRST_EXCEPTION)
            for failed in filter(Future.exception, done):
                failed.result()
            return [answer.result() for answer in answers]
        finally:
            with suppress(Empty):
                while True:
                    waiting.get_nowait()

    def reload(self, path: Path) -> None:
        """See `Service.reload`."""
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        try:
            self._ask("/collective_rpc", arguments)
        except EngineError as error:
            raise EngineError(
                f"{error}. The weights lie in {path}: the server must see them there, be able to reload "
                f"({_START}; reload_weights takes weights_path), and serve a model of the same architecture "
                "and vocabulary"
            ) from error
        self._ask("/reset_prefix_cache", {})

    def _complete(self, prompt: list[int], options: dict[str, Any], masks: bool) -> Answer:
        path, request = "/v1/completions", {"prompt": prompt, "return_token_ids": True, **options}
        if masks:
            path, request = _GENERATE, {"token_ids": prompt, "sampling_params": options}
        answer = self._ask(path, {"model": self.model, **request})
        try:
            (choice,) = answer["choices"]
            values, mask = choice.get("logprobs"), choice.get("sampling_mask")
            if values is not None:
                values = [x["logprob"] for x in values["content"]] if masks else values["token_logprobs"]
            return Answer(
                list(map(int, choice["token_ids"])),
                None if values is None else list(map(float, values)),
                choice["finish_reason"],
                None if mask is None else [list(map(int, kept)) for kept in mask],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._unexpected(path, answer) from error

    def _score(self, sequence: list[int], top_k: int) -> list[Scored]:
        path = "/v1/completions"
        # vLLM generates a token at least; what it says of a prompt comes before temperature and all cuts
        options = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}
        answer = self._ask(path, {"model": self.model, "prompt": sequence, **options})
        try:
            (choice,) = answer["choices"]
            first, *others = choice["prompt_logprobs"]
            return [] if first is not None else [_scored(each) for each in others]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._unexpected(path, answer) from error

    def _unexpected(self, path: str, answer: Any) -> EngineError:
        return EngineError(
            f"{self.url}{path} answered something else than vLLM does (one choice with token_ids, "
            "log-probs and finish_reason, or with prompt_logprobs; a list of models, or of tokens): "
            f"{_beginning(json.dumps(answer))}"
        )

    def _ask(self, path: str, body: Any = None) -> Any:
        """Post JSON, or without a body get; return the JSON of the answer, None where it is empty."""
        url = f"{self.url}{path}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._open(Request(url, data, self._headers), timeout=self.timeout) as answer:
                text = answer.read().decode()
            return json.loads(text) if text else None
        except HTTPError as error:
            hint = ""
            if error.code in (404, 405):
                more = " --return-sampling-mask --enable-scale-out" if path == _GENERATE else ""
                hint = f"; is it vLLM, started as {_START}{more}?"
            elif error.code == 401:
                hint = "; set VLLM_API_KEY to the key that the server was started with"
            said = _beginning(error.read().decode(errors="replace"))
            raise EngineError(f"{url} answered {error.code} {error.reason}: {said}{hint}") from error
        except TimeoutError as error:
            raise EngineError(
                f"{url} did not answer within {self.timeout:g} seconds (engine.timeout)"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(
                f"{url} cannot be reached: {reason or type(error).__name__}; is the server running "
                f"({_START}), and {self.section}.url its address?"
            ) from error
        except ValueError as error:
            raise EngineError(
                f"{url} answered no JSON but {_beginning(text)}; is it a vLLM server?"
            ) from error


def _scored(given: dict[str, Any]) -> Scored:
    """What vLLM says of one token of a prompt: its likeliest ids, and the token's own beside them."""
    return {int(token): float(each["logprob"]) for token, each in given.items()}


def _beginning(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]} ..."
