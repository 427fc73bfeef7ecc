"""Base class of objectives, which are pure functions of per-token log-probs with declared properties.

An objective maps a ``PolicyBatch`` to an ``ObjectiveLoss``, one value per token or sequence before
aggregation. KL, entropy bonus, aggregation, normalizer, metrics, gradients and schedules are shared by all
objectives.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from gspo_kernels.core import checks
from gspo_kernels.core.layout import Layout, runs
from gspo_kernels.core.torch_internals import constant_when_traced, plain_constant
from gspo_kernels.core.types import RatioClip, RatioWeight
from gspo_kernels.objectives import finite

Scope = Literal["nothing", "token", "turn", "sequence", "group", "batch"]
AGGREGATIONS = ("sequence_mean", "token_mean", "prompt_mean", "sequence_mean_token_sum", "constant", "sum")


@dataclass(frozen=True)
class PolicyBatch:
    """The inputs of an objective, in fp64. "Tokens" are padded [B, T] or packed [1, N], 0 where masked.

    Attributes:
        layout: sums over sequences and expansion to tokens, the only ways to combine tokens of different
            positions, as a sequence may be distributed over ranks.
        mask: bool, tokens that count.
        lengths: [B], |y_i|: counted tokens, or the caller's ``lengths``; at least 1.
        logprobs: tokens, with gradient.
        old_logprobs: tokens; on-policy the detached ``logprobs``.
        log_ratio: tokens, ``token_weights * (logprobs - old_logprobs)``.
        advantages: [B] or tokens; None only for objectives with ``needs_advantages = False``.
        rollout_weights: [B] or tokens, or None for 1.
        token_weights: tokens, or None for 1.
        ref_logprobs: tokens or None.
        entropy: tokens or None; detached.
        group_ids: [B] integers or None.
        turn_ids: tokens, integers, -1 = none; or None.
    """

    layout: Layout
    mask: Tensor
    lengths: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor | None = None
    rollout_weights: Tensor | None = None
    token_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    group_ids: Tensor | None = None
    turn_ids: Tensor | None = None

    def per_token(self, values: Tensor) -> Tensor:
        """Expand [B] to tokens; return values per token unchanged."""
        return self.layout.expand(values) if values.ndim == 1 else values

    def per_sequence(self, values: Tensor) -> Tensor:
        """Return each sequence's mean over its counted tokens, [B]; return values [B] unchanged."""
        if values.ndim == 1:
            return values
        counts = self.layout.sum(self.mask.to(values.dtype)).clamp(min=1.0)
        return self.layout.sum(torch.where(self.mask, values, 0.0)) / counts

    def range_of(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return minimum and maximum over each sequence's counted tokens, [B]; inf and -inf if empty."""
        sequences = self.sequence_ids().flatten()

        def largest(candidates: Tensor) -> Tensor:
            kept = torch.where(self.mask, candidates, -math.inf).flatten()
            initial = values.new_full((self.layout.sequences,), -math.inf)
            return self.layout.largest(initial.scatter_reduce(0, sequences, kept, "amax"))

        return -largest(-values), largest(values)

    def sequence_ids(self) -> Tensor:
        """Return the index of each token's sequence."""
        return self.layout.expand(torch.arange(self.layout.sequences, device=self.mask.device))

    def sequence_log_ratio(self) -> Tensor:
        """Return log s_i, [B]: the sum of log-ratios over the length (GSPO's Eq. 7)."""
        return self.layout.sum(self.log_ratio) / self.lengths

    def turn_log_ratio(self) -> Tensor:
        """Return the mean log-ratio of each token's turn, per token, 0 outside turns; detached."""
        assert self.turn_ids is not None
        sequences = self.sequence_ids().flatten()
        inside = self.mask & (self.turn_ids >= 0)
        order = self.turn_ids.flatten().argsort(stable=True)
        order = order[sequences[order].argsort(stable=True)]
        turns = runs(sequences[order], self.turn_ids.flatten()[order])

        def total(values: Tensor) -> Tensor:
            return turns.sum(torch.where(inside, values, 0.0).flatten()[order].unsqueeze(0))

        log_ratio = self.log_ratio.detach()
        means = turns.expand(total(log_ratio) / total(torch.ones_like(log_ratio)).clamp(min=1.0))
        result = torch.empty_like(means.squeeze(0)).scatter(0, order, means.squeeze(0))
        return torch.where(inside, result.view_as(log_ratio), 0.0)

    def log_ratio_of(self, level: str) -> Tensor:
        """Return per token the log-ratio of the "token", or of its "turn" or "sequence".

        Values of turns and sequences have the gradient of the token's log-ratio, as in GSPO-token's
        ``sg[s_i] pi_t / sg[pi_t]``.
        """
        if level == "token":
            return self.log_ratio
        turn = level == "turn"
        mean = self.turn_log_ratio() if turn else self.per_token(self.sequence_log_ratio().detach())
        return mean + finite.zero_with_gradient(self.log_ratio)

    def token_advantages(self) -> Tensor:
        """Return the advantages per token."""
        assert self.advantages is not None
        return self.per_token(self.advantages)

    def weighted(self, loss: Tensor) -> Tensor:
        """Multiply ``loss`` (tokens or [B]) by the rollout weights at its level."""
        if self.rollout_weights is None:
            return loss
        level = self.per_sequence if loss.ndim == 1 else self.per_token
        return finite.mul(loss, level(self.rollout_weights))


class ObjectiveLoss(NamedTuple):
    """An objective's value before aggregation. Each field is tokens or [B]; for ``loss`` see ``level``.

    Attributes:
        loss: differentiable with respect to ``PolicyBatch.logprobs``.
        log_ratio: the log importance ratio, differentiable.
        clipped_low: bool, where the lower bound is active, or None without one.
        clipped_high: bool, where the upper bound is active, or None without one.
    """

    loss: Tensor
    log_ratio: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None


_CLASSES: weakref.WeakValueDictionary[str, type[Objective]] = weakref.WeakValueDictionary()
_NAMES: weakref.WeakKeyDictionary[type[Objective], str] = weakref.WeakKeyDictionary()
"""Classes by unique name, and the reverse. Names are not reused, even after a class is deleted."""
_DEFINITIONS: Counter[str] = Counter()
"""Number of definitions of each qualified name."""
_SPECS: dict[str, str] = {}
"""Specs by class name and ``repr`` of the attributes, which distinguishes 1 from True and 0.0 from -0.0."""
_MAX_SPECS = 1024
_OPTION_TYPES = frozenset((float, int, str, bool, type(None)))
_DECLARATIONS = (
    "coefficient_scope", "needs_token_order", "zero_advantage_is_inactive", "ratio_only", "factorizes",
    "ratio_form", "ratio_weight",
)  # fmt: skip
"""Declarations that a class with a new ``evaluate`` does not inherit."""


class _Frozen:
    """Reject setting attributes, also for subclasses that are not dataclasses."""

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(
            f"{name}: can't be set on {type(self).__name__}; write `{name}: <type> = <default>` in the class "
            "under @dataclass(frozen=True), instead of __init__ or an assignment"
        )


@dataclass(frozen=True, kw_only=True)
class Objective(_Frozen, ABC):
    """Base class of objectives, with common options and the declarations that schedules and losses read.

    Subclasses are frozen dataclasses whose fields are numbers, strings, bools or None; NumPy scalars are
    converted. Operators reconstruct an objective from its class and fields, so it must not have other state.
    Clip bounds are the first fields and may be positional, in the order of ``clip(r, 1 - low, 1 + high)``;
    all others are keyword-only. A class declares the properties of its default options; instances with
    different options may change them with ``_declare``.

    Schedules rely on the declarations. By default a coefficient may depend on the whole batch, and no work is
    skipped. ``check`` tests the declarations on random batches.

    Args:
        aggregation: reduction of values to one loss, where |y_i| is the number of counted tokens or
            ``lengths[i]``. "sequence_mean": mean over a sequence's tokens, then over sequences. "token_mean":
            sum over tokens (a sequence-level value counts |y_i| times) over the number of tokens.
            "prompt_mean": that of each group of ``group_ids``, then the mean over groups.
            "sequence_mean_token_sum": the same sum over the number of sequences. "constant": the same sum
            over sequences * ``aggregation_constant``. "sum": the same sum undivided.
        aggregation_constant: for "constant" only; the maximum completion length in Dr. GRPO.

    Raises:
        TypeError, ValueError: an option of the wrong type or value, named in the message.
    """

    aggregation: str = "sequence_mean"
    aggregation_constant: float | None = None

    coefficient_scope: ClassVar[Scope] = "batch"
    """The scope of dLoss/dlogprob of one token, besides masks, lengths, weights and advantages."""

    level: ClassVar[Literal["token", "sequence"]] = "token"
    """Whether ``evaluate`` returns values per "token" or per "sequence", [B]."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Optional arguments of the losses that this objective requires."""

    needs_advantages: ClassVar[bool] = True
    """Whether the objective requires advantages; if False, it rejects them."""

    advantages_are: ClassVar[Literal["advantages", "rewards", "levels"]] = "advantages"
    """The meaning of ``advantages``: advantages within groups, raw rewards, or levels (1 is the best)."""

    takes_token_advantages: ClassVar[bool] = True
    """Whether advantages may be per token instead of [B]. Defaults to False if ``level`` is "sequence"."""

    needs_token_order: ClassVar[bool] = True
    """Whether the objective depends on the order of tokens, which is unknown with a ``cp_group``."""

    zero_advantage_is_inactive: ClassVar[bool] = False
    """Whether a zero advantage means a zero gradient for any log-probs."""

    ratio_only: ClassVar[bool] = False
    """Whether the gradient depends on log-probs only through their difference from ``old_logprobs``."""

    factorizes: ClassVar[bool] = False
    """Whether with one advantage per sequence dLoss/dlogprob_t is ``c_i * token_weights_t``, with one number
    c_i per sequence. (Rollout weights must be one per sequence, too, unless ``level`` is "sequence".)"""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # declarations hold for the ``evaluate`` of their class, not for an override
        evaluates = next(i for i, each in enumerate(cls.__mro__) if "evaluate" in vars(each))
        for name in _DECLARATIONS:
            if not any(name in vars(each) for each in cls.__mro__[: evaluates + 1]):
                setattr(cls, name, vars(Objective)[name])
        if "level" in vars(cls) and "takes_token_advantages" not in vars(cls):
            cls.takes_token_advantages = cls.level == "token"
        # a unique name in specs, even if the class is redefined
        name = f"{cls.__module__}:{cls.__qualname__}"
        _DEFINITIONS[name] += 1
        if _DEFINITIONS[name] > 1:
            name = f"{name}#{_DEFINITIONS[name]}"
        _NAMES[cls], _CLASSES[name] = name, cls

    def __post_init__(self) -> None:
        if not is_compiling():
            if "__dataclass_fields__" not in type(self).__dict__:
                refuse_ignored_options(type(self))
            if not _OPTION_TYPES.issuperset(map(type, self.__dict__.values())):
                self.__dict__.update(_plain(self.__dict__))
        checks.choice("aggregation", self.aggregation, AGGREGATIONS)
        constant = self.aggregation_constant
        if self.aggregation == "constant":
            if constant is None:
                raise ValueError(
                    'aggregation_constant: aggregation="constant" needs a positive number, got None'
                )
            checks.number("aggregation_constant", constant, positive=True)
        elif constant is not None:
            raise ValueError(
                f"aggregation_constant: got {constant}, expected None with aggregation={self.aggregation!r} "
                'instead of "constant"'
            )

    def _declare(self, **declarations: Any) -> None:
        """Set declarations of this instance, from ``__post_init__``."""
        for name, value in declarations.items():
            object.__setattr__(self, name, value)

    @abstractmethod
    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        """Return the loss before aggregation; it must be differentiable in ``batch.logprobs``."""

    def ratio_form(self) -> RatioClip | None:
        """Return the parameters under which a fused clipped ratio equals this objective, or None."""
        return None

    def ratio_weight(self) -> RatioWeight | tuple[RatioWeight, RatioWeight] | None:
        """Return f if a token's gradient is ``-A f(r)`` with the token's ratio r, or a pair of f for A >= 0
        and A < 0, or None if there is no such f. Used by ``ScoreCentering``.
        """
        return None

    def outer_divisor(self) -> tuple[str, float]:
        """Return the unit of the outer divisor ("sequences", "tokens", "prompts", "pairs" or "one") and its
        factor.
        """
        counted = {"token_mean": "tokens", "prompt_mean": "prompts", "sum": "one"}
        counts = counted.get(self.aggregation, "sequences")
        return counts, 1.0 if self.aggregation_constant is None else float(self.aggregation_constant)

    def count_pairs(self, advantages: Tensor, group_ids: Tensor, nonempty: Tensor) -> Tensor:
        """Return the number of pairs in a call, 0-d fp64, from inputs [B]."""
        raise NotImplementedError(f"{type(self).__name__} has no pairs")

    @property
    def spec(self) -> str:
        """The objective as a string, for opaque operators."""
        if is_compiling():
            cls = type(self)
            names = _option_names(cls)
            return _traced_spec(cls, names, tuple([plain_constant(getattr(self, name)) for name in names]))
        return self.__dict__.get("_spec") or _spec(self)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle all attributes except cached ones, as specs differ between processes."""
        cls = type(self)
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "_spec" and not isinstance(getattr(cls, name, None), functools.cached_property)
        }


@constant_when_traced
def _option_names(cls: type[Objective]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


@constant_when_traced
def _traced_spec(cls: type[Objective], names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    return _spec(_made(cls, dict(zip(names, values, strict=True))))


def _spec(objective: Objective) -> str:
    name = _NAMES[type(objective)]
    exact = f"{name} {objective.__dict__!r}"  # takes half the time of JSON
    spec = _SPECS.get(exact)
    if spec is None:
        spec = json.dumps([name, _plain(Objective.__getstate__(objective))])
        from_spec(spec)
        if len(_SPECS) >= _MAX_SPECS:
            _SPECS.clear()
        _SPECS[exact] = spec
    objective.__dict__["_spec"] = spec
    return spec


@functools.lru_cache(maxsize=1024)
def from_spec(spec: str) -> Objective:
    """Return the objective with this ``Objective.spec``.

    Raises:
        TypeError: the objective has state besides its class and options.
    """
    name, state = json.loads(spec)
    cls = _CLASSES.get(name)
    if cls is None:
        raise RuntimeError(f"objective: {name} is not defined in this process; import its module")
    objective = _made(cls, {option: state[option] for option in _option_names(cls) if option in state})
    again = json.loads(json.dumps(Objective.__getstate__(objective)))
    for attribute in state | again:
        got, made = (repr(each.get(attribute, "not set")) for each in (state, again))
        if got != made:
            raise _lost_state(cls, f"{attribute} is {got}, and {made} with the same options")
    return objective


def _made(cls: type[Objective], options: dict[str, Any]) -> Objective:
    refuse_ignored_options(cls)
    try:
        return cls(**options)
    except TypeError as error:
        raise _lost_state(cls, str(error)) from None


def _lost_state(cls: type[Objective], what: str) -> TypeError:
    return TypeError(
        f"objective: {cls.__name__} can't be reconstructed from its options ({what}), as operators require; "
        "write options as fields, such as `scale: float = 1.0`, under @dataclass(frozen=True), without "
        "__init__ or attributes that don't follow from options"
    )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Convert NumPy numbers to Python's; reject attributes that a spec can't represent exactly."""
    plain = {name: x.item() if isinstance(x, np.generic) else x for name, x in state.items()}
    for name, value in plain.items():
        if type(value) not in _OPTION_TYPES and name != "needs":
            raise TypeError(
                f"{name}: got {'a tensor' if isinstance(value, Tensor) else repr(value)}, expected a number, "
                "string, bool or None; compute other values from such options, in evaluate or in a "
                "functools.cached_property"
            )
    return plain


def refuse_ignored_options(cls: type[Objective]) -> None:
    """Reject attributes that look like options but are not fields of the dataclass."""
    options = _option_names(cls)
    for each in cls.__mro__:
        annotated = {name: str(kind) for name, kind in inspect.get_annotations(each).items()}
        ignored = [name for name in options if name in vars(each) and name not in annotated]
        ignored += [name for name, kind in annotated.items() if "InitVar" in kind]
        if "__dataclass_fields__" not in vars(each):
            ignored += [name for name, kind in annotated.items() if "ClassVar" not in kind]
        if ignored:
            raise TypeError(
                f"{ignored[0]}: is not a regular field of {each.__name__} and would be ignored; write "
                f"`{ignored[0]}: <type> = <default>` in the class under @dataclass(frozen=True), without "
                "InitVar and slots, or annotate a constant as ClassVar"
            )


def checked_evaluate(objective: Objective, batch: PolicyBatch) -> ObjectiveLoss:
    """Call ``evaluate`` and check that it returns an ``ObjectiveLoss`` of the declared level."""
    result, name = objective.evaluate(batch), type(objective).__name__
    if not isinstance(result, ObjectiveLoss):
        raise TypeError(
            f"objective: {name}.evaluate returned {type(result).__name__}, expected ObjectiveLoss(loss, "
            "log_ratio)"
        )
    expected = batch.lengths.shape if objective.level == "sequence" else batch.mask.shape
    if result.loss.shape != expected:
        raise ValueError(
            f"objective: {name} has level={objective.level!r}, but its loss has shape "
            f"{tuple(result.loss.shape)}, expected {tuple(expected)}; set level to 'token' for one value per "
            "token, to 'sequence' for one per sequence"
        )
    return result


def require_clip_range(low: float, high: float, dual: float | None, prefix: str = "") -> None:
    """Check PPO-style clip options: 0 <= low <= 1, 0 <= high, dual > 1 + high."""
    require_numbers(**{f"{prefix}clip_low": low, f"{prefix}clip_high": high})
    if low > 1.0:
        raise ValueError(f"{prefix}clip_low: got {low}, expected at most 1, as ratios are never negative")
    if dual is not None and not checks.number("dual_clip", dual) > 1.0 + high:
        raise ValueError(
            f"dual_clip: got {dual}, expected None or a ratio above 1 + clip_high = {1.0 + high}"
        )


def require_numbers(minimum: float = 0.0, maximum: float = math.inf, **values: object) -> None:
    """Check options that are numbers: finite, from ``minimum`` to ``maximum``."""
    for name, value in values.items():
        if not minimum <= checks.number(name, value) <= maximum:
            expected = f"from {minimum} to {maximum}" if maximum < math.inf else f"of at least {minimum}"
            raise ValueError(f"{name}: got {value}, expected a finite number {expected}")
