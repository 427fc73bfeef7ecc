"""What a run needs of memory, before it runs: a table, and the sizes that ``auto`` stands for.

Forward and backward of the model run once on tensors without values, and the bytes that are alive are
counted. So every layer counts as it is, in the run's precision, with adapters and gradient checkpointing.
"""

from __future__ import annotations

import copy
import re
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
import transformers
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspo_kernels.models.rows import Segment, attention_mask, last_hidden_states
from gspo_kernels.ops.memory import ALL_ROWS_BYTES, chunk_rows, host_memory
from gspo_kernels.trainer.config import AUTO, InputError, TrainConfig, place_of, size
from gspo_kernels.trainer.data import Rows, prepare_prompts
from gspo_kernels.trainer.model import Policy, add_adapters, freeze, load_tokenizer
from gspo_kernels.trainer.processes import set_up
from gspo_kernels.trainer.rollout import new_cache
from gspo_kernels.trainer.update import needs_reference

RESERVE = 0.9
"""The share of the free memory that ``auto`` plans with; fragments and kernels' workspaces take the rest."""
UPDATE = "a smaller update.micro_batch_tokens, or update.gradient_checkpointing"
SAMPLING = "a smaller rollout.batch_size or rollout.max_new_tokens"


@contextmanager
def explained_memory(options: str) -> Iterator[None]:
    """Turn running out of memory in the body into one sentence with the options that help."""
    try:
        yield
    except RuntimeError as error:
        # The last words are those of transformers' cache.
        if not re.search("out of memory|can't allocate memory|Memory footprint", str(error)):
            raise
        resumed = "--resume goes on from the last checkpoint"
        raise InputError(f"out of memory; what helps: {options}; {resumed} ({error!s:.200})") from error


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all storages that operators made and that are still alive.

    Without ``copies``, those that autocast makes of known tensors do not count.
    """

    def __init__(self, known: Sequence[Tensor], copies: bool = True) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive = {tensor.untyped_storage()._cdata for tensor in known}
        self.uncounted = frozenset(() if copies else self.alive)  # copies of these

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        casts = function is torch.ops.aten._to_copy.default
        counts = not (casts and args[0].untyped_storage()._cdata in self.uncounted)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.alive:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes() * counts
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes() * counts)
        return out

    def _forget(self, key: int, count: int) -> None:
        self.alive.discard(key)
        self.now -= count


class Memory(NamedTuple):
    """Bytes that a run needs."""

    weights: int
    reference: int
    gradients: int
    optimizer: int
    # two numbers of tokens, and for each the most bytes in a micro-batch's loss, without logits, and later
    update: Sequence[tuple[int, int, int]]
    chunk: tuple[int, int]  # rows of logits that the loss has at once at most, and bytes of one
    completion: int  # the cache and the logits of one completion that the model samples; 0: vLLM samples
    rounded: int = 0  # copies of the weights in 16 bit, which sample or are sent

    @property
    def fixed(self) -> int:
        """Bytes that are there during every update."""
        return sum(self[:4])

    def of_tokens(self, tokens: int) -> float:
        """Return the bytes of a micro-batch: lines through the traced ones, and a chunk of logits."""
        few, many = self.update
        share, (rows, row_bytes) = (tokens - few[0]) / (many[0] - few[0]), self.chunk
        loss, later = (low + (high - low) * share for low, high in zip(few[1:], many[1:], strict=True))
        return max(loss + min(rows, tokens) * row_bytes, later)

    def fitting(self, available: float) -> dict[str, int]:
        """Return the most tokens of a micro-batch, and completions of a batch, that fit."""
        room, steps = RESERVE * available - self.fixed, range(256, AUTO["micro_batch_tokens"] + 1, 256)
        tokens = 256 * max(bisect_right(steps, room, key=self.of_tokens), 1)
        rows = AUTO["batch_size"]
        if self.completion:
            rows = min(max(int((room + self.gradients - self.rounded) / self.completion), 1), rows)
        return {"micro_batch_tokens": tokens, "batch_size": rows}

    def max_bytes(self, sizes: Mapping[str, int]) -> float:
        """Return the most bytes at once; while completions are sampled there are no gradients."""
        sampling = sizes["batch_size"] * self.completion + self.rounded - self.gradients
        return self.fixed + max(self.of_tokens(sizes["micro_batch_tokens"]), sampling)

    def table(self, sizes: Mapping[str, int], available: float, on_gpu: bool = False) -> str:
        """Return the table that is printed before a run, and what mends it if the run does not fit."""
        update = self.of_tokens(sizes["micro_batch_tokens"])
        sampling = float(sizes["batch_size"] * self.completion + self.rounded)
        parts: dict[str, float] = dict(zip(self._fields[:4], self[:4], strict=True))
        parts[f"update of {sizes['micro_batch_tokens']:,} tokens"] = update
        sampler = f"sampling of {sizes['batch_size']:,} completions"
        parts[sampler if self.completion else "weights on their way to vLLM"] = sampling
        parts |= {"most at once": self.max_bytes(sizes), "available": available}
        lines = [f"  {name:<32}{count / 2**30:9.2f}" for name, count in parts.items() if count]
        if parts["most at once"] > available:
            enough = self.fixed + self.of_tokens(256) <= available
            options = UPDATE if enough else "lora.rank above 0, or FSDP2 on several devices"
            options = options if update >= sampling - self.gradients else SAMPLING
            lines.append(f"  this will not fit; what helps: {options}")
        counted = "counted, not measured on a GPU yet" if on_gpu else "counted"
        return "\n".join([f"memory in GiB, {counted}:", *lines])


def memory_of(
    policy: Any, reference: Any, config: TrainConfig, longest: int, device: torch.device | None = None
) -> Memory:
    """Predict the memory of a run whose longest prompt has this many tokens; no weight is read or changed."""
    bf16, weights = config.update.precision == "bf16", list(policy.parameters())
    gradients = sum(p.nbytes for p in weights if p.requires_grad)
    frozen = [] if reference is None else list(reference.parameters())
    with FakeTensorMode(allow_non_fake_inputs=True):
        copies: dict[int, Any] = {}
        for tensor in [*weights, *policy.buffers()]:
            empty: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
                empty.grad = torch.empty_like(empty) if tensor.requires_grad else None
            copies[id(tensor)] = empty
        fake = copy.deepcopy(policy, copies)
        update = [(n, *_update_bytes(fake, n, bf16)) for n in (256, AUTO["micro_batch_tokens"])]
        new = config.rollout.max_new_tokens
        completion = 0 if config.engine.url else _completion_bytes(fake.model, longest, new, bf16)
    total, other = (sum(p.nbytes for p in each) for each in (weights, frozen))
    state = 2 * gradients
    if config.update.optimizer == "adamw_8bit":  # a byte for each number, a scale for each 256
        sizes = [p.numel() for p in weights if p.requires_grad]
        state = sum(2 * n + n // 32 if n >= 4096 and n % 256 == 0 else 8 * n for n in sizes)
    head = policy.model.get_output_embeddings().weight
    row_bytes, rounded, device = 4 * head.shape[0], gradients // 2 * bf16, device or torch.device("cpu")
    rows = chunk_rows(row_bytes, 0, device)
    if head.requires_grad and config.rollout.max_new_tokens > rows:  # the sums of one sequence that is longer
        update = [(n, loss + 4 * head.numel(), later) for n, loss, later in update]
    if head.requires_grad and bf16:  # a small micro-batch has a chunk of all its rows
        all_rows = max(2 * head.numel(), ALL_ROWS_BYTES) // row_bytes
        rows = chunk_rows(row_bytes, 0, device, all_rows, 2 * head.numel())
    logits = rows, row_bytes
    return Memory(total, other, gradients, state, update, logits, completion, rounded)


def _update_bytes(policy: Any, tokens: int, bf16: bool) -> tuple[int, int]:
    """Return the most bytes in the loss of a row of two sequences, without logits; before and after it."""
    device, weights = torch.device("cpu"), list(policy.parameters())
    known = [*weights, *policy.buffers(), *(p.grad for p in weights if p.grad is not None)]
    with LiveBytes(known) as live, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        positions = torch.arange(tokens, dtype=torch.int64, device=device).unsqueeze(0)
        inputs = {"input_ids": positions, "position_ids": positions}
        inputs["attention_mask"] = attention_mask(policy.model, [Segment(-1, tokens // 2)] * 2, device)
        with policy.checkpointed():
            hidden = last_hidden_states(policy.model, inputs)
        saved = live.now
        hidden.backward(torch.empty_like(hidden))
    head = policy.model.get_output_embeddings().weight
    sums = 4 * head.numel() if head.requires_grad else 0  # the head's gradient, which is added to .grad later
    late = sums if head is policy.model.get_input_embeddings().weight else 0  # as late as the embedding's
    return saved + sums + 2 * hidden.nbytes, live.peak + late


def _completion_bytes(model: Any, prompt: int, new: int, bf16: bool) -> int:
    """Return the most bytes of a completion: while its prompt goes through the model, or at its end, those of
    the cache, of a layer's copies while it grows, and of logits and draws.
    """
    tokens = torch.zeros(1, prompt, dtype=torch.int64, device="cpu")
    known, vocabulary = [*model.parameters(), *model.buffers()], model.get_output_embeddings().weight.shape[0]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    with LiveBytes(known, copies=False) as live, torch.no_grad(), autocast:
        cache, options = new_cache(model)
        model(input_ids=tokens, **options)
    states = [x.nbytes // prompt for layer in cache.layers for x in (layer.keys, layer.values)]
    at_the_end = (prompt + new) * (sum(states) + 2 * max(states)) + 24 * int(vocabulary)
    return max(live.peak, at_the_end)


def available_bytes(device: torch.device, loaded: int) -> float:
    """Return the memory that a run may take on a device, where ``loaded`` bytes are its weights already."""
    if device.type != "cuda":
        return float(min(psutil.virtual_memory().available, host_memory()) + loaded)
    free = torch.cuda.mem_get_info(device)[0]  # a local vLLM sleeps now, and in updates
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + cached + loaded)


def plan_memory(
    policy: Any, reference: Any, config: TrainConfig, accelerator: Any, longest: int, saved: Mapping[str, int]
) -> tuple[dict[str, int], str]:
    """Return the sizes of a run, with saved ones in place of ``auto`` first, and the table of its memory."""
    sections = {"micro_batch_tokens": config.update, "batch_size": config.rollout}
    sizes = {name: size(section, name) for name, section in sections.items()}
    auto = [name for name, section in sections.items() if getattr(section, name) == "auto"]
    device = accelerator.device
    try:
        memory = None if accelerator.is_fsdp2 else memory_of(policy, reference, config, longest, device)
        why = "shards of FSDP2 are not traced"
    except Exception as error:  # of the model's own code, on tensors without values
        memory, why = None, f"{error!r:.200}{place_of(error, memory_of)}"
    if memory is None:
        return sizes | {n: saved[n] for n in auto if n in saved}, f"memory is not predicted: {why}"
    meta = next(policy.parameters()).is_meta
    available = available_bytes(device, 0 if meta else memory.weights + memory.reference)
    fits = memory.fitting(available) | dict(saved)
    sizes |= {name: min(each[name] for each in gather_object([fits])) for name in auto}
    millions = sum(weight.numel() for weight in policy.parameters()) / 1e6
    what = f"{type(policy.model).__name__} with {millions:,.1f} million weights"
    return sizes, f"{what}: {memory.table(sizes, available, device.type == 'cuda')}"


def dry_run(config: TrainConfig, rows: Rows, held_out: Rows | None = None) -> str:
    """Return the table of a run on these rows; of the model, only its configuration is read."""
    accelerator, config = set_up(config)
    half = config.lora.rank > 0 and config.update.precision == "bf16"
    options = {"dtype": torch.bfloat16 if half else torch.float32, "attn_implementation": "sdpa"}
    with torch.device("meta"):
        sizes = transformers.AutoConfig.from_pretrained(config.model)
        model = transformers.AutoModelForCausalLM.from_config(sizes, **options)
        if config.lora.rank > 0:
            add_adapters(model, config.lora)
    checkpointing = config.update.gradient_checkpointing
    policy = Policy(model, temperature=config.rollout.temperature, checkpointing=checkpointing)
    reference = None
    if needs_reference(config) and config.lora.rank == 0:
        freeze(reference := copy.deepcopy(policy), accelerator)
    prepare = partial(prepare_prompts, load_tokenizer(config.model), longest=None, options=config.data)
    tokens = prepare(rows, "the training dataset").tokens
    if held_out is not None:
        held_out = list(islice(held_out, config.evaluation.prompts))
        tokens = [*tokens, *prepare(held_out, "the eval dataset").tokens]
    return plan_memory(policy, reference, config, accelerator, max(map(len, tokens)), {})[1]
