"""What the ranks of a call must agree on, and how public functions compare it on request.

With GSPO_KERNELS_VALIDATE=1 each rank checks its arguments, and then all ranks compare them in one gather per
process group, before any other work. Without it a wrong argument is an error on its rank, and the other ranks
wait for that rank as in any collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.invariance import in_force
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import resolve
from gspo_kernels.ops.library import validates
from gspo_kernels.ops.logprobs import check_ranges, check_rows, range_of
from gspo_kernels.ops.value_checks import check_temperature
from gspo_kernels.parallel.agreement import check_agreement, digest, exchange
from gspo_kernels.parallel.groups import Parallel, group_name
from gspo_kernels.parallel.placements import VOCABULARY, mesh_groups
from gspo_kernels.parallel.tokens import ScatteredTokens
from gspo_kernels.terms import SPECS, Terms, check_values
from gspo_kernels.types import RowOptions

_VOCABULARY = {**VOCABULARY, "B": 0}  # B: of a LoRAHead
"""Arguments whose vocabulary may be split among ranks, and the dimension of the vocabulary in each."""
_HIDDEN = ("hidden", "teacher_hidden")
_OF_TOKENS = ("labels", "ids", "cu_seqlens", "kept_mask", "centering_ids", "centering_logprobs")
_TRAINABLE = ("logits", "hidden", "weight", "bias")
_GROUPS = ("tp_group", "cp_group", "group")


def comparing(name: str, **arguments: Any) -> contextlib.AbstractContextManager[RankComparison | None]:
    """Return a context: an error in it before ``RankComparison.compare`` raises on all ranks of the call.

    Without GSPO_KERNELS_VALIDATE=1, and while code is compiled, the context does nothing and yields None.

    Args:
        name: of the public function.
        arguments: of the call, by name; named tuples and ``Parallel`` are compared field by field.
    """
    return RankComparison(name, arguments) if validates() else NOT_COMPARED


NOT_COMPARED: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class RankComparison:
    """A call of this rank, whose arguments are compared with those of the other ranks.

    Attributes:
        arguments: as the caller passed them.
        device: of the tokens.
        groups: for each group, by its name in messages, its process group's name and what its ranks share.
        compared: whether the comparison has been made.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]):
        self.arguments = {"call": name, **_flat(arguments)}
        tokens = _tokens(self.arguments)
        self.device = tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")
        self.groups = _groups(self.arguments)
        self.compared = False

    def __enter__(self) -> RankComparison:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not self.compared:
            self._exchange(error)

    def compare(
        self,
        labels: Tensor,
        terms: Terms | None = None,
        options: RowOptions | None = None,
        width: int = 0,
        scattered: int | None = None,
        teacher_temperature: Tensor | None = None,
    ) -> None:
        """Check the values of this rank's arguments, and compare all with other ranks', before any work.

        Args:
            labels: [B, T]; for a call without labels any tensor of their shape, such as the log-probs.
            terms: of a loss, validated.
            options: of logits, normalized.
            width: how many columns of logits this rank has.
            scattered: of how many tokens of a row this rank has the hidden states, where ranks share them.
            teacher_temperature: of a teacher's rows.

        Raises:
            TypeError, ValueError: an argument is wrong on this rank, or all ranks' don't fit together.
            RanksDisagreeError: another rank refused the call, or was called with other arguments.
        """
        if not self.groups:
            return
        if terms is not None:
            logprobs = labels if labels.is_floating_point() else None
            check_values(labels, terms._replace(cp_group=""), logprobs=logprobs)
        if options is not None:
            check_temperature(teacher_temperature, labels, options.ignore_index, "teacher_temperature")
        if options is None:
            self._exchange()
        elif not options.shard.group:
            check_rows(labels, width, options)
            self._exchange()
        else:
            local, group, length = options, options.shard.group, labels.shape[1]

            def check_numbers(every: list[tuple[int, ...]]) -> None:
                check_ranges([numbers[:4] for numbers in every], local)
                if scattered is not None:
                    ScatteredTokens.of(group, [numbers[4] for numbers in every], length)

            numbers = (*range_of(labels, width, options), scattered or 0)
            self._exchange(None, numbers, check_numbers)

    def _exchange(
        self,
        refused: Exception | None = None,
        numbers: tuple[int, ...] = (),
        check_numbers: Callable[[list[tuple[int, ...]]], None] | None = None,
    ) -> None:
        """Compare with the other ranks of each group; all ranks take the groups in the same order.

        All ranks go on, or all raise. An error in one group is passed on to the next group, so that all ranks
        of a grid learn of it.

        Args:
            refused: why this rank refuses the call; it is not raised here.
            numbers: what may differ between ranks that share the vocabulary.
            check_numbers: raises where these numbers of all ranks together are wrong.
        """
        self.compared, error = True, refused
        for argument, (group, share) in self.groups.items():
            same = {} if refused is not None else _placements(self.arguments) | _SAME[share](self.arguments)
            messages = exchange(group, self.device, same, numbers, error)
            if error is None:
                try:
                    check_agreement(argument, messages)
                    if check_numbers is not None and share == "vocabulary":
                        check_numbers([tuple(message["numbers"]) for message in messages])
                except Exception as raised:
                    error = raised
        if error is not None and error is not refused:
            raise error


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with named tuples and ``Parallel`` replaced by their fields."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            fields = value._asdict().items()  # a LoRAHead, passed as ``weight``, has a field ``weight``
            flat |= {key: each for key, each in fields if key == name or key not in arguments}
        else:
            flat[name] = value
    if (centering := flat.get("centering")) is not None:
        flat |= {f"centering_{key}": value for key, value in getattr(centering, "__dict__", {}).items()}
    if isinstance(parallel := flat.pop("parallel", None), Parallel):
        flat |= {each.name: getattr(parallel, each.name) for each in dataclasses.fields(parallel)}
    return flat


