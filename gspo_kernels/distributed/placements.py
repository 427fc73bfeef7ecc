"""Conversion of DTensor arguments to local tensors and process groups."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo_kernels.core.batch_invariance import checked_mode, refuse_groups
from gspo_kernels.core.torch_internals import PLAIN
from gspo_kernels.distributed.groups import Parallel

if TYPE_CHECKING:  # not in every build of PyTorch
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

VOCABULARY = {
    "logits": -1, "teacher_logits": -1,
    "weight": 0, "teacher_weight": 0,
    "bias": 0, "teacher_bias": 0,
}  # fmt: skip
"""The dimension of each argument that may be sharded."""
TOKENS = ("logits", "hidden")
"""Arguments whose second-to-last dimension is that of tokens."""


class MeshGroup(NamedTuple):
    """A process group over which DTensors of a call are placed.

    Attributes:
        group: the process group.
        argument: the group's name in error messages.
        placements: the DTensors' placements over the group, by argument.
        sharded: the sharded dimension, "vocabulary", "tokens", or "".
    """

    group: ProcessGroup
    argument: str
    placements: dict[str, Any]
    sharded: str


def mesh_groups(dtensors: dict[str, DTensor]) -> list[MeshGroup]:
    """Return the groups of DTensors, without checking their placements."""
    groups: dict[str, tuple[ProcessGroup, str]] = {}
    by_group: dict[str, dict[str, Any]] = {}
    for name, value in dtensors.items():
        for dim, placement in enumerate(value.placements):
            group = value.device_mesh.get_group(dim)
            groups.setdefault(group.group_name, (group, f"dimension {dim} of the mesh of {name}"))
            by_group.setdefault(group.group_name, {})[name] = placement
    result = []
    for key, placements in by_group.items():
        found = [_sharded(name, dtensors[name], placement) for name, placement in placements.items()]
        sharded = "vocabulary" if "vocabulary" in found else "tokens" if "tokens" in found else ""
        group, argument = groups[key]
        result.append(MeshGroup(group, argument, placements, sharded))
    return result


def _sharded(name: str, value: DTensor, placement: Any) -> str:
    """Return the dimension that a placement shards: "vocabulary", "tokens", or ""."""
    from torch.distributed.tensor import Shard

    if name in VOCABULARY and placement == Shard(VOCABULARY[name] % value.ndim):
        return "vocabulary"
    return "tokens" if name in TOKENS and placement == Shard(value.ndim - 2) else ""


def _group_of(sharded: str, groups: list[MeshGroup], dtensors: dict[str, DTensor]) -> ProcessGroup | None:
    """Return the one group over which the vocabulary, or the tokens, are sharded, or None."""
    matching = [each.group for each in groups if each.sharded == sharded]
    if len(matching) > 1:
        raise ValueError(
            f"{', '.join(dtensors)}: {len(matching)} dimensions of device meshes shard the {sharded}, "
            "expected one; FSDP2 gathers its parameters only when the module is called"
        )
    return matching[0] if matching else None


def _check_placements(groups: list[MeshGroup], dtensors: dict[str, DTensor]) -> None:
    """Reject shards of neither vocabulary nor tokens, or of the vocabulary of some arguments only."""
    from torch.distributed.tensor import Replicate

    for each in groups:
        found = {name: _sharded(name, dtensors[name], value) for name, value in each.placements.items()}
        for name, placement in each.placements.items():
            if not found[name] and placement != Replicate():
                raise ValueError(f"{name}: {_refusal(name, placement)}")
        unsharded = [name for name in VOCABULARY if name in dtensors and found.get(name) != "vocabulary"]
        if each.sharded == "vocabulary" and unsharded:
            like = _ALIKE.get(unsharded[0]) or next(name for name in found if found[name] == "vocabulary")
            raise ValueError(f"{unsharded[0]}: expected a DTensor with the placement of {like}")


_ALIKE = {
    "bias": "weight", "teacher_weight": "weight", "teacher_bias": "weight", "teacher_logits": "logits",
}  # fmt: skip
"""Arguments that must be sharded like another one."""


def local_tensors(
    parallel: Parallel, terms: Any = None, batch_invariant: bool | None = None, **tensors: Any
) -> tuple[list[Any], Parallel]:
    """Replace DTensors of a call by local tensors, and add their groups to ``parallel``.

    Args:
        parallel: as the caller passed it.
        terms: the terms of a loss, or None for calls that don't depend on sequences.
        batch_invariant: the call's argument.
        tensors: the call's tensors by argument name, as in ``VOCABULARY`` and ``TOKENS``.

    Raises:
        ValueError: a DTensor that isn't supported, or an argument that contradicts it.
    """
    values = list(tensors.values())
    if PLAIN.issuperset(map(type, values)):  # faster than a failing attribute lookup
        return values, parallel
    dtensors: dict[str, Any] = {name: x for name, x in tensors.items() if hasattr(x, "device_mesh")}
    if dtensors:
        tensors, parallel = _resolve(parallel, terms, tensors, dtensors)
        refuse_groups(checked_mode(batch_invariant), cp_group=parallel.cp_group, tp_group=parallel.tp_group)
    return [*tensors.values()], parallel


def _resolve(
    parallel: Parallel, terms: Any, tensors: dict[str, Any], dtensors: dict[str, DTensor]
) -> tuple[dict[str, Any], Parallel]:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, value in (terms._asdict() if terms is not None else {}).items():
        if isinstance(value, DTensor):
            raise ValueError(f"{name}: got a DTensor, expected a plain tensor with this rank's part")
    groups = mesh_groups(dtensors)
    _check_placements(groups, dtensors)
    vocabulary, tokens = (_group_of(each, groups, dtensors) for each in ("vocabulary", "tokens"))
    shared = tokens is not None and terms is not None
    for name in ("tp_group", "vocab_range", *(("cp_group",) if shared else ())):
        if getattr(parallel, name) is not None:
            raise ValueError(f"{name}: expected None, as the DTensors {', '.join(dtensors)} determine it")
    for name, like in _ALIKE.items():
        differ = (name in dtensors) != (like in dtensors)
        if tensors.get(name) is not None and vocabulary is not None and differ:
            kinds = ("a DTensor", "a plain tensor")
            got, expected = kinds if name in dtensors else reversed(kinds)
            raise ValueError(f"{name}: got {got}, expected {expected}, as {like} is")
    local: dict[str, Any] = dict(tensors)
    changes: dict[str, Any] = {"cp_group": tokens} if shared else {}
    for name, dtensor in dtensors.items():
        over_vocabulary, gradient = _dim_over(dtensor, vocabulary), list(dtensor.placements)
        # the dimension over which gradients are partial sums
        if name in ("weight", "bias"):
            summed = _dim_over(dtensor, tokens)
        else:
            summed = None if parallel.reduce_hidden_grad else over_vocabulary
        if summed is not None and not gradient[summed].is_shard():
            gradient[summed] = Partial()
        local[name] = dtensor.to_local(grad_placements=gradient)
        if over_vocabulary is None:
            continue
        sharded = _sharded(name, dtensor, dtensor.placements[over_vocabulary])
        if sharded == "vocabulary":
            dim, mesh = VOCABULARY[name] % dtensor.ndim, dtensor.device_mesh
            shape, offset = compute_local_shape_and_global_offset(dtensor.shape, mesh, dtensor.placements)
            changes |= {"tp_group": vocabulary, "vocab_range": (offset[dim], offset[dim] + shape[dim])}
        elif sharded == "tokens":
            changes["sequence_parallel"] = True
    return local, replace(parallel, **changes)


def _dim_over(value: DTensor, group: ProcessGroup | None) -> int | None:
    """Return the dimension of a DTensor's mesh whose group is ``group``, or None."""
    names = [value.device_mesh.get_group(dim).group_name for dim in range(value.device_mesh.ndim)]
    return names.index(group.group_name) if group is not None and group.group_name in names else None


def _refusal(name: str, placement: object) -> str:
    expected = {name: f"Shard({dim}), the vocabulary" for name, dim in VOCABULARY.items()}
    expected |= {"logits": f"{expected['logits']}, or Shard over tokens", "hidden": "Shard over tokens"}
    other = f", or {expected[name]}" if name in expected else ""
    return f"is a DTensor with placement {placement!r}, expected Replicate(){other}"
