"""DTensors among the arguments of a call: what a rank has of them, and which group has the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor

VOCABULARY = {"logits": -1, "weight": 0, "bias": 0}
"""The dimension of an argument that ranks may share."""


def resolved(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a public function with local tensors in place of DTensors, and the ``tp_group``,
    ``vocab_range`` and ``sequence_parallel`` that those stand for.

    Raises:
        ValueError: a DTensor that can't be served, or an argument that contradicts it.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    given = {name: value for name, value in arguments.items() if isinstance(value, DTensor)}
    mesh = next(iter(given.values())).device_mesh
    logit_arguments = arguments["logit_arguments"]
    products: Any = arguments.get("product_arguments")
    for name in ("tp_group", "vocab_range"):
        if getattr(logit_arguments, name) is not None:
            raise ValueError(f"{name}: {', '.join(given)} as DTensors say it themselves, expected None")
    for name, value in (arguments["terms"]._asdict() if "terms" in arguments else {}).items():
        if isinstance(value, DTensor):
            raise ValueError(f"{name}: is a DTensor, expected a plain tensor, the same on all ranks")
    found, cut, scattered = dict(arguments), set(), False
    for name, value in given.items():
        if value.device_mesh != mesh or mesh.ndim != 1:
            raise ValueError(
                f"{name}: is a DTensor over {value.device_mesh}, expected all over one mesh of one dimension"
            )
        (placement,) = value.placements
        dim = VOCABULARY.get(name, -2) % value.ndim
        gradient = placement
        if placement == Shard(dim) and name in VOCABULARY:
            shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, value.placements)
            ids = (offset[dim], offset[dim] + shape[dim])
            logit_arguments = logit_arguments._replace(tp_group=mesh, vocab_range=ids)
            cut.add(name)
        elif placement == Shard(dim) and name == "hidden":
            scattered = True
        elif placement != Replicate():
            raise ValueError(f"{name}: {_refusal(name, placement)}")
        elif name == "hidden" and not products.reduce_hidden_grad:
            gradient = Partial()
        found[name] = value.to_local(grad_placements=[gradient])
    if scattered and "weight" not in cut:
        raise ValueError("hidden: is sharded over tokens, which needs weight as a DTensor with Shard(0)")
    if isinstance(found.get("bias"), Tensor) and ("bias" in cut) != ("weight" in cut):
        raise ValueError("bias: expected a DTensor of weight's placement, as weight is one")
    found["logit_arguments"] = logit_arguments
    if scattered:
        found["product_arguments"] = products._replace(sequence_parallel=True)
    return found


def _refusal(name: str, placement: object) -> str:
    expected = {
        "logits": "Shard(-1), the vocabulary",
        "weight": "Shard(0), the vocabulary",
        "bias": "Shard(0), the vocabulary",
        "hidden": "Shard over tokens",
    }
    other = f", or {expected[name]}" if name in expected else ""
    return f"is a DTensor with placement {placement!r}, expected Replicate(){other}"
