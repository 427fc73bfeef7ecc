"""DTensors among the arguments of a call: what a rank has of them, and which groups have the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gspo_kernels.invariance import in_force, refuse_groups
from gspo_kernels.parallel.groups import Parallel

if TYPE_CHECKING:  # not every build of PyTorch has it
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

VOCABULARY = {
    "logits": -1, "teacher_logits": -1,
    "weight": 0, "teacher_weight": 0,
    "bias": 0, "teacher_bias": 0,
}  # fmt: skip
"""The dimension of an argument that ranks may share."""
TOKENS = ("logits", "hidden")
"""Arguments of which the dimension before the last is that of tokens."""


def groups_of(dtensors: dict[str, DTensor]) -> dict[str, tuple[str, str]]:
    """The groups of more than one rank that DTensors lie on: the name of each, and "vocabulary" or "tokens"
    where one of them is cut so over it, else "". Placements that can't be served are no error here.
    """
    groups: dict[str, tuple[str, str]] = {}
    for name, value in dtensors.items():
        for dim, placement in enumerate(value.placements):
            group = value.device_mesh.get_group(dim)
            if group.size() == 1:
                continue
            share = "vocabulary" if cuts_vocabulary(name, value, placement) else ""
            share = share or ("tokens" if cuts_tokens(name, value, placement) else "")
            before = next((key for key, (known, _) in groups.items() if known == group.group_name), None)
            key = before or f"dimension {dim} of the mesh of {name}"
            # what cuts the vocabulary counts more than what cuts tokens
            shares = {share, groups[before][1]} if before else {share}
            share = next(each for each in ("vocabulary", "tokens", "") if each in shares)
            groups[key] = (group.group_name, share)
    return groups


def cuts_vocabulary(name: str, value: DTensor, placement: Any) -> bool:
    """Whether an argument's vocabulary is cut by a placement."""
    from torch.distributed.tensor import Shard

    return name in VOCABULARY and placement == Shard(VOCABULARY[name] % value.ndim)


def cuts_tokens(name: str, value: DTensor, placement: Any) -> bool:
    """Whether an argument's tokens are cut by a placement."""
    from torch.distributed.tensor import Shard

    return name in TOKENS and placement == Shard(value.ndim - 2)


class Placed:
    """The DTensors of a call, by what each dimension of their meshes cuts.

    Attributes:
        dtensors: by argument.
        vocabulary: the group over which the vocabulary is cut: tensor parallelism.
        tokens: the group over which tokens are cut, but not the vocabulary: context parallelism.
    """

    def __init__(self, dtensors: dict[str, DTensor]):
        self.dtensors = dtensors
        self.groups: dict[str, ProcessGroup] = {}
        over: dict[str, dict[str, Any]] = {}
        for name, value in dtensors.items():
            for dim, placement in enumerate(value.placements):
                group = value.device_mesh.get_group(dim)
                self.groups[group.group_name] = group
                over.setdefault(group.group_name, {})[name] = placement
        roles = {group: self._role(placements) for group, placements in over.items()}
        self.vocabulary = self._only(roles, "vocabulary")
        self.tokens = self._only(roles, "tokens")

    def _role(self, placements: dict[str, Any]) -> str | None:
        """What the ranks of a group have parts of, given how arguments are placed over it."""
        from torch.distributed.tensor import Replicate

        cut = [name for name in placements if cuts_vocabulary(name, self.dtensors[name], placements[name])]
        apart = [name for name in placements if cuts_tokens(name, self.dtensors[name], placements[name])]
        for name, placement in placements.items():
            if name not in (*cut, *apart) and placement != Replicate():
                raise ValueError(f"{name}: {_refusal(name, placement)}")
        if cut:
            for name in VOCABULARY:
                if name in self.dtensors and name not in cut:
                    like = _ALIKE.get(name, cut[0])
                    raise ValueError(f"{name}: expected a DTensor of {like}'s placement, as {like} is one")
            return "vocabulary"
        return "tokens" if apart else None

    def _only(self, roles: dict[str, str | None], role: str) -> ProcessGroup | None:
        """The group that has a role."""
        groups = [group for group, has in roles.items() if has == role]
        if len(groups) > 1:
            raise ValueError(
                f"{', '.join(self.dtensors)}: {len(groups)} dimensions of device meshes cut the {role}, "
                "expected one; FSDP2 gathers its own where the module is called"
            )
        return self.groups[groups[0]] if groups else None

    def local(self, name: str, reduced: bool) -> Tensor:
        """What this rank has of an argument; its gradient goes back as a DTensor.

        Args:
            name: of the argument.
            reduced: whether dHidden is the sum over the vocabulary's group.
        """
        from torch.distributed.tensor import Partial

        value = self.dtensors[name]
        parts = self.tokens if name in ("weight", "bias") else None if reduced else self.vocabulary
        placements = [
            Partial() if not placement.is_shard() and _is_over(value, dim, parts) else placement
            for dim, placement in enumerate(value.placements)
        ]
        return value.to_local(grad_placements=placements)

    def scattered(self) -> bool:
        """Whether ranks that share the vocabulary have hidden states of some tokens each."""
        hidden = self.dtensors.get("hidden")
        return hidden is not None and any(
            placement.is_shard() and _is_over(hidden, dim, self.vocabulary)
            for dim, placement in enumerate(hidden.placements)
        )


