"""Completions by vLLM, and the way of the policy's weights to it.

A server is used by its published HTTP interface: ``/v1/completions``, or ``/inference/v1/generate`` with
sampling masks. It must be started with ``VLLM_SERVER_DEV_MODE=1``, which opens ``/collective_rpc`` and
``/reset_prefix_cache``. Where vLLM is installed, ``engine.url: local`` runs one in each training process.
Weights reach both through a directory, which the server must see under the same path.
"""

from __future__ import annotations

import http.client
import importlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import torch

from gspo_kernels.trainer.config import InputError, TrainConfig
from gspo_kernels.trainer.processes import on_all, on_main
from gspo_kernels.trainer.rollout import Completion, Sampling, SamplingMask

_START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"
_GENERATE = "/inference/v1/generate"
_TIMEOUT = 1800.0
"""Seconds that one answer may take, and a reload as well."""
_PROBED = 8
"""Tokens that show which distribution log-probs are taken from."""
_TIED = 8
"""Equally likely tokens of which none is the single most likely one: a few, as logits have few bits."""


class VLLMResponse(NamedTuple):
    """One completion as vLLM returns it."""

    tokens: list[int]  # with the token that ended it
    logprobs: list[float] | None  # of these tokens, in nats
    reason: str | None  # why it ended: "stop" or "length"
    mask: list[list[int]] | None = None  # ids that each token could have been drawn as


def vllm_engine(
    config: TrainConfig, *, end_ids: list[int], vocabulary: int, model_path: str, accelerator: Any
) -> VLLMEngine:
    """Return the engine that ``engine.url`` names, once it is ready.

    Args:
        config: of the run; ``engine.url`` is the address of a server, or "local".
        end_ids: tokens that end a completion.
        vocabulary: how many tokens the trained model embeds.
        model_path: the directory or the Hub's name of the model, which a local vLLM loads.
        accelerator: accelerate's; an `InputError` in one process is raised in all.
    """
    engines: list[VLLMEngine] = []

    def start() -> None:
        url = config.engine.url
        if url is None or url == "local":
            vllm: VLLMServer | LocalVLLM = LocalVLLM(config, model_path, accelerator)
        else:
            vllm = VLLMServer(url, at_once=config.rollout.batch_size)
            vllm.check()
        engines.append(VLLMEngine(vllm, end_ids, vocabulary))

    on_all(accelerator, start)
    return engines[0]


