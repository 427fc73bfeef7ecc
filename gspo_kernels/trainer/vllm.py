"""Completions by vLLM, and the transfer of the policy's weights to vLLM.

A server is used through its published HTTP interface. Start it with ``VLLM_SERVER_DEV_MODE=1``, which opens
``/collective_rpc`` and ``/reset_prefix_cache``, and with ``--logprobs-mode processed_logprobs`` if the
temperature is not 1 or tokens are cut off. If vLLM is installed, ``engine.url: local`` runs it in each
training process. Weights are transferred through a directory; a server must see it under the same path.
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

from gspo_kernels.trainer.config import InputError, TrainConfig, size
from gspo_kernels.trainer.processes import on_all, on_main
from gspo_kernels.trainer.rollout import Completion, Sampling, SamplingMask

_START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"


class VLLMResponse(NamedTuple):
    """One completion as vLLM returns it: tokens, including the end token, and their log-probs in nats."""

    tokens: list[int]
    logprobs: list[float] | None
    reason: str | None  # why the completion ended: "stop" or "length"
    mask: list[list[int]] | None = None  # for each token, the ids that could have been drawn


def vllm_engine(
    config: TrainConfig, *, end_ids: list[int], vocabulary: int, model_path: str, accelerator: Any
) -> VLLMEngine:
    """Return the engine that ``engine.url`` names, once it is ready; a local vLLM loads ``model_path``."""
    engines: list[VLLMEngine] = []

    def start() -> None:
        url = config.engine.url
        local = url is None or url == "local"
        vllm = LocalVLLM(config, model_path, accelerator) if local else VLLMServer(str(url))
        engines.append(VLLMEngine(vllm, end_ids, vocabulary))

    on_all(accelerator, start)
    return engines[0]


class VLLMServer:
    """A vLLM server with one model; if it asks for a key, the variable ``VLLM_API_KEY`` must have it.

    ``timeout`` is in seconds, for one answer or a reload; at most ``at_once`` requests wait at the same time.
    """

    def __init__(self, url: str, *, timeout: float = 1800.0, at_once: int = 256) -> None:
        self.url, self.timeout, self.at_once = url.rstrip("/"), timeout, at_once
        self.name = f"the vLLM server at {self.url}"
        self._open = build_opener(ProxyHandler({})).open  # without the proxy, which is for outside addresses
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"
        listed = self.ask("/v1/models")
        try:  # adapters are listed as well, with the model that they change as their parent
            served = [each["id"] for each in listed["data"] if not each.get("parent")]
        except (KeyError, TypeError, AttributeError) as error:
            raise self._strange(listed) from error
        if len(served) != 1:
            raise InputError(f"{self.name} serves {', '.join(served) or 'nothing'}; expected one model")
        self.model = served[0]

    def complete(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], masks: bool
    ) -> list[VLLMResponse]:
        """Complete each prompt under its options, which are fields of vLLM's ``SamplingParams``."""

        def work(i: int) -> tuple[int, VLLMResponse]:
            return i, self._complete(prompts[i], options[i], masks)

        # The first request that fails ends all: requests under way are left behind in daemon threads.
        with ThreadPool(min(self.at_once, len(prompts)) or 1) as pool:
            responses = dict(pool.imap_unordered(work, range(len(prompts))))
        return [responses[i] for i in range(len(prompts))]

    def _complete(self, prompt: list[int], options: dict[str, Any], masks: bool) -> VLLMResponse:
        if masks:
            request = {"model": self.model, "token_ids": prompt, "sampling_params": options}
            answer = self.ask("/inference/v1/generate", request)
        else:
            request = {"model": self.model, "prompt": prompt, "return_token_ids": True, **options}
            answer = self.ask("/v1/completions", request)
        try:
            (choice,) = answer["choices"]
            values = choice.get("logprobs")
            if values is not None:
                values = [x["logprob"] for x in values["content"]] if masks else values["token_logprobs"]
                values = list(map(float, values))
            tokens = list(map(int, choice["token_ids"]))
            return VLLMResponse(tokens, values, choice["finish_reason"], choice.get("sampling_mask"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._strange(answer) from error

    def load(self, path: Path) -> None:
        """Load weights from a directory that ``from_pretrained`` could load; clear the prefix cache."""
        try:
            self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        except InputError as error:
            raise InputError(
                f"{error}. The weights are in {path}: the server must see them there, be able to reload "
                f"({_START}), and serve a model of the same architecture and vocabulary"
            ) from error
        self.ask("/reset_prefix_cache", {})

    def ask(self, path: str, body: Any = None) -> Any:
        """Send JSON by POST, or without a body a GET; return the answer's JSON, or None if it is empty."""
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
                more = " --return-sampling-mask --enable-scale-out" if "generate" in path else ""
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

    def _strange(self, answer: Any) -> InputError:
        return InputError(f"{self.name} gave another answer than vLLM does: {json.dumps(answer):.300}")


class LocalVLLM:
    """vLLM's ``LLM`` in this process, on the training GPU, with a share ``engine.memory`` of its memory."""

    name = "vLLM in this process"

    def __init__(self, config: TrainConfig, model_path: str, accelerator: Any) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        options: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True}
        if config.rollout.keep_sampling_mask:
            options["return_sampling_mask"] = True
        if accelerator.num_processes > 1:  # a vLLM in each process, which torchrun or accelerate has started
            options["distributed_executor_backend"] = "external_launcher"
        try:
            self.vllm = importlib.import_module("vllm")
            self.llm = self.vllm.LLM(
                model_path,
                dtype="bfloat16" if config.update.precision == "bf16" else "float32",
                gpu_memory_utilization=config.engine.memory,
                max_num_seqs=size(config.rollout, "batch_size"),
                seed=config.seed + accelerator.process_index,
                **options,
            )
        except Exception as error:
            raise InputError(f"engine.url local: vLLM cannot start with {model_path}: {error!r}") from error

    def complete(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], masks: bool
    ) -> list[VLLMResponse]:
        """See `VLLMServer.complete`."""
        parameters = [self.vllm.SamplingParams(detokenize=False, **each) for each in options]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        responses = []
        for request in self.llm.generate(inputs, parameters, use_tqdm=False):
            (output,) = request.outputs
            tokens, logprobs = list(output.token_ids), None
            if output.logprobs is not None:
                pairs = zip(output.logprobs, tokens, strict=True)
                logprobs = [values[token].logprob for values, token in pairs]
            mask = output.sampling_mask.token_ids if masks else None
            responses.append(VLLMResponse(tokens, logprobs, output.finish_reason, mask))
        return responses

    def load(self, path: Path) -> None:
        """See `VLLMServer.load`."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        self.llm.reset_prefix_cache()


class VLLMEngine:
    """An engine that samples with vLLM and states every option that shapes the distribution.

    vLLM would take missing options from the served model's generation config. Only ``end_ids`` and the
    maximum length end a completion. ``vocabulary`` is the number of tokens that the trained model embeds.
    """

    def __init__(self, vllm: VLLMServer | LocalVLLM, end_ids: list[int], vocabulary: int) -> None:
        self.vllm, self.end_ids, self.vocabulary = vllm, end_ids, vocabulary

    def load(self, path: Path) -> None:
        """Load weights from a directory that ``from_pretrained`` could load."""
        self.vllm.load(path)

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """See `RolloutEngine.generate`; an `InputError` names a response that does not fit the request."""
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
            seeds = torch.randint(2**63 - 1, (len(prompts),), device="cpu").tolist()
            each = [options | {"seed": seed, "logprobs": 0} for seed in seeds]  # 0: only the sampled token's
        responses = self.vllm.complete(prompts, each, sampling.return_mask)
        return [self._completion(response, sampling) for response in responses]

    def _completion(self, response: VLLMResponse, sampling: Sampling) -> Completion:
        tokens, logprobs, reason, mask = response
        count, ended = len(tokens), [token in self.end_ids for token in tokens]
        fault = None
        if not all(0 <= token < self.vocabulary for token in tokens):
            fault = f"sampled token {max(tokens)}, and the trained model embeds {self.vocabulary}"
        elif not tokens or any(ended[:-1]) or not (ended[-1] or count == sampling.max_new_tokens):
            fault = (
                f"ended a completion after {count} tokens for the reason {reason!r}, where {self.end_ids} or "
                f"{sampling.max_new_tokens} tokens end it; --max-model-len must hold prompt and completion"
            )
        elif sampling.temperature == 0.0:
            logprobs = None
        elif logprobs is None or len(logprobs) != count or not all(map(math.isfinite, logprobs)):
            fault = f"returned {logprobs} as log-probs of {count} tokens"
        kept = [token in ids for token, ids in zip(tokens, mask or (), strict=False)]
        if sampling.return_mask and kept != [True] * count:
            flags = "--return-sampling-mask (0.28 or later), or set rollout.keep_sampling_mask to false"
            fault = f"returned no sampling mask with the tokens that it sampled; start vLLM with {flags}"
        if fault:
            raise InputError(f"{self.vllm.name} {fault}")
        return Completion(
            torch.tensor(tokens, dtype=torch.int64, device="cpu"),
            ended[-1],
            None if logprobs is None else torch.tensor(logprobs, dtype=torch.float32, device="cpu"),
            mask=SamplingMask.of(mask or ()) if sampling.return_mask else None,
        )


def sync_weights(engine: VLLMEngine, write: Callable[[Path], None], folder: Path, accelerator: Any) -> None:
    """Write weights into a hidden directory, let vLLM load them, and delete it; all processes must call.

    The directory's name is new each time, so that a server that cannot see the directory fails, and none
    loads old weights from a cache.
    """

    def new_directory() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=".unfinished-weights-", dir=folder.resolve()))
        path.chmod(0o755)  # the server may belong to another user
        return path

    path: Any = None
    try:
        path = on_main(accelerator, new_directory)
        on_all(accelerator, lambda: write(path))
        on_main(accelerator, lambda: [p.chmod(0o755 if p.is_dir() else 0o644) for p in path.rglob("*")])
        # Every process has its own local vLLM; a server is loaded once for all.
        load = on_all if isinstance(engine.vllm, LocalVLLM) else on_main
        load(accelerator, lambda: engine.load(path))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"engine.weights: weights for {engine.vllm.name} in {folder}: {error}") from error
    finally:
        if accelerator.is_main_process and path is not None:
            shutil.rmtree(path, ignore_errors=True)
