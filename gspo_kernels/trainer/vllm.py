"""Completions by vLLM, and the transfer of the policy's weights to it; docs/rewards.md says how to start it.

A server is used through its published HTTP interface. ``VLLM_SERVER_DEV_MODE=1`` opens what loads weights.
"""

from __future__ import annotations

import http.client
import importlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import torch

from gspo_kernels.logits.centering import ScoreCentering
from gspo_kernels.off_policy import SamplingMask
from gspo_kernels.trainer.config import InputError, TrainConfig
from gspo_kernels.trainer.model import export_model, exported_weights
from gspo_kernels.trainer.processes import on_all, on_main
from gspo_kernels.trainer.rollout import Completion, Sampling
from gspo_kernels.trainer.sizes import Size

WAIT = 600.0  # seconds that a server may take until it listens; it loads its model first
IMPOSSIBLE = -9999.0  # what a server writes for a log-prob of -inf
_START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"


class VLLMResponse(NamedTuple):
    """One completion as vLLM returns it: tokens, including the end token, and their log-probs in nats."""

    tokens: list[int]
    logprobs: list[float] | None
    reason: str | None  # why the completion ended: "stop" or "length"
    mask: list[list[int]] | None = None  # for each token, the ids that could have been drawn
    top: list[dict[int, float]] | None = None  # for each token, the likeliest ids and their log-probs


Say = Callable[[str], None]


def vllm_engine(
    config: TrainConfig, model: Any, source: Any, end_ids: list[int], longest: int, accelerator: Any, say: Say
) -> VLLMEngine:
    """Return the engine that ``engine.url`` names, once it is ready; a local vLLM loads ``source``.

    Prompt and completion of the trained ``model`` have at most ``longest`` tokens together.
    """
    url, ready = str(config.engine.url), list[Any]()
    local = url == "local"
    if local and not isinstance(source, str | Path):
        raise InputError("engine.url: a local vLLM loads the model from a directory or the Hub")

    def start() -> None:
        vllm: Any = LocalVLLM(config, source, longest, accelerator) if local else VLLMServer(url, say=say)
        if longest > (vllm.max_model_len or longest):
            both = f"prompt and completion have up to {longest} tokens"
            raise InputError(f"{vllm.name} takes {vllm.max_model_len}, and {both}: --max-model-len")
        ready.append(vllm)

    on_all(accelerator, start)
    return VLLMEngine(ready[0], end_ids, model.get_input_embeddings().weight.shape[0])


