"""``python -m benchmarks.cpu_rows`` times the C++ CPU backend against plain PyTorch and against copying.

Every dtype is first held against fp64 on the benchmark's own data; no speed is printed for one that fails.
Then the contestants take turns, and the table shows medians. Memory matters as much as arithmetic here, so
there are two comparisons, each between equals:

- *fresh*: each allocates what it returns, as autograd does (the gradient; for the copies three clones);
- *reused*: gradient and copies go to memory that exists already, as with ``inplace_backward=True`` or under a
  caching allocator; PyTorch's autograd allocates in either case. The column "x PyTorch" is against that one.

Page faults on the gradient decide the first comparison: watch its spread before quoting it. The contestant
"token_logprobs(inplace)" is the public function with ``inplace_backward=True``, autograd and checks included;
its logits are restored between rounds, outside the clock.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels import cpp
from gspo_kernels.reference import rows as reference
from gspo_kernels.types import LogitTransform

IGNORE = -100
IDENTITY = LogitTransform()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plain(logits: Tensor, labels: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """What one writes in PyTorch: log-probs [1, N] and the gradient of ``sum(c * logprobs)``."""
    leaf = logits.detach().requires_grad_()
    logprobs = torch.log_softmax(leaf.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    (logprobs * c).sum().backward()
    assert leaf.grad is not None
    return logprobs.detach(), leaf.grad


def fused(logits: Tensor, labels: Tensor, c: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same by two calls of the cpp backend."""
    stats = cpp.logprobs_forward(logits, labels, IDENTITY, ignore_index=IGNORE, entropy=False)
    out = torch.empty_like(logits) if out is None else out
    cpp.logprobs_backward(logits, labels, stats, c, None, None, IDENTITY, ignore_index=IGNORE, out=out)
    return stats.logprobs, out


def one_pass(logits: Tensor, labels: Tensor, c: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same where the coefficients are known before the forward."""
    out = torch.empty_like(logits) if out is None else out
    stats = cpp.logprobs_and_grad(logits, labels, c, IDENTITY, ignore_index=IGNORE, out=out)
    return stats.logprobs, out


class InPlace:
    """The public function where the backward overwrites the logits."""

    def __init__(self, logits: Tensor, labels: Tensor, c: Tensor):
        self.logits, self.labels, self.c = logits, labels, c
        self.scratch = logits.clone()

    def prepare(self) -> None:
        """Put the logits back."""
        self.scratch = self.scratch.detach().copy_(self.logits).requires_grad_()

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Log-probs and the gradient, which lies where the logits were."""
        leaf = self.scratch
        logprobs = gk.token_logprobs(leaf, self.labels, inplace_backward=True, backend="cpp").logprobs
        (grad,) = torch.autograd.grad(logprobs, leaf, self.c)
        return logprobs.detach(), grad


def check(logits: Tensor, labels: Tensor, c: Tensor, rows: int = 16) -> None:
    """Error against fp64 <= 2 x the error of plain PyTorch + eps * max|ref|, on some of the rows."""
    some = slice(None, None, max(1, logits.shape[1] // rows))
    logits, labels, c = logits[:, some], labels[:, some], c[:, some]
    wide = logits.double()
    exact = torch.empty_like(wide)
    stats = reference.logprobs_and_grad(wide, labels, c.double(), IDENTITY, ignore_index=IGNORE, out=exact)
    wanted = stats.logprobs, exact
    usual = plain(logits, labels, c)
    in_place = InPlace(logits, labels, c)
    in_place.prepare()
    results = {
        "two calls": fused(logits, labels, c),
        "one pass": one_pass(logits, labels, c),
        "in place": in_place(),
    }
    for name, got in results.items():
        for ours, theirs, want in zip(got, usual, wanted, strict=True):
            error, plain_error = ((x.double() - want).abs().max().item() for x in (ours, theirs))
            budget = 2 * plain_error + torch.finfo(ours.dtype).eps * want.abs().max().item()
            if not error <= budget:
                raise SystemExit(
                    f"{logits.dtype}, {name}: error {error:.3e} is above its budget {budget:.3e}"
                )


def contestants(logits: Tensor, labels: Tensor, c: Tensor) -> dict[str, Callable[[], object]]:
    out = torch.empty_like(logits).zero_()
    stats = cpp.logprobs_forward(logits, labels, IDENTITY, ignore_index=IGNORE, entropy=False)

    def backward(out: Tensor) -> None:
        cpp.logprobs_backward(logits, labels, stats, c, None, None, IDENTITY, ignore_index=IGNORE, out=out)

    return {
        "PyTorch forward + backward, fresh": lambda: plain(logits, labels, c),
        "three copies, fresh": lambda: [logits.clone() for _ in range(3)],
        "cpp forward + backward, fresh": lambda: fused(logits, labels, c),
        "cpp logprobs_and_grad, fresh": lambda: one_pass(logits, labels, c),
        "token_logprobs(inplace), reused": InPlace(logits, labels, c),
        "three copies, reused": lambda: [out.copy_(logits) for _ in range(3)],
        "cpp forward + backward, reused": lambda: fused(logits, labels, c, out),
        "cpp logprobs_and_grad, reused": lambda: one_pass(logits, labels, c, out),
        "cpp forward": lambda: cpp.logprobs_forward(
            logits, labels, IDENTITY, ignore_index=IGNORE, entropy=False
        ),
        "cpp backward, reused": lambda: backward(out),
    }


def measure(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, all contestants in turn, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            getattr(call, "prepare", lambda: None)()
            start = time.perf_counter()
            result = call()
            times[name].append(1e3 * (time.perf_counter() - start))
            del result
    return {name: values[1:] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument(
        "--json", type=Path, help="also write device, versions, shape and all times to this file"
    )
    arguments = parser.parse_args()
    reason = cpp.unavailable(torch.device("cpu"))
    if reason is not None:
        raise SystemExit(reason)

    shape = (1, arguments.rows, arguments.vocabulary)
    record: dict[str, object] = {
        "benchmark": "cpu_rows",
        "device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "shape": list(shape),
        "milliseconds": {},
    }
    print(f"{record['device']} ({record['cpu_capability']}), torch {torch.__version__}, logits {list(shape)}")
    for name in arguments.dtypes:
        torch.manual_seed(0)
        logits = torch.randn(shape).mul_(3).to(DTYPES[name])
        # Tokens drawn from the distribution itself, as a policy draws them.
        labels = torch.multinomial(logits[0].float().softmax(-1), 1).view(shape[:2])
        c = torch.randn(shape[:2])
        check(logits, labels, c)
        times = measure(contestants(logits, labels, c), arguments.repeats)
        record["milliseconds"][name] = times  # type: ignore[index]
        median = {call: statistics.median(values) for call, values in times.items()}
        naive = median["PyTorch forward + backward, fresh"]
        print(f"\n{name:<37}{'median ms':>10}{'lowest':>8}{'highest':>9}{'x PyTorch':>11}{'/ 3 copies':>12}")
        for call, values in times.items():
            copies = median[f"three copies, {'fresh' if 'fresh' in call else 'reused'}"]
            speedup = "" if "copies" in call or "PyTorch" in call else f"{naive / median[call]:.1f}"
            print(
                f"{call:<37}{median[call]:>10.1f}{min(values):>8.1f}{max(values):>9.1f}"
                f"{speedup:>11}{median[call] / copies:>12.2f}"
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
