"""RoPE frequencies that depend on a sequence's length: LongRoPE (Phi-3), dynamic NTK.

transformers takes them from the largest position of a call, so a sequence's log-probs depend on its
neighbours there. Dynamic NTK also keeps those of the longest call so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.models.calls import replaced_calls, view_of
from gspo_kernels.models.lm_head import causal_lm_of


class VaryingRope(NamedTuple):
    """A rotary embedding whose frequencies are the original ones up to a length, and others beyond it."""

    module: Any
    layers: dict[str, Any]  # {"layer_type": the type of layers that it serves}, if it serves several
    kind: str  # "longrope": one other set of frequencies; "dynamic": others for each length
    limit: int  # longest sequence, in tokens, that has the original frequencies

    def regime(self, length: int) -> int:
        """Return a number that is equal for sequences with equal frequencies; 0: the original ones."""
        return 0 if length <= self.limit else length if self.kind == "dynamic" else self.limit + 1

    def rotate(self, positions: Tensor, **arguments: Any) -> Any:
        """Call a copy of the module with ``positions``, as if it had never been called before.

        The module keeps its frequencies, which calls in other threads may need.
        """
        # copied, because transformers writes the frequencies of LongRoPE in place
        buffers = {name: each.clone() for name, each in self.module._buffers.items() if each is not None}
        module = view_of(self.module, _buffers=buffers)
        if self.kind == "dynamic":  # a position of 0 restores the original frequencies
            module.forward(**arguments, position_ids=torch.zeros_like(positions[..., :1]))
        return module.forward(**arguments, position_ids=positions)


def varying_ropes(model: Any) -> list[VaryingRope]:
    """Return the rotary embeddings of a model whose frequencies depend on lengths; most models have none."""
    ropes = []
    for module in causal_lm_of(model).modules():
        if (kinds := vars(module).get("rope_type")) is None:
            continue
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            layers = {} if layer_type is None else {"layer_type": layer_type}
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                limit = parameters["original_max_position_embeddings"]
                ropes.append(VaryingRope(module, layers, kind, limit))
            elif kind is not None and "dynamic" in kind:
                ropes.append(VaryingRope(module, layers, "dynamic", module.original_max_seq_len))
    return ropes


@contextmanager
def own_frequencies(ropes: Sequence[VaryingRope], lengths: Tensor | None = None) -> Iterator[None]:
    """Rotate each token, in calls of a model in this context, as in a call with its sequence alone.

    ``ropes`` are the model's ``varying_ropes``. ``lengths`` [B, T] says how long the sequence of each token
    is; None: the frequencies of a call depend on its largest position, and on no earlier call.
    """
    modules = {rope.module for rope in ropes}
    with replaced_calls({module: partial(_rotated_alone, ropes, lengths, module) for module in modules}):
        yield


def _rotated_alone(
    ropes: Sequence[VaryingRope], lengths: Tensor | None, module: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return a rotary embedding's output, [B, T, D] each: one call for each set of frequencies."""
    passed = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    found = [rope for rope in ropes if rope.module is module]
    of_layer = [rope for rope in found if rope.layers.get("layer_type") == passed.get("layer_type")]
    if not of_layer:  # the frequencies of these layers do not depend on lengths
        return view_of(module)(*args, **kwargs)
    rope, positions = of_layer[0], passed.pop("position_ids")
    if lengths is None:
        return rope.rotate(positions, **passed)
    lengths, rotated = lengths.to(positions.device), None
    for regime, equal in groupby(sorted({*lengths.flatten().tolist()}), rope.regime):
        chosen = torch.isin(lengths, lengths.new_tensor([*equal]))
        # positions of other sequences don't count, and the last one of a sequence does
        last = torch.full_like(positions[..., :1], max(regime - 1, 0))
        output = rope.rotate(torch.cat([torch.where(chosen, positions, 0), last], -1), **passed)
        new = [each[..., :-1, :] for each in (output if isinstance(output, tuple) else (output,))]
        if rotated is not None:
            pairs = zip(new, rotated, strict=True)
            new = [torch.where(chosen.unsqueeze(-1), each, old) for each, old in pairs]
        rotated = new
    assert rotated is not None
    return tuple(rotated) if isinstance(output, tuple) else rotated[0]
