"""Build calls to compare with the oracle, and run them through an entry point."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.core.types import stats_dtype
from tests import oracle
from tests.draws import shifted_seed

LAYOUTS = ("padded", "packed")
AGGREGATIONS = ("sequence_mean", "token_mean", "prompt_mean", "sequence_mean_token_sum", "constant", "sum")
KIND = {
    "policy_loss": "logprobs",
    "token_logprobs": "logits",
    "fused_policy_loss": "logits",
    "linear_token_logprobs": "linear",
    "fused_linear_policy_loss": "linear",
}
"""What each entry takes; all but the first compute log-probs themselves."""

HEAD = ("weight", "bias", "A", "B")
"""Inputs that all tokens share."""
ADAPTER_SCALE = 0.5

# Sequences of several tokens, of one and of none. They meet every clip branch of GSPO, both signs of the
# advantage, and zero.
LENGTHS = (3, 0, 1, 4, 2, 1)
LOG_S = (5e-3, 0.0, -2e-4, -5e-3, 0.4, 1e-4)
ADVANTAGES = (1.0, -0.4, -0.7, -1.3, -0.5, 0.0)

TEMPERATURES = torch.tensor([0.5, 1.0, 2.0, 1.3, 0.8, 1.1])
LOGIT_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "temperature": {"temperature": 0.7},
    "temperature per sequence": {"temperature": TEMPERATURES},
    "softcap": {"softcap": 3.0},
    "logit_scale": {"logit_scale": -0.4},
    "together": {"logit_scale": 1.7, "softcap": 4.0, "temperature": TEMPERATURES},
    "kept": {"kept_mask": 9},
    "kept and the rest": {"logit_scale": -0.6, "softcap": 4.0, "temperature": TEMPERATURES, "kept_mask": 30},
}
"""Options of logits by name; ``kept_mask`` is the number of ids to draw for it."""


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of one call. ``inputs`` receive gradients, ``terms`` and ``logit_options`` are keywords."""

    kind: str
    labels: Tensor
    inputs: dict[str, Tensor]
    old_logprobs: Tensor | None
    advantages: Tensor | None
    cu_seqlens: Tensor | None = None
    loss_mask: Tensor | None = None
    terms: dict[str, Any] = field(default_factory=dict)
    logit_options: dict[str, Any] = field(default_factory=dict)
    logits_dtype: str = "float32"
    ignore_index: int = -100
    frozen: tuple[str, ...] = ()
    """Inputs that need no gradient."""
    needs_entropy: bool = False
    """Whether the objective reads the entropy."""

    def each(self, change: Callable[[str, Tensor], Tensor]) -> Case:
        """Return the case with ``change(name, tensor)`` in place of every tensor."""

        def changed(name: str, value: Any) -> Any:
            if isinstance(value, dict):
                return {key: changed(key, one) for key, one in value.items()}
            return change(name, value) if isinstance(value, Tensor) else value

        return replace(
            self, **{each.name: changed(each.name, getattr(self, each.name)) for each in fields(self)}
        )

    @property
    def counted(self) -> Tensor:
        return oracle.counted_tokens(self.labels, self.loss_mask, self.ignore_index)

    @property
    def wants_entropy(self) -> bool:
        coefficient = self.terms.get("entropy_coef", 0.0)
        return self.needs_entropy or isinstance(coefficient, Tensor) or coefficient != 0.0