def _tokens(arguments: Mapping[str, Any]) -> Any:
    """Return the first argument whose leading dimensions are those of tokens."""
    names = ("labels", "logprobs", "ids", "logits", "hidden", "loss_mask")
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def _groups(arguments: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the groups of the arguments and of their DTensors' meshes, those of the vocabulary first."""
    shares = dict(zip(_GROUPS, ("vocabulary", "tokens", "batch"), strict=True))
    facts: dict[str, tuple[str, str]] = {}
    for argument, share in shares.items():
        if arguments.get(argument) not in (None, ""):
            with contextlib.suppress(TypeError, ValueError):  # the call itself raises for a wrong group
                facts[argument] = group_name(argument, arguments[argument]), share
    placed = {name: value for name, value in arguments.items() if hasattr(value, "device_mesh")}
    if placed:
        known = {group for group, _ in facts.values()}
        for each in mesh_groups(placed):
            if each.group.size() > 1 and each.group.group_name not in known:
                facts[each.argument] = each.group.group_name, each.share
    order = (*shares.values(), "")
    return dict(sorted(facts.items(), key=lambda item: order.index(item[1][1])))


def _value(value: Any) -> str:
    """Return a text that stands for an argument; a number and a 0-d tensor of it have the same text."""
    if isinstance(value, Tensor):
        if value.ndim == 0 and not value.is_complex():
            return repr(float(value))
        return f"{_kind(value)} {list(value.shape)}, digest {digest(value)}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(float(value))
    # the spec of an objective names a class as this process does
    return repr(value) if isinstance(value, str | bool | None | Objective) else type(value).__name__


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} on {value.device.type}"


def _sizes(value: Any, open_dims: tuple[int, ...] = ()) -> str:
    """Return dtype and shape of a tensor as a text, with "..." for dimensions that may differ."""
    if not isinstance(value, Tensor):
        return _value(value)
    sizes = [str(size) for size in value.shape]
    for dim in range(value.ndim):
        if dim in open_dims or dim - value.ndim in open_dims:
            sizes[dim] = "..."
    return f"{_kind(value)} [{', '.join(sizes)}]"


