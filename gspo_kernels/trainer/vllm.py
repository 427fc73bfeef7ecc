"""Completions by vLLM, and the transfer of the policy's weights to it; see docs/rewards.md.

A server is used through its published HTTP interface. ``VLLM_SERVER_DEV_MODE=1`` enables the routes that load
weights.
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
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import torch

from gspo_kernels.logits.centering import ScoreCentering
from gspo_kernels.trainer.config import InputError, TrainConfig
from gspo_kernels.trainer.model import export_model, exported_weights
from gspo_kernels.trainer.processes import AutoSize, on_all, on_main, process_state
from gspo_kernels.trainer.rollout import Completion, Sampling

WAIT = 600.0  # seconds that a server may take to load its model and listen
TIMEOUT = 1800.0  # seconds for one answer or a reload
AT_ONCE = 256  # maximum number of concurrent requests
IMPOSSIBLE = -9999.0  # a server's log-prob of a token with probability 0
_START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"


class VLLMResponse(NamedTuple):
    """A completion as vLLM returns it: tokens, including the end token, and their log-probs in nats."""

    tokens: list[int]
    logprobs: list[float] | None
    reason: str | None  # why the completion ended: "stop" or "length"
    top: list[dict[int, float]] | None = None  # for each token, the most likely ids and their log-probs


def vllm_engine(
    config: TrainConfig, model: Any, source: Any, end_ids: list[int], longest: int, say: Any
) -> VLLMEngine:
    """Return the engine that ``engine.url`` selects, once it is ready; a local vLLM loads ``source``.

    ``longest`` is the maximum number of tokens of a prompt and its completion together.
    """
    url, ready = str(config.engine.url), list[Any]()
    local = url == "local"
    if local and not isinstance(source, str | Path):
        raise InputError("engine.url: a local vLLM loads the model from a directory or the Hub")

    def start() -> None:
        vllm: Any = LocalVLLM(config, source, longest) if local else VLLMServer(url, say=say)
        if longest > (vllm.max_model_len or longest):
            both = f"prompt and completion have up to {longest} tokens"
            raise InputError(f"{vllm.name} takes {vllm.max_model_len}, and {both}: --max-model-len")
        ready.append(vllm)  # an engine cannot be sent between processes, as a result of on_all is

    on_all(start)
    return VLLMEngine(ready[0], end_ids, model.get_input_embeddings().weight.shape[0])


class VLLMServer:
    """A vLLM server with one model; its key, if it needs one, is in the variable ``VLLM_API_KEY``."""

    def __init__(self, url: str, *, say: Callable[[str], object] = print) -> None:
        self.url = url.rstrip("/")
        self.name = f"the vLLM server at {self.url}"
        self._open = build_opener(ProxyHandler({})).open  # proxies are for outside addresses
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

        def read(answer: Any) -> dict[str, Any]:  # the parent of an adapter is its base model
            return {m["id"]: m.get("max_model_len") for m in answer["data"] if not m.get("parent")}

        served, waits, ends = None, False, time.monotonic() + WAIT
        while served is None:
            try:
                served = self.ask("/v1/models", read=read)
            except InputError as error:
                refused = isinstance(getattr(error.__cause__, "reason", None), ConnectionRefusedError)
                if not refused or time.monotonic() >= ends:
                    raise
                if not waits:
                    say(f"waiting up to {WAIT:g} seconds for {self.name}, which does not listen yet")
                waits = True
                time.sleep(1)
        if len(served) != 1:
            raise InputError(f"{self.name} serves {', '.join(served) or 'nothing'}; expected one model")
        ((self.model, self.max_model_len),) = served.items()

    def complete(self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]]) -> list[VLLMResponse]:
        """Complete each prompt with its options, which are fields of vLLM's ``SamplingParams``."""

        def work(i: int) -> tuple[int, VLLMResponse]:
            request = {"model": self.model, "prompt": prompts[i], "return_token_ids": True, **options[i]}
            if options[i].get("logprobs"):  # otherwise the most likely tokens are returned as texts
                request["return_tokens_as_token_ids"] = True
            return i, self.ask("/v1/completions", request, lambda answer: read(answer, options[i]))

        def read(answer: Any, options: dict[str, Any]) -> VLLMResponse:
            (choice,) = answer["choices"]
            values, top = choice.get("logprobs"), None
            if values is not None and options.get("logprobs"):
                places = values["top_logprobs"]  # each {"token_id:5": -0.1}
                top = [{int(key.rpartition(":")[2]): float(x) for key, x in p.items()} for p in places]
            logprobs = None if values is None else list(map(float, values["token_logprobs"]))
            return VLLMResponse(list(map(int, choice["token_ids"])), logprobs, choice["finish_reason"], top)

        # The first failed request raises here; requests in flight continue in daemon threads.
        with ThreadPool(min(AT_ONCE, len(prompts)) or 1) as pool:
            responses = dict(pool.imap_unordered(work, range(len(prompts))))
        return [responses[i] for i in range(len(prompts))]

    def load(self, path: Path) -> None:
        """Load weights from a directory in ``from_pretrained``'s format, and clear the prefix cache."""
        for file in (path, *path.rglob("*")) if path.is_dir() else ():  # another user may run the server
            file.chmod(0o755 if file.is_dir() else 0o644)
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        self.ask("/reset_prefix_cache", {})

    def ask(self, path: str, body: Any = None, read: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """POST a JSON body, or GET without a body; return ``read`` of the answer's JSON."""
        url, text = f"{self.url}{path}", ""
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._open(Request(url, data, self._headers), timeout=TIMEOUT) as answer:
                text = answer.read().decode()
            return read(json.loads(text) if text else None)
        except HTTPError as error:
            hints = {401: "; set VLLM_API_KEY to the key that the server was started with"}
            hints |= dict.fromkeys((404, 405), f"; is it vLLM, started as {_START}?")
            hint = hints.get(error.code, "")
            message = error.read().decode(errors="replace")
            raise InputError(f"{url} answered {error.code} {error.reason}: {message:.300}{hint}") from error
        except TimeoutError as error:
            raise InputError(f"{url} did not answer within {TIMEOUT:g} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error) or type(error).__name__
            hint = f"is the server running ({_START}), and engine.url its address?"
            raise InputError(f"{url} cannot be reached: {reason}; {hint}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{url} gave another answer than vLLM does: {text:.300}") from error


class LocalVLLM:
    """vLLM's ``LLM`` in this process, on the training GPU, with a share ``engine.memory`` of its memory.

    It sleeps except while it samples: its weights are then on the CPU, and its cache is freed.
    """

    name = "vLLM in this process"

    def __init__(self, config: TrainConfig, model_path: str, longest: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            self.vllm = importlib.import_module("vllm")
            self.llm = self.vllm.LLM(
                model_path,
                dtype="bfloat16" if config.update.precision == "bf16" else "float32",
                gpu_memory_utilization=config.engine.memory,
                max_model_len=longest,
                max_num_seqs=AutoSize.of(config, "rollout.batch_size").value,
                enable_sleep_mode=True,
                seed=config.seed + process_state().process_index,
                logprobs_mode="processed_logprobs",
                max_logprobs=max(20, config.objective.centering),
                skip_tokenizer_init=True,
                # one vLLM per process; torchrun or accelerate started the processes
                distributed_executor_backend="external_launcher"
                if process_state().num_processes > 1
                else None,
            )
        except Exception as error:
            raise InputError(f"engine.url local: vLLM cannot start with {model_path}: {error!r}") from error
        self.max_model_len = longest
        self._sleep()

    def _sleep(self) -> None:
        self.llm.sleep(level=1)
        self.asleep = {"weights", "kv_cache"}

    def _wake(self, tags: set[str]) -> None:
        if tags := tags & self.asleep:  # vLLM would allocate a part that is awake a second time
            self.llm.wake_up(tags=sorted(tags))
            self.asleep -= tags

    def complete(self, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]]) -> list[VLLMResponse]:
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
            responses.append(VLLMResponse(tokens, logprobs, output.finish_reason, top))
        return responses

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights with their names in a checkpoint, and clear the prefix cache."""
        self._wake({"weights"})
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()


class VLLMEngine:
    """An engine that samples with vLLM and sets every option that shapes the distribution.

    vLLM takes missing options from the served model's generation config. Only ``end_ids`` and the maximum
    length end a completion. ``vocabulary`` is the number of tokens that the trained model embeds.
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
            "ignore_eos": True,  # the served model's own end token
        }
        each = [options] * len(prompts)
        if sampling.temperature > 0.0:
            seeds = torch.randint(2**63 - 1, (len(prompts),), device="cpu").tolist()
            # logprobs=k: the k most likely tokens and the sampled one
            each = [options | {"seed": seed, "logprobs": sampling.top_logprobs} for seed in seeds]
        responses = self.vllm.complete(prompts, each)
        return [self._completion(response, sampling) for response in responses]

    def _completion(self, response: VLLMResponse, sampling: Sampling) -> Completion:
        tokens, logprobs, reason, top = response
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
        centering = None
        if sampling.top_logprobs and not fault:
            known = [token for each in top or () for token in each]
            if len(top or ()) != count or not all(0 <= token < self.vocabulary for token in known):
                fault = f"returned log-probs of {len(top or ())} places, or of unknown tokens, for {count}"
            else:
                rows = []
                for values in top or ():  # vLLM adds the sampled token to the most likely ones
                    drawable = [(token, x) for token, x in values.items() if x > IMPOSSIBLE]
                    row = sorted(drawable, key=lambda each: -each[1])[: sampling.top_logprobs]
                    rows.append(row + [(-1, 0.0)] * (sampling.top_logprobs - len(row)))
                table = torch.tensor(rows, dtype=torch.float64, device="cpu")
                centering = ScoreCentering(table[..., 0].int(), table[..., 1].float())
        if fault:
            raise InputError(f"{self.vllm.name} {fault}")
        return Completion(
            torch.tensor(tokens, dtype=torch.int64, device="cpu"),
            ended[-1],
            None if logprobs is None else torch.tensor(logprobs, dtype=torch.float32, device="cpu"),
            centering=centering,
        )


def sync_weights(engine: VLLMEngine, model: Any, tokenizer: Any, config: TrainConfig) -> None:
    """Give vLLM the model's weights; all processes must call.

    A vLLM in the process takes the tensors. A server reads a hidden directory with a new name each time: a
    server that cannot see it fails, and no cache returns old weights.
    """
    vllm, path, prefix = engine.vllm, Path(), ".unfinished-weights-"
    dtype = torch.bfloat16 if config.update.precision == "bf16" else torch.float32
    folder = Path(config.engine.weights or config.output)

    try:
        if isinstance(vllm, LocalVLLM):
            on_all(lambda: vllm.load(exported_weights(model, dtype)))
        else:
            on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
            path = Path(on_main(lambda: tempfile.mkdtemp(prefix=prefix, dir=folder.resolve())))
            on_all(lambda: export_model(model, tokenizer, path, dtype=dtype))
            on_main(lambda: vllm.load(path))
    except Exception as error:
        must = f"must see them there, be able to reload ({_START}), and have their shapes and vocabulary"
        raise InputError(f"engine.weights: {vllm.name} {must}; they are in {folder}: {error}") from error
    finally:
        if process_state().is_main_process and path.name:
            shutil.rmtree(path, ignore_errors=True)