@dataclass(frozen=True)
class Result:
    loss: Tensor
    logprobs: Tensor
    grads: dict[str, Tensor]
    entropy: Tensor | None = None
    sensitivity: dict[str, float] = field(default_factory=dict)
    """Sums of abs(dLoss/dlogprob) and abs(dLoss/dentropy): how far the tokens' errors can move the loss."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    """Inputs without a gradient."""

    def values(self) -> dict[str, Tensor]:
        grads = {f"grad {name}": value for name, value in self.grads.items()}
        named = {"loss": self.loss, "logprobs": self.logprobs} | grads
        return named if self.entropy is None else named | {"entropy": self.entropy}


def offsets(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(shifted_seed(seed))


def scores_of(inputs: dict[str, Tensor], rounded: bool = False) -> Tensor:
    """Return the logits among the inputs, or the product of hidden states and head."""
    if "logits" in inputs:
        return inputs["logits"]
    hidden, weight, bias = inputs["hidden"], inputs["weight"], inputs.get("bias")
    if "A" in inputs:
        weight = weight + ADAPTER_SCALE * inputs["B"] @ inputs["A"]
    out = hidden @ weight.T
    out = out if bias is None else out + bias
    return out.to(stats_dtype(out.dtype)) if rounded else out


@functools.cache
def make_case(
    kind: str = "logits",
    layout: str = "packed",
    terms: str = "plain",
    *,
    lengths: tuple[int, ...] = LENGTHS,
    log_s: tuple[float, ...] | None = None,
    advantages: tuple[float, ...] | None = None,
    vocabulary: int = 61,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 2,
    seed: int = 0,
    noise: float = 0.3,
    logit_options: str = "default",
    logits_dtype: str = "float32",
    bias: bool = True,
    adapter: int = 0,
    label_dtype: torch.dtype = torch.int64,
    masked: bool = True,
) -> Case:
    """Build a case whose sequences have the given log s, up to rounding.

    Old log-probs are the true ones minus log s and minus a noise whose mean over counted tokens is 0.

    ``adapter`` is the rank of a LoRA on a frozen head. The packed and the padded case of one seed hold the
    same sequences. Cases are shared between tests.
    """
    rng = generator(seed)
    batch, tokens = len(lengths), sum(lengths)
    cycle = range(batch)
    log_s = tuple(LOG_S[i % len(LOG_S)] for i in cycle) if log_s is None else log_s
    values = tuple(ADVANTAGES[i % len(ADVANTAGES)] for i in cycle) if advantages is None else advantages

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    labels = torch.randint(0, vocabulary, (tokens,), generator=rng)
    inputs: dict[str, Tensor] = {}
    if kind == "linear":
        inputs["hidden"], inputs["weight"] = (normal(rows, width).to(dtype) for rows in (tokens, vocabulary))
        if bias:
            inputs["bias"] = normal(vocabulary).to(dtype)
        if adapter:
            inputs["A"], inputs["B"] = (
                0.3 * normal(*size) for size in ((adapter, width), (vocabulary, adapter))
            )
            inputs = {name: value.to(dtype) for name, value in inputs.items()}
    elif kind == "logits":
        inputs["logits"] = (2.0 * normal(tokens, vocabulary)).to(dtype)
    else:
        inputs["logprobs"] = (-normal(tokens).abs()).to(dtype)

    options = dict(LOGIT_OPTIONS[logit_options])
    if "kept_mask" in options:
        ids = draw_kept(labels, vocabulary, options["kept_mask"], rng)
        options["kept_mask"] = gk.kept_mask(ids, vocabulary)
    cu_seqlens = offsets(lengths)
    everything = torch.ones(tokens, dtype=torch.bool)
    if kind == "logprobs":
        truth = inputs["logprobs"].double()
    else:
        scores = scores_of({name: value.double() for name, value in inputs.items()})
        truth, _ = oracle.token_logprobs(scores, labels, everything, cu_seqlens=cu_seqlens, **options)

    named = _terms(terms, rng, lengths, tokens)
    loss_mask = named.pop("loss_mask", None)
    old = truth.clone()
    for sequence in oracle.sequences(everything if loss_mask is None else loss_mask, cu_seqlens):
        where = sequence.where
        wiggle = noise * normal(sequence.counted.numel())
        if sequence.count:
            wiggle = wiggle - wiggle[sequence.counted].mean() + log_s[sequence.index]
        old[where] -= wiggle
    reference = truth + 0.2 * normal(tokens)
    if "ref_logprobs" in named:
        named["ref_logprobs"] = reference.float()
    if kind == "logprobs" and "entropy_coef" in named:
        inputs["entropy"] = normal(tokens).abs().to(dtype)

    advantage = torch.tensor(values, dtype=torch.float64).float()
    if named.pop("token_advantages", False):
        # both signs, and a zero, within a sequence
        advantage = normal(tokens).float()
        advantage[1 % max(tokens, 1) : 2] = 0.0
    case = Case(
        kind=kind,
        labels=labels.to(label_dtype),
        inputs=inputs,
        old_logprobs=None if named.pop("on_policy", False) else old.to(stats_dtype(dtype)),
        advantages=advantage,
        cu_seqlens=cu_seqlens,
        loss_mask=loss_mask,
        terms=named,
        logit_options=options,
        logits_dtype=logits_dtype,
        frozen=("weight",) if adapter else (),
    )
    return case if layout == "packed" else pad(case, padding, masked=masked)


def draw_kept(labels: Tensor, vocabulary: int, count: int, rng: torch.Generator) -> Tensor:
    """Draw a set of ids for each label, with the label in it. Ids may repeat; about a fifth are -100."""
    ids = torch.randint(0, vocabulary, (*labels.shape, count), generator=rng)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=rng) < 0.2, -100)
    ids[..., int(torch.randint(0, count, (), generator=rng))] = labels
    return ids


TERMS = {
    "plain": (),
    "on_policy": ("on_policy", "loss_mask"),
    "weighted": ("loss_mask", "lengths", "rollout_sequence", "normalizer"),
    "all": ("loss_mask", "lengths", "rollout_token", "token_weights", "k2", "entropy", "normalizer_tensor"),
    "holes": ("loss_mask",),
    "kl_tensor": ("k3", "beta_tensor", "loss_mask"),
    "kl_ratio_weighted": ("k3", "ratio_weighted", "loss_mask"),
    "entropy_tensor": ("entropy_tensor", "loss_mask"),
    "rollout_token": ("rollout_token", "loss_mask"),
    "on_policy_terms": ("on_policy", "k3", "entropy", "rollout_token"),
}
"""Groups of terms by name. A case has some of these groups or single parts of them, joined by +."""


def _terms(name: str, rng: torch.Generator, lengths: tuple[int, ...], tokens: int) -> dict[str, Any]:
    def uniform(*shape: int) -> Tensor:
        return 0.5 + torch.rand(*shape, generator=rng, dtype=torch.float64).float()

    def holes() -> Tensor:
        """Mask a token in the middle of the first sequence, and all of the last sequence."""
        mask = torch.ones(tokens, dtype=torch.bool)
        mask[1 : min(2, lengths[0])] = False
        mask[tokens - lengths[-1] :] = False
        return mask

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "loss_mask": lambda: {"loss_mask": holes()},
        **{
            k: lambda k=k: {"ref_logprobs": None, "kl_beta": 0.1, "kl_estimator": k}
            for k in ("k1", "k2", "k3")
        },
        "beta_tensor": lambda: {"kl_beta": uniform(tokens)},
        "ratio_weighted": lambda: {"kl_ratio_weighted": True},
        "entropy": lambda: {"entropy_coef": 0.05},
        "entropy_tensor": lambda: {"entropy_coef": 0.1 * uniform(tokens)},
        "rollout_sequence": lambda: {"rollout_weights": uniform(len(lengths))},
        "rollout_token": lambda: {"rollout_weights": uniform(tokens)},
        "token_weights": lambda: {"token_weights": uniform(tokens)},
        "lengths": lambda: {"lengths": torch.tensor(lengths) + 1.5},
        "normalizer": lambda: {"normalizer": 7.5},
        "normalizer_tensor": lambda: {"normalizer": torch.tensor(5.0)},
        "on_policy": lambda: {"on_policy": True},
        "token_advantages": lambda: {"token_advantages": True},
        "groups": lambda: {"group_ids": torch.tensor((5, 2, 5, 2, 2, 5))[: len(lengths)]},
    }
    named: dict[str, Any] = {}
    for part in (part for each in name.split("+") for part in TERMS.get(each, (each,))):
        named |= parts[part]()
    return named


@functools.cache
def for_objective(case: Case, objective: gk.objectives.base.Objective) -> Case:
    """Return the case. For ``Linear``, token weights take the place of advantages; "prompt_mean" has groups,
    or a normalizer of each sequence.
    """
    if objective.aggregation == "prompt_mean":
        sequences = len(case.labels) if case.cu_seqlens is None else len(case.cu_seqlens) - 1
        ids = torch.tensor((5, 2, 5, 2, 2, 5) * sequences)[:sequences]
        terms = {"group_ids": ids, **case.terms}
        if "normalizer" in terms:
            terms |= {"normalizer": terms.pop("group_ids") + 1.5}
        case = replace(case, terms=terms)
    if type(objective).__name__ != "Linear":
        return case
    weights = torch.linspace(-1.5, 1.0, case.labels.numel()).reshape(case.labels.shape)
    terms = {"token_weights": weights, **case.terms}
    return replace(case, advantages=None, terms=terms)


def pad(case: Case, padding: int, *, masked: bool = True) -> Case:
    """Return a packed case as [B, T], ``padding`` columns wider than its longest sequence.

    Padding is masked by ``loss_mask``, or by ``ignore_index`` labels with ``masked=False``.
    """
    ends = case.cu_seqlens.tolist()
    longest = max((b - a for a, b in itertools.pairwise(ends)), default=0)
    shape = (len(ends) - 1, longest + padding)

    def spread(name: str, tokens: Tensor, value: float = 0.0) -> Tensor:
        if name in HEAD or tokens.shape[:1] != case.labels.shape:
            return tokens
        value = 1 if name == "kept_mask" else value  # keeps id 0, the label of padding
        out = torch.full((*shape, *tokens.shape[1:]), value, dtype=tokens.dtype)
        for i, (a, b) in enumerate(itertools.pairwise(ends)):
            out[i, : b - a] = tokens[a:b]
        return out

    padded = case.each(spread)
    if not masked:
        padded = replace(padded, labels=spread("labels", case.labels, case.ignore_index))
    mask = spread("loss_mask", case.counted) if masked or case.loss_mask is not None else None
    return replace(padded, cu_seqlens=None, loss_mask=mask)


def strided(value: Tensor, kind: str) -> Tensor:
    """Copy the values into another order of memory ("reversed axes"), between other values ("gaps"), or to an
    address that is not a multiple of 16 ("off by three"). Any other ``kind`` returns them unchanged.
    """
    if kind == "reversed axes":
        axes = tuple(reversed(range(value.ndim)))
        return value.permute(axes).contiguous().permute(axes)
    if kind == "gaps":
        other = torch.full_like(value, math.nan if value.is_floating_point() else 1)
        return torch.stack([value, other], -1)[..., 0]
    if kind == "off by three":
        return value.new_empty(value.numel() + 3)[3:].view(value.shape).copy_(value)
    return value


def poisoned(case: Case) -> Case:
    """Put NaN and infinities at tokens that don't count, and in [B] terms of sequences where none counts."""
    tokens = case.counted
    counts = [sequence.count for sequence in oracle.sequences(tokens, case.cu_seqlens)]
    some = torch.tensor(counts, dtype=torch.int64) > 0
    kinds = torch.tensor([math.nan, math.inf, -math.inf])

    def spoil(name: str, value: Tensor) -> Tensor:
        # in an expanded tensor a token's numbers are those of other tokens, too
        shared = name in (*HEAD, "temperature", "loss_mask") or 0 in value.stride()
        if shared or not value.is_floating_point():
            return value
        if value.shape[: tokens.ndim] == tokens.shape:
            kept = tokens.reshape(tokens.shape + (1,) * (value.ndim - tokens.ndim))
        elif value.shape == some.shape:
            kept = some
        else:
            return value
        turns = kinds[torch.arange(value.numel()) % 3].to(value.dtype)
        return torch.where(kept, value, turns.view(value.shape))

    return case.each(spoil)