def _presence(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else _value(value)


def _placements(arguments: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the placements of tensors that may be DTensors, and the name of the call."""
    facts: dict[str, str | None] = {"call": arguments["call"]}
    for name in (*_VOCABULARY, *_HIDDEN):
        value: Any = arguments.get(name)
        if hasattr(value, "device_mesh"):
            facts[f"{name}: the DTensor"] = (
                f"{value.placements} on a mesh of {tuple(value.device_mesh.shape)}"
            )
        elif isinstance(value, Tensor):
            facts[f"{name}: the DTensor"] = "a plain tensor"
    return facts


def _same_always(arguments: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what ranks that share vocabulary or sequences must agree on whatever else the call takes: which
    inputs need a gradient, which groups there are, and the batch-invariant mode.
    """
    facts: dict[str, str | None] = {}
    for name in _TRAINABLE:
        if isinstance(arguments.get(name), Tensor):
            learns = torch.is_grad_enabled() and arguments[name].requires_grad
            facts[f"{name}: whether it needs a gradient"] = repr(learns)
    facts["batch-invariant mode"] = repr(in_force(arguments.get("batch_invariant")))
    for name in _GROUPS:
        facts[f"{name}: whether there is one"] = repr(arguments.get(name) not in (None, ""))
    return facts


def _same_rows(arguments: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what must be the same on ranks that share the vocabulary: all but their columns."""
    facts = _same_always(arguments)
    for name, value in arguments.items():
        if name in (*_GROUPS, "call", "vocab_range", "batch_invariant"):
            continue
        if name in _VOCABULARY:
            facts[name] = _sizes(value, (_VOCABULARY[name],))
        elif name in _HIDDEN:
            facts[name] = _sizes(value, (-2,) if arguments.get("sequence_parallel") else ())
        elif name == "backend":
            facts[name] = resolve(value, _tokens(arguments).device)
        else:
            facts[name] = _value(value)
    return facts


def _same_sequences(arguments: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what must be the same on ranks with parts of the same sequences: all but values per token.

    A function without an argument ``cu_seqlens`` takes tokens, whichever sequences they belong to.
    """
    facts = _same_always(arguments)
    tokens, offsets = _tokens(arguments), arguments.get("cu_seqlens")
    sequences = tokens.shape[0] if offsets is None else len(offsets) - 1
    if "cu_seqlens" in arguments:
        facts["cu_seqlens or labels: the number of sequences"] = str(sequences)
    for name, value in arguments.items():
        if name in (*_GROUPS, "call", "batch_invariant", "loss_mask"):
            continue
        if name in _HIDDEN or name in ("logits", "teacher_logits"):
            facts[name] = _sizes(value, tuple(range(tokens.ndim)))
        elif name in _VOCABULARY:
            facts[name] = _sizes(value)
        elif name in ("logprobs", "entropy"):
            facts[name] = _kind(value) if isinstance(value, Tensor) else "None"
        elif name in _OF_TOKENS or (name == "temperature" and "cu_seqlens" not in arguments):
            facts[name] = _presence(value)
        elif name == "backend":
            facts[name] = resolve(value, tokens.device)
        elif name in SPECS:
            facts[name] = _of_sequences(arguments, name, SPECS[name].shape, sequences)
        else:
            facts[name] = _value(value)
    return facts


def _of_sequences(arguments: Mapping[str, Any], name: str, shape: str, sequences: int) -> str | None:
    """Return a term's text for ranks with parts of the same sequences; None if its shape is ambiguous."""
    value, packed = arguments[name], arguments.get("cu_seqlens") is not None
    if not isinstance(value, Tensor) or value.ndim == 0 or shape in ("sequences", "number"):
        return _value(value)
    if shape == "either" and tuple(value.shape) == (sequences,):
        takes_tokens = name != "advantages" or arguments["objective"].takes_token_advantages
        # as many packed tokens as sequences: [B] and [N] look alike
        ambiguous = packed and takes_tokens and value.shape == _tokens(arguments).shape
        return None if ambiguous else f"one per sequence: {_value(value)}"
    if shape == "broadcast" and value.ndim == 2 and value.shape[1] == 1 and not packed:
        return _value(value)
    return "one per token"


_SAME: dict[str, Callable[[Mapping[str, Any]], dict[str, str | None]]] = {
    "vocabulary": _same_rows,
    "tokens": _same_sequences,
    "batch": lambda arguments: {"objective": _value(arguments["objective"])},
    "": lambda arguments: {},
}
"""Functions that return what must be the same on the ranks of a group, by what the ranks share."""