class VLLMServer:
    """A vLLM server with one model; if it asks for a key, the variable ``VLLM_API_KEY`` must have it.

    ``timeout`` is in seconds, for one answer or a reload; at most ``at_once`` requests wait at the same time.
    """

    def __init__(self, url: str, *, timeout: float = 1800.0, at_once: int = 256, say: Say = print) -> None:
        self.url, self.timeout, self.at_once = url.rstrip("/"), timeout, at_once
        self.name = f"the vLLM server at {self.url}"
        self._open = build_opener(ProxyHandler({})).open  # without the proxy, which is for outside addresses
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

        def read(answer: Any) -> dict[str, Any]:  # adapters have the model that they change as their parent
            return {m["id"]: m.get("max_model_len") for m in answer["data"] if not m.get("parent")}

        served, waited = None, 0
        while served is None:
            try:
                served = self.ask("/v1/models", read=read)
            except InputError as error:
                refused = isinstance(getattr(error.__cause__, "reason", None), ConnectionRefusedError)
                if not refused or waited >= WAIT:
                    raise
                if not waited:
                    say(f"waiting up to {WAIT:g} seconds for {self.name}, which does not listen yet")
                time.sleep(1)
                waited += 1
        if len(served) != 1:
            raise InputError(f"{self.name} serves {', '.join(served) or 'nothing'}; expected one model")
        ((self.model, self.max_model_len),) = served.items()
        self.transfer: Any = None  # vLLM's engine that sends weights, from the first time on

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
        def read(answer: Any) -> VLLMResponse:
            (choice,) = answer["choices"]
            values, top = choice.get("logprobs"), None
            if values is not None and options.get("logprobs"):
                places = values["top_logprobs"]  # each {"token_id:5": -0.1}
                top = [{int(key.rpartition(":")[2]): float(x) for key, x in p.items()} for p in places]
            if values is not None:
                values = [x["logprob"] for x in values["content"]] if masks else values["token_logprobs"]
                values = list(map(float, values))
            tokens = list(map(int, choice["token_ids"]))
            return VLLMResponse(tokens, values, choice["finish_reason"], choice.get("sampling_mask"), top)

        if masks:
            request = {"model": self.model, "token_ids": prompt, "sampling_params": options}
            return self.ask("/inference/v1/generate", request, read)
        request = {"model": self.model, "prompt": prompt, "return_token_ids": True, **options}
        if options.get("logprobs"):  # otherwise the likeliest tokens would be texts
            request["return_tokens_as_token_ids"] = True
        return self.ask("/v1/completions", request, read)

    def load(self, path: Path) -> None:
        """Load weights from a directory that ``from_pretrained`` could load; clear the prefix cache."""
        for file in (path, *path.rglob("*")) if path.is_dir() else ():  # the server may be another user's
            file.chmod(0o755 if file.is_dir() else 0o644)
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        self.ask("/reset_prefix_cache", {})

    def send(self, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], accelerator: Any) -> None:
        """Send weights by vLLM's own client over NCCL, in all processes; clear the prefix cache."""
        if self.transfer is None:
            api = importlib.import_module("vllm.distributed.weight_transfer")
            nccl = importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
            network = importlib.import_module("vllm.utils.network_utils")
            init = {"master_address": network.get_ip(), "master_port": network.get_open_port()}
            workers = self.ask("/get_world_size")["world_size"]
            self.transfer = api.WeightTransferTrainerFactory.trainer_init(
                init_info=nccl.NCCLTrainerInitInfo(
                    **init, world_size=1 + workers, rank=accelerator.process_index
                ),
                client=api.HTTPVLLMWeightSyncClient(self.url, timeout=self.timeout),
                source=api.ModuleSource(SimpleNamespace(named_parameters=weights)),
            )
        self.transfer.send_weights()
        if accelerator.is_main_process:
            self.ask("/reset_prefix_cache", {})

    def ask(self, path: str, body: Any = None, read: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """Send JSON by POST, or without a body a GET; return what ``read`` takes from the answer's JSON."""
        url, text = f"{self.url}{path}", ""
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._open(Request(url, data, self._headers), timeout=self.timeout) as answer:
                text = answer.read().decode()
            return read(json.loads(text) if text else None)
        except HTTPError as error:
            flags = " --return-sampling-mask --enable-scale-out" if "generate" in path else ""
            hints = {401: "; set VLLM_API_KEY to the key that the server was started with"}
            hints |= dict.fromkeys((404, 405), f"; is it vLLM, started as {_START}{flags}?")
            hint = hints.get(error.code, "")
            message = error.read().decode(errors="replace")
            raise InputError(f"{url} answered {error.code} {error.reason}: {message:.300}{hint}") from error
        except TimeoutError as error:
            raise InputError(f"{url} did not answer within {self.timeout:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            hint = f"is the server running ({_START}), and engine.url its address?"
            raise InputError(f"{url} cannot be reached: {reason}; {hint}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{url} gave another answer than vLLM does: {text:.300}") from error


class LocalVLLM:
    """vLLM's ``LLM`` in this process, on the training GPU, with a share ``engine.memory`` of its memory.

    It sleeps except while it samples: its weights are on the CPU then, and its cache is gone.
    """

    name = "vLLM in this process"

    def __init__(self, config: TrainConfig, model_path: str, longest: int, accelerator: Any) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            self.vllm = importlib.import_module("vllm")
            self.llm = self.vllm.LLM(
                model_path,
                dtype="bfloat16" if config.update.precision == "bf16" else "float32",
                gpu_memory_utilization=config.engine.memory,
                max_model_len=longest,
                max_num_seqs=Size.of(config, "rollout.batch_size", accelerator).value,
                enable_sleep_mode=True,
                seed=config.seed + accelerator.process_index,
                logprobs_mode="processed_logprobs",
                max_logprobs=max(20, config.objective.centering),
                skip_tokenizer_init=True,
                return_sampling_mask=config.rollout.keep_sampling_mask,
                # a vLLM in each process, which torchrun or accelerate has started
                distributed_executor_backend="external_launcher" if accelerator.num_processes > 1 else None,
            )
        except Exception as error:
            raise InputError(f"engine.url local: vLLM cannot start with {model_path}: {error!r}") from error
        self.max_model_len = longest
        self._sleep()

    def _sleep(self) -> None:
        self.llm.sleep(level=1)
        self.asleep = {"weights", "kv_cache"}

    def _wake(self, tags: set[str]) -> None:
        if tags := tags & self.asleep:  # vLLM would wake a part twice
            self.llm.wake_up(tags=sorted(tags))
            self.asleep -= tags

    def complete(
        self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]], masks: bool
    ) -> list[VLLMResponse]:
        """See `VLLMServer.complete`."""
        parameters = [self.vllm.SamplingParams(detokenize=False, **each) for each in options]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        responses = []
        self._wake({"weights", "kv_cache"})
        try:
            requests = list(self.llm.generate(inputs, parameters, use_tqdm=False))
        finally:
            self._sleep()
        for request in requests:
            (output,) = request.outputs
            tokens, logprobs, top = list(output.token_ids), None, None
            if output.logprobs is not None:
                top = [{token: x.logprob for token, x in each.items()} for each in output.logprobs]
                logprobs = [values[token] for values, token in zip(top, tokens, strict=True)]
            mask = output.sampling_mask.token_ids if masks else None
            responses.append(VLLMResponse(tokens, logprobs, output.finish_reason, mask, top))
        return responses

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights by their names in a checkpoint, and clear the prefix cache."""
        self._wake({"weights"})
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()


class VLLMEngine:
    """An engine that samples with vLLM and states every option that shapes the distribution.

    vLLM would take missing options from the served model's generation config. Only ``end_ids`` and the
    maximum length end a completion. ``vocabulary`` is the number of tokens that the trained model embeds.
    """

    def __init__(self, vllm: VLLMServer | LocalVLLM, end_ids: list[int], vocabulary: int) -> None:
        self.vllm, self.end_ids, self.vocabulary = vllm, end_ids, vocabulary

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """See `RolloutEngine.generate`; an `InputError` names a response that does not fit the request."""
        options: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")},
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self.end_ids,
            "ignore_eos": True,  # the served model's end token may be another one
        }
        each = [options] * len(prompts)
        if sampling.temperature > 0.0:
            seeds = torch.randint(2**63 - 1, (len(prompts),), device="cpu").tolist()
            # so many of the likeliest tokens, and the sampled one
            each = [options | {"seed": seed, "logprobs": sampling.top_logprobs} for seed in seeds]
        responses = self.vllm.complete(prompts, each, sampling.return_mask)
        return [self._completion(response, sampling) for response in responses]

    def _completion(self, response: VLLMResponse, sampling: Sampling) -> Completion:
        tokens, logprobs, reason, mask, top = response
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
        inside = [token in ids for token, ids in zip(tokens, mask or (), strict=False)]
        if sampling.return_mask and inside != [True] * count:
            flags = "--return-sampling-mask (0.28 or later), or set rollout.keep_sampling_mask to false"
            fault = f"returned no sampling mask with the tokens that it sampled; start vLLM with {flags}"
        centering = None
        if sampling.top_logprobs and not fault:
            known = [token for each in top or () for token in each]
            if len(top or ()) != count or not all(0 <= token < self.vocabulary for token in known):
                fault = f"returned log-probs of {len(top or ())} places, or of unknown tokens, for {count}"
            else:
                centering = _likeliest(top or (), sampling.top_logprobs)
        if fault:
            raise InputError(f"{self.vllm.name} {fault}")
        return Completion(
            torch.tensor(tokens, dtype=torch.int64, device="cpu"),
            ended[-1],
            None if logprobs is None else torch.tensor(logprobs, dtype=torch.float32, device="cpu"),
            mask=SamplingMask.of(mask or ()) if sampling.return_mask else None,
            centering=centering,
        )


def _likeliest(places: Sequence[dict[int, float]], count: int) -> ScoreCentering:
    """Return the ``count`` likeliest ids of each place, to which vLLM adds the sampled one."""
    rows = []
    for values in places:
        drawable = [(token, x) for token, x in values.items() if x > IMPOSSIBLE]
        row = sorted(drawable, key=lambda each: -each[1])[:count]
        rows.append(row + [(-1, 0.0)] * (count - len(row)))
    table = torch.tensor(rows, dtype=torch.float64, device="cpu")
    return ScoreCentering(table[..., 0].int(), table[..., 1].float())


def sync_weights(
    engine: VLLMEngine, model: Any, tokenizer: Any, config: TrainConfig, accelerator: Any
) -> None:
    """Give vLLM the model's weights; all processes must call.

    A vLLM in the process takes the tensors. A server gets them from vLLM's own client if ``engine.weights``
    is nccl. Else it reads a hidden directory, whose name is new each time, so that a server that cannot see
    it fails, and none loads old weights from a cache.
    """
    vllm, target, path = engine.vllm, config.engine.weights, Path()
    dtype = torch.bfloat16 if config.update.precision == "bf16" else torch.float32
    folder = Path(target or config.output)

    def new_directory() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".unfinished-weights-", dir=folder.resolve()))

    try:
        if isinstance(vllm, LocalVLLM):
            on_all(accelerator, lambda: vllm.load(exported_weights(model, dtype)))
        elif target == "nccl":
            on_all(accelerator, lambda: vllm.send(partial(exported_weights, model, dtype), accelerator))
        else:
            path = on_main(accelerator, new_directory) or path
            options = {"accelerator": accelerator, "dtype": dtype}
            on_all(accelerator, lambda: export_model(model, tokenizer, path, **options))
            on_main(accelerator, lambda: vllm.load(path))
    except Exception as error:
        must = f"must see them there, be able to reload ({_START}), and have their shapes and vocabulary"
        raise InputError(f"engine.weights: {vllm.name} {must}; they are in {folder}: {error}") from error
    finally:
        if accelerator.is_main_process and path.name:
            shutil.rmtree(path, ignore_errors=True)