def device_of(backend: str) -> torch.device:
    """Return a backend's device: for Triton a GPU if there is one, otherwise the CPU (its interpreter)."""
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


def forward(
    case: Case, entry: str, objective: Any, backend: str = "auto", strides: str = "contiguous", **options: Any
) -> tuple[dict[str, Tensor], gk.LossOutput]:
    """Return leaves and output on the backend's device. For schedule "frozen" the head needs no gradient."""
    here = case.each(lambda _, value: strided(value, strides).to(device_of(backend)))
    frozen = HEAD if options.get("schedule") == "frozen" else case.frozen
    leaves = {name: value.detach().requires_grad_(name not in frozen) for name, value in here.inputs.items()}
    return leaves, call(here, leaves, entry, objective, backend, **options)


def run(
    case: Case,
    entry: str,
    objective: Any,
    backend: str = "auto",
    *,
    factor: float = 1.0,
    strides: str = "contiguous",
    **options: Any,
) -> Result:
    """Run forward and backward of a case through one entry point, with the loss times ``factor``.

    Values that don't count are NaN or infinite; no result may show it. ``strides`` holds for every tensor.
    """
    leaves, output = forward(poisoned(case), entry, objective, backend, strides, **options)
    (output.loss * factor).backward()
    logprobs, entropy = output.logprobs.cpu(), None if output.entropy is None else output.entropy.cpu()
    if entry == "policy_loss":  # log-probs and entropy come back as they were passed
        logprobs = torch.where(case.counted, logprobs, case.inputs["logprobs"])
        entropy = None if entropy is None else torch.where(case.counted, entropy, case.inputs["entropy"])
    elif entry in ("token_logprobs", "linear_token_logprobs"):
        # only the loss knows loss_mask here, so masked tokens still have log-probs
        logprobs = torch.where(case.counted, logprobs, 0.0)
        entropy = None if entropy is None else torch.where(case.counted, entropy, 0.0)
    frozen = tuple(name for name, leaf in leaves.items() if not leaf.requires_grad)
    assert all(leaves[name].grad is None for name in frozen)
    grads = {name: leaf.grad.cpu() / factor for name, leaf in leaves.items() if name not in frozen}
    loss = output.loss.detach().cpu()
    return Result(loss, logprobs, grads, entropy, metrics=output.metrics, frozen=frozen)