_ALIKE = {
    "bias": "weight", "teacher_weight": "weight", "teacher_bias": "weight", "teacher_logits": "logits",
}  # fmt: skip
"""Arguments that are cut as another is."""


def local_tensors(
    parallel: Parallel, terms: Any = None, batch_invariant: bool | None = None, **tensors: Any
) -> tuple[list[Any], Parallel]:
    """A call's tensors with what this rank has of DTensors, and ``parallel`` with the groups of the rest.

    Args:
        parallel: as the caller passed it.
        terms: of a loss; None for calls to which it doesn't matter which sequences tokens are of.
        batch_invariant: the call's argument.
        tensors: by the names of the arguments, ``VOCABULARY`` and ``TOKENS`` among them.

    Raises:
        ValueError: a DTensor that can't be served, or an argument that contradicts it.
    """
    dtensors: dict[str, Any] = {name: x for name, x in tensors.items() if hasattr(x, "device_mesh")}
    if dtensors:
        tensors, parallel = _resolve(parallel, terms, tensors, dtensors)
        refuse_groups(in_force(batch_invariant), cp_group=parallel.cp_group, tp_group=parallel.tp_group)
    return [*tensors.values()], parallel


def _resolve(
    parallel: Parallel, terms: Any, tensors: dict[str, Any], dtensors: dict[str, DTensor]
) -> tuple[dict[str, Any], Parallel]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, value in (terms._asdict() if terms is not None else {}).items():
        if isinstance(value, DTensor):
            raise ValueError(f"{name}: is a DTensor, expected a plain tensor, what this rank has")
    placed = Placed(dtensors)
    shared = placed.tokens is not None and terms is not None
    for name in ("tp_group", "vocab_range", *(("cp_group",) if shared else ())):
        if getattr(parallel, name) is not None:
            raise ValueError(f"{name}: {', '.join(dtensors)} as DTensors say it themselves, expected None")
    local, vocab_range = dict(tensors), None
    for name, dtensor in dtensors.items():
        local[name] = placed.local(name, parallel.reduce_hidden_grad)
        if name in VOCABULARY and any(cuts_vocabulary(name, dtensor, each) for each in dtensor.placements):
            dim = VOCABULARY[name] % dtensor.ndim
            shape, offset = compute_local_shape_and_global_offset(
                dtensor.shape, dtensor.device_mesh, dtensor.placements
            )
            vocab_range = (offset[dim], offset[dim] + shape[dim])
    for name, like in _ALIKE.items():
        alone = (name in dtensors) != (like in dtensors)
        if local.get(name) is not None and placed.vocabulary is not None and alone:
            raise ValueError(f"{name}: expected a DTensor of {like}'s placement, as {like} is one")
    if vocab_range is not None:
        parallel = replace(parallel, tp_group=placed.vocabulary, vocab_range=vocab_range)
    if placed.scattered():
        parallel = replace(parallel, sequence_parallel=True)
    if shared:
        parallel = replace(parallel, cp_group=placed.tokens)
    return local, parallel


def _is_over(value: DTensor, dim: int, group: ProcessGroup | None) -> bool:
    """Whether a dimension of a DTensor's mesh is a group."""
    return group is not None and value.device_mesh.get_group(dim).group_name == group.group_name


def _refusal(name: str, placement: object) -> str:
    expected = {name: f"Shard({dim}), the vocabulary" for name, dim in VOCABULARY.items()}
    expected |= {"logits": f"{expected['logits']}, or Shard over tokens", "hidden": "Shard over tokens"}
    other = f", or {expected[name]}" if name in expected else ""
    return f"is a DTensor with placement {placement!r}, expected Replicate(){other}"
