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
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from gspo_kernels.trainer.input_errors import EngineError

_Found = TypeVar("_Found")

_START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"
_GENERATE = "/inference/v1/generate"
"""Its own endpoint, from tokens to tokens, that alone says what could have been drawn."""

Scored: TypeAlias = dict[int, float]
"""Log-probs in nats by token id, of one place."""


class Answer(NamedTuple):
    """One completion as vLLM gives it."""

    tokens: list[int]  # with the token that ended it
    logprobs: list[float] | None  # of these tokens, in nats
    reason: str | None  # why it ended: "stop" or "length"
    mask: list[list[int]] | None = None  # ids that each token could have been drawn as


class VLLMServer:
    """One server, which may have several GPUs and replicas behind its address.

    Args:
        url: where it listens, as ``http://localhost:8000``.
        model: the name under which it serves the model; None: the only one that it serves.
        timeout: seconds that one answer may take, and a reload as well.
        at_once: requests that wait for an answer at the same time.
        section: of the configuration, which has its ``url`` and ``model``.

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
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    def check(self) -> None:
        """Raise an `EngineError` unless the server answers and serves the model."""

        def names(answer: Any) -> list[str]:
            # Adapters are listed as well, with the model that they change as their parent.
            return [each["id"] for each in answer["data"] if each.get("parent") is None]

        served = self._read("/v1/models", None, names)
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
        """Complete each prompt under its own options, which are fields of vLLM's ``SamplingParams``.

        One request for each, as each has a seed of its own. With ``masks`` the answers say what could have
        been drawn.
        """
        return self._all(lambda prompt, own: self._complete(prompt, own, masks), prompts, options)

    def score(self, sequences: Sequence[list[int]], top_k: int) -> list[list[Scored]]:
        """Return of every token but the first of each sequence what its likeliest ids, and itself, had as
        log-probs.
        """
        # vLLM generates a token at least; what it says of a prompt comes before temperature and all cuts
        options = {"model": self.model, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}

        def ask(sequence: list[int]) -> list[Scored]:
            return self._read("/v1/completions", {"prompt": sequence, **options}, _scores)

        return self._all(ask, sequences)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without special ones around it."""
        request = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self._read("/tokenize", request, lambda answer: list(map(int, answer["tokens"])))

    def _all(self, ask: Callable[..., _Found], *arguments: Sequence[Any]) -> list[_Found]:
        """Call ``ask`` with what is at the same place in all arguments, several calls under way at a time.

        The first that fails ends all: what waits is not asked any more, and what is asked is left behind in
        daemon threads, which keep no program from ending.
        """
        failed = threading.Event()

        def work(task: tuple[int, tuple[Any, ...]]) -> tuple[int, Any]:
            place, given = task
            try:
                return place, None if failed.is_set() else ask(*given)
            except BaseException:
                failed.set()
                raise

        tasks = list(enumerate(zip(*arguments, strict=True)))
        with ThreadPool(min(self.at_once, len(tasks)) or 1) as pool:
            answers = dict(pool.imap_unordered(work, tasks))
        return [answers[place] for place in range(len(tasks))]

    def reload(self, path: Path) -> None:
        """Take the weights of a directory that ``from_pretrained`` could load; forget cached prefixes."""
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

        def completion(answer: Any) -> Answer:
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

        return self._read(path, {"model": self.model, **request}, completion)

    def _read(self, path: str, body: Any, read: Callable[[Any], _Found]) -> _Found:
        """Ask, and return what ``read`` finds in the answer."""
        answer = self._ask(path, body)
        try:
            return read(answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"{self.url}{path} answered something else than vLLM does (one choice with token_ids, "
                "log-probs and finish_reason, or with prompt_logprobs; a list of models, or of tokens): "
                f"{_beginning(json.dumps(answer))}"
            ) from error

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


def _scores(answer: Any) -> list[Scored]:
    """What vLLM says of the tokens of a prompt but the first: likeliest ids, and the token's own beside."""
    (choice,) = answer["choices"]
    first, *others = choice["prompt_logprobs"]
    if first is not None:
        return []
    return [{int(token): float(each["logprob"]) for token, each in said.items()} for said in others]


def _beginning(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]} ..."