class VLLMServer:
    """One server, which may have several GPUs and replicas behind its address.

    Args:
        url: where it listens, as ``http://localhost:8000``.
        at_once: requests that wait for an answer at the same time.
        timeout: seconds that one answer may take, and a reload as well.

    The key of a server that asks for one is taken from ``VLLM_API_KEY``, as vLLM does.
    """

    in_process = False

    def __init__(self, url: str, *, at_once: int = 256, timeout: float = _TIMEOUT) -> None:
        self.url = url.rstrip("/")
        self.name = f"the vLLM server at {self.url}"
        self.model: str | None = None
        self.at_once = at_once
        self.timeout = timeout
        self._open = build_opener(ProxyHandler({})).open  # a proxy is for addresses outside
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    def check(self) -> None:
        """Raise an `InputError` unless the server answers and serves one model."""
        # Adapters are listed as well, with the model that they change as their parent.
        served = self.read("/v1/models", None, lambda a: [m["id"] for m in a["data"] if not m.get("parent")])
        if len(served) != 1:
            raise InputError(f"{self.name} serves {', '.join(served) or 'nothing'}; expected one model")
        self.model = served[0]

    def complete(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], masks: bool
    ) -> list[VLLMResponse]:
        """Complete each prompt under its options, which are fields of vLLM's ``SamplingParams``.

        The first request that fails ends all: those under way are left behind in daemon threads.
        """

        def work(i: int) -> tuple[int, VLLMResponse]:
            return i, self._complete(prompts[i], options[i], masks)

        with ThreadPool(min(self.at_once, len(prompts)) or 1) as pool:
            responses = dict(pool.imap_unordered(work, range(len(prompts))))
        return [responses[i] for i in range(len(prompts))]

    def load(self, path: Path) -> None:
        """Take the weights of a directory that ``from_pretrained`` could load; forget cached prefixes."""
        try:
            self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        except InputError as error:
            raise InputError(
                f"{error}. The weights are in {path}: the server must see them there, be able to reload "
                f"({_START}; reload_weights takes weights_path), and serve a model of the same architecture "
                "and vocabulary"
            ) from error
        self.ask("/reset_prefix_cache", {})

    def _complete(self, prompt: list[int], options: dict[str, Any], masks: bool) -> VLLMResponse:
        path, request = "/v1/completions", {"prompt": prompt, "return_token_ids": True, **options}
        if masks:
            path, request = _GENERATE, {"token_ids": prompt, "sampling_params": options}

        def response(answer: Any) -> VLLMResponse:
            (choice,) = answer["choices"]
            values, mask = choice.get("logprobs"), choice.get("sampling_mask")
            if values is not None:
                values = [x["logprob"] for x in values["content"]] if masks else values["token_logprobs"]
            return VLLMResponse(
                list(map(int, choice["token_ids"])),
                None if values is None else list(map(float, values)),
                choice["finish_reason"],
                None if mask is None else [list(map(int, kept)) for kept in mask],
            )

        return self.read(path, {"model": self.model, **request}, response)

    def read(self, path: str, body: Any, parse: Callable[[Any], Any]) -> Any:
        """Ask, and return what ``parse`` makes of the answer; an `InputError` where it cannot."""
        answer = self.ask(path, body)
        try:
            return parse(answer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.url}{path} gave another answer than vLLM does (choices with token_ids, log-probs and "
                f"finish_reason; a list of models): {json.dumps(answer):.300}"
            ) from error

    def ask(self, path: str, body: Any = None) -> Any:
        """Post JSON, or without a body get; return the JSON of the answer, None where it is empty."""
        url = f"{self.url}{path}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._open(Request(url, data, self._headers), timeout=self.timeout) as answer:
                text = answer.read().decode()
            return json.loads(text) if text else None
        except HTTPError as error:
            hint = (
                "; set VLLM_API_KEY to the key that the server was started with" if error.code == 401 else ""
            )
            if error.code in (404, 405):
                more = " --return-sampling-mask --enable-scale-out" if path == _GENERATE else ""
                hint = f"; is it vLLM, started as {_START}{more}?"
            message = error.read().decode(errors="replace")
            raise InputError(f"{url} answered {error.code} {error.reason}: {message:.300}{hint}") from error
        except TimeoutError as error:
            raise InputError(f"{url} did not answer within {self.timeout:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            hint = f"is the server running ({_START}), and engine.url its address?"
            raise InputError(f"{url} cannot be reached: {reason}; {hint}") from error
        except ValueError as error:
            raise InputError(f"{url} gave no JSON but {text:.300}; is it a vLLM server?") from error


class LocalVLLM:
    """vLLM's ``LLM`` in this process, on the GPU that trains; it has ``engine.memory`` of that."""

    in_process = True
    name = "vLLM in this process"

    def __init__(self, config: TrainConfig, model_path: str, accelerator: Any) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise InputError(f"engine.url local needs vLLM: pip install vllm ({error})") from error
        options: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True}
        if config.rollout.keep_sampling_mask:
            options["return_sampling_mask"] = True
        if accelerator.num_processes > 1:  # one in each process, which torchrun or accelerate has started
            options["distributed_executor_backend"] = "external_launcher"
        try:
            self.llm = vllm.LLM(
                model_path,
                dtype="bfloat16" if config.update.precision == "bf16" else "float32",
                gpu_memory_utilization=config.engine.memory,
                max_num_seqs=config.rollout.batch_size,
                seed=config.seed + accelerator.process_index,
                **options,
            )
        except Exception as error:
            raise InputError(f"engine.url local: vLLM cannot start with {model_path}: {error!r}") from error
        self.parameters = vllm.SamplingParams

    def complete(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], masks: bool
    ) -> list[VLLMResponse]:
        """Do what `VLLMServer.complete` does."""
        parameters = [self.parameters(detokenize=False, **own) for own in options]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        responses = []
        for request in self.llm.generate(inputs, parameters, use_tqdm=False):
            (output,) = request.outputs
            tokens, logprobs = list(output.token_ids), None
            if output.logprobs is not None:
                pairs = zip(output.logprobs, tokens, strict=True)
                logprobs = [values[token].logprob for values, token in pairs]
            mask = getattr(output, "sampling_mask", None)
            kept = None if mask is None else mask.token_ids
            responses.append(VLLMResponse(tokens, logprobs, output.finish_reason, kept))
        return responses

    def load(self, path: Path) -> None:
        """Do what `VLLMServer.load` does."""
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            self.llm.reset_prefix_cache()
        except Exception as error:
            raise InputError(f"{self.name} cannot load the weights in {path}: {error!r}") from error