def over_ranks(options: dict[str, Any]) -> dict[str, Any]:
    """Return a call's options, with fields of ``gk.Parallel`` moved into ``parallel``."""
    fields = {name: options[name] for name in gk.Parallel.__dataclass_fields__ if name in options}
    others = {name: value for name, value in options.items() if name not in fields}
    return others | ({"parallel": gk.Parallel(**fields)} if fields else {})


def call(
    case: Case, leaves: dict[str, Tensor], entry: str, objective: Any, backend: str = "auto", **options: Any
) -> gk.LossOutput:
    """Run the forward of a case through one entry point, with ``leaves`` as its inputs."""
    options = over_ranks(options)
    labels, old, advantages = case.labels, case.old_logprobs, case.advantages
    shared = {"loss_mask": case.loss_mask, "cu_seqlens": case.cu_seqlens} | case.terms
    shared["objective"] = objective
    logit_options = case.logit_options | {"ignore_index": case.ignore_index}
    linear = {"bias": leaves.get("bias"), "logits_dtype": case.logits_dtype}
    head = leaves.get("weight")
    if "A" in leaves:
        head = gk.LoRAHead(head, leaves["A"], leaves["B"], ADAPTER_SCALE)
    if entry == "policy_loss":
        return gk.policy_loss(
            leaves["logprobs"], old, advantages, entropy=leaves.get("entropy"), **shared, **options
        )
    if entry == "fused_policy_loss":
        return gk.fused_policy_loss(
            leaves["logits"], labels, old, advantages, **shared, **logit_options, backend=backend, **options
        )
    if entry == "fused_linear_policy_loss":
        return gk.fused_linear_policy_loss(
            leaves["hidden"], head, labels, old, advantages,
            **linear, **shared, **logit_options, backend=backend, **options,
        )  # fmt: skip
    if isinstance(temperature := logit_options.get("temperature"), Tensor) and case.cu_seqlens is not None:
        counts = case.cu_seqlens.diff().long().to(temperature.device)
        logit_options["temperature"] = temperature.repeat_interleave(counts)
    logit_options |= {"return_entropy": case.wants_entropy, "backend": backend}
    if entry == "token_logprobs":
        tokens = gk.token_logprobs(leaves["logits"], labels, **logit_options, **options)
    else:
        tokens = gk.linear_token_logprobs(
            leaves["hidden"], head, labels, **linear, **logit_options, **options
        )
    return gk.policy_loss(tokens.logprobs, old, advantages, entropy=tokens.entropy, **shared)
