"""What the backends share: replacing a framework's functions, and log-probs for inputs of any shape."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations.errors import check_signature, require_package

IGNORED = -100
_LOGGER = logging.getLogger("gspo_kernels")
_INHERITED = object()


class NotServedError(Exception):
    """A call that the framework's own code must take; the message says why."""


class Replacements:
    """Functions of a framework, by "module:name" or "module:class.name", and our functions that replace them.

    Args:
        framework: its distribution, as pip knows it; the import package has the same name.
        functions: our function for each of the framework's. It takes the same arguments, or raises
            NotServedError.
    """

    def __init__(self, framework: str, functions: dict[str, Callable[..., Any]]):
        self.framework, self.functions = framework, functions
        self._replaced: list[Any] = []

    def install(self) -> None:
        """Replace the framework's functions, also in its other modules that have imported them already.

        Modules outside of the framework that have imported a function keep the framework's own.

        Raises:
            IntegrationError: the framework isn't installed or too old, or one of its functions takes other
                arguments; then nothing is replaced.
        """
        if self._replaced:
            return
        require_package(self.framework)
        found = []
        for path, ours in self.functions.items():
            module, _, qualified = path.partition(":")
            *classes, name = qualified.split(".")
            owner = self._module(module)
            for each in classes:
                owner = getattr(owner, each, None)
            original: Any = getattr(owner, name, None)
            path = path.replace(":", ".")
            check_signature(self.framework, path, original, ours)
            found.append((owner, name, original, _either(path, ours, original)))
        for owner, name, original, stand_in in found:
            own = vars(owner).get(name, _INHERITED)
            setattr(owner, name, stand_in)
            if not isinstance(owner, type):
                _swap(original, stand_in, f"{self.framework}.")
            self._replaced.append((owner, name, own, original, stand_in))

    def remove(self) -> None:
        """Restore the framework's functions, in all modules that have imported ours in the meantime."""
        while self._replaced:
            owner, name, own, original, stand_in = self._replaced.pop()
            if own is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
            if not isinstance(owner, type):
                _swap(stand_in, original)

    def _module(self, name: str) -> Any:
        """Return a framework's module; None if the framework has none of this name."""
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{error.name}.".startswith(f"{self.framework}."):
                raise  # a dependency of the framework
            return None


def _swap(old: Any, new: Any, prefix: str = "") -> None:
    """Replace a module-level object in all loaded modules whose full name, with a dot, has this prefix."""
    for module, loaded in list(sys.modules.items()):
        if f"{module}.".startswith(prefix):
            for name in [key for key, value in getattr(loaded, "__dict__", {}).items() if value is old]:
                setattr(loaded, name, new)


def _either(path: str, ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def stand_in(*arguments: Any, **named: Any) -> Any:
        try:
            result = ours(*arguments, **named)
        except NotServedError as reason:
            _log_once(f"{path} stays as it is where {reason}")
            return original(*arguments, **named)
        _log_once(f"{path} runs in gspo_kernels")
        return result

    return stand_in


def _log_once(message: str) -> None:
    if not torch.compiler.is_compiling():  # torch.compile would try to compile the log call
        _log(message)


@functools.cache
def _log(message: str) -> None:
    _LOGGER.warning(message)


# Log-probs and entropy in fp32, of the labels' shape; NotServedError for tensors that aren't plain.


def scores(logits: Tensor, labels: Tensor, *, inplace: bool = False, **options: Any) -> gk.TokenLogprobs:
    """Return log-probs, and entropy where asked for, from logits [..., V] and labels [...].

    ``options`` are those of ``token_logprobs``. With ``inplace`` the backward may overwrite logits that are
    not leaves with their gradient.
    """
    refuse_other_tensors(logits, labels)
    # token_logprobs takes two and three dimensions with any strides; a reshape would copy the logits
    rows = logits if logits.ndim in (2, 3) else logits.reshape(-1, logits.shape[-1])
    overwrite = inplace and torch.is_grad_enabled() and logits.requires_grad and not logits.is_leaf
    options["inplace_backward"] = overwrite and rows is logits
    return _as(labels, gk.token_logprobs(rows, labels.reshape(rows.shape[:-1]), **options))


def entropy_of(logits: Tensor, chunk_size: int = 0) -> Tensor:
    """Return the entropy of logits [..., V]. Frameworks pass ``chunk_size``; it is unused."""
    labels = logits.new_zeros(logits.shape[:-1], dtype=torch.int64)
    return scores(logits, labels, return_entropy=True).entropy  # type: ignore[return-value]


def linear_scores(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options: Any
) -> gk.TokenLogprobs:
    """Return log-probs and entropy from hidden states [..., H] and a head's weight [V, H].

    ``options`` are those of ``linear_token_logprobs``.
    """
    refuse_other_tensors(labels)
    weight, bias = head_of(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return _as(labels, gk.linear_token_logprobs(rows, weight, labels.reshape(-1), bias=bias, **options))


def head_of(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the weight [V, H] and bias of a head in the dtype in which they multiply hidden states."""
    refuse_other_tensors(hidden, weight)
    if hasattr(weight, "ds_id"):
        raise NotServedError("DeepSpeed's ZeRO-3 has the head in pieces between forward and backward")
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
    return weight, None if bias is None else bias.to(hidden.dtype)


def refuse_other_tensors(*tensors: Tensor) -> None:
    """Raise NotServedError for tensors that aren't plain: each framework shards DTensors in its own way."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise NotServedError(f"it gets a {type(tensor).__name__}")


def _as(labels: Tensor, result: gk.TokenLogprobs) -> gk.TokenLogprobs:
    logprobs, entropy = result
    entropy = None if entropy is None else entropy.view(labels.shape)
    return gk.TokenLogprobs(logprobs.view(labels.shape), entropy)