class VLLMEngine:
    """Samples by vLLM, with every option stated that shapes the distribution.

    vLLM would take missing ones from the served model's generation config. A seed gives a completion random
    numbers of its own; vLLM's kernels round by the batch, so a token may still depend on other completions.

    Args:
        vllm: the server, or vLLM in this process.
        end_ids: tokens that end a completion, and no others do.
        vocabulary: how many tokens the trained model embeds.
    """

    def __init__(self, vllm: VLLMServer | LocalVLLM, end_ids: list[int], vocabulary: int) -> None:
        self.vllm, self.end_ids, self.vocabulary = vllm, end_ids, vocabulary
        self._probed = False

    def load(self, path: Path) -> None:
        """Take the weights of a directory that ``from_pretrained`` could load."""
        self.vllm.load(path)

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            InputError: vLLM cannot be reached, refuses, or its response does not fit the request.
        """
        if sampling.temperature == 0.0:  # cuts never remove the most likely token
            return self._sample(prompts, Sampling(sampling.max_new_tokens, temperature=0.0))
        # The model's own distribution is the same before and after all options.
        plain = sampling.temperature == 1.0 and not sampling.cuts
        if not (plain or self._probed):
            self._check_logprobs(prompts[0], sampling.max_new_tokens)
        return self._sample(prompts, sampling)

    def _sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        options: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self.end_ids,
            "ignore_eos": True,  # the served model's end token may be another one
        }
        each = [options] * len(prompts)
        if sampling.temperature > 0.0:
            seeds = torch.randint(2**63 - 1, (len(prompts),)).tolist()
            each = [options | {"seed": seed, "logprobs": 0} for seed in seeds]  # 0: only the sampled token's
        responses = self.vllm.complete(prompts, each, sampling.return_mask)
        return [self._completion(response, sampling) for response in responses]

    def _check_logprobs(self, prompt: list[int], longest: int) -> None:
        """Refuse log-probs that are taken before temperature, top-k and top-p.

        Among the one most likely token its probability is 1, or 1 / n where n are equally likely. Before
        top-k it is so only of a policy that is sure of every token, where the difference is nothing.
        """
        state = torch.get_rng_state()  # the rollout has the same seeds with and without this check
        (probe,) = self._sample([prompt], Sampling(min(longest, _PROBED), top_k=1))
        torch.set_rng_state(state)
        assert probe.logprobs is not None
        possible = torch.tensor([-math.log(n) for n in range(1, _TIED + 1)])
        if bool(((probe.logprobs.unsqueeze(1) - possible).abs().amin(1) > 1e-5).any()):
            raise InputError(
                f"{self.vllm.name} takes log-probs before temperature, top-k and top-p; start vLLM with "
                "--logprobs-mode processed_logprobs, or sample with temperature 1 and without top-k and top-p"
            )
        self._probed = True

    def _completion(self, response: VLLMResponse, sampling: Sampling) -> Completion:
        if fault := self._fault(response, sampling):
            raise InputError(f"{self.vllm.name} {fault}")
        tokens, logprobs, _, mask = response
        return Completion(
            torch.tensor(tokens),
            tokens[-1] in self.end_ids,
            None if sampling.temperature == 0.0 else torch.tensor(logprobs),
            mask=SamplingMask.of(mask or ()) if sampling.return_mask else None,
        )

    def _fault(self, response: VLLMResponse, sampling: Sampling) -> str | None:
        """Return why a response cannot be trained on, or None."""
        tokens, logprobs, reason, mask = response
        count, longest = len(tokens), sampling.max_new_tokens
        if not tokens or reason not in ("stop", "length"):
            return f"ended a completion after {count} tokens for the reason {reason!r}"
        if strange := [token for token in tokens if not 0 <= token < self.vocabulary]:
            known = f"the trained model embeds {self.vocabulary}: it serves another model"
            return f"sampled token {strange[0]}, and {known}"
        ends = [place for place, token in enumerate(tokens) if token in self.end_ids]
        if ends not in ([], [count - 1]) or (reason == "stop" and not ends):
            return f"ended a completion at token {tokens[-1]}, where {self.end_ids} were asked to end it"
        if count > longest:
            return f"sampled {count} tokens, where {longest} were asked for"
        if not ends and count < longest:
            room = "its --max-model-len must hold the longest prompt and rollout.max_new_tokens"
            return f"ended a completion after {count} of {longest} tokens; {room}"
        if sampling.temperature > 0.0:
            if logprobs is None or len(logprobs) != count:
                return f"returned {len(logprobs or ())} log-probs for {count} tokens"
            if not all(map(math.isfinite, logprobs)):
                return "returned log-probs that are not finite: the model's logits are not"
        if sampling.return_mask:
            if mask is None:
                flags = "--return-sampling-mask (0.28 or later), or set rollout.keep_sampling_mask to false"
                return f"returned no sampling mask; start vLLM with {flags}"
            if len(mask) != count or any(t not in kept for t, kept in zip(tokens, mask, strict=True)):
                return "returned a sampling mask without the tokens that it sampled"
        return None


def sync_weights(engine: VLLMEngine, write: Callable[[Path], None], folder: Path, accelerator: Any) -> None:
    """Write weights into a new hidden directory, let vLLM load them, and remove it; all processes must call.

    Each time the directory has a new name, so that a server that does not see it fails, and never loads what
    it has cached. One that a killed process left behind in a run's directory goes when the run is resumed or
    replaced. An `InputError` says why the weights cannot be written or loaded.
    """

    def new_directory() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=".unfinished-weights-", dir=folder.resolve()))
        path.chmod(0o755)  # the server may belong to another user
        return path

    path: Path | None = None
    try:
        path = on_main(accelerator, new_directory)
        assert path is not None
        written = path
        on_all(accelerator, lambda: write(written))
        # Every process has a local vLLM of its own, and one server is enough for all.
        load = on_all if engine.vllm.in_process else on_main
        load(accelerator, lambda: engine.load(written))
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"engine.weights: the weights for {engine.vllm.name} cannot be written to {folder}: {error}"
        ) from error
    finally:
        if path is not None and accelerator.is_main_process:
            shutil.rmtree(path, ignore_errors=True)
