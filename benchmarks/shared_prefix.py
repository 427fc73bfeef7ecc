"""Forward and backward of the backbone: a prompt per completion, padded or packed, against a shared prompt.

python -m benchmarks.shared_prefix --prompts 128 512 --completions 64 64 --group 8

Contestants take turns in one process, so that a busy machine slows all of them; times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers

from gspo_kernels.trainer.packing import packed_hidden_states, packed_inputs
from gspo_kernels.trainer.shared_prefix import shared_prefix_hidden_states


def model_of(width: int, layers: int) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 128, 1),
        head_dim=64,
        max_position_embeddings=1 << 16,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def padded(model, prompt, group):
    """Hidden states that predict the completions, each behind its own prompt, rows padded on the right."""
    rows = [torch.cat([prompt, completion[:-1]]) for completion in group]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, len(prompt) - 1 :]
    return torch.cat([row[: len(completion)] for row, completion in zip(hidden, group, strict=True)])


def step(model, run):
    """Seconds, tokens through the first layer, and the gradient of the embedding."""
    tokens = []
    count = model.model.layers[0].register_forward_pre_hook(lambda m, x: tokens.append(x[0][..., 0].numel()))
    model.zero_grad()
    start = time.perf_counter()
    run().square().sum().backward()
    seconds = time.perf_counter() - start
    count.remove()
    return seconds, tokens[0], model.model.embed_tokens.weight.grad.clone()


def packed_by_positions(model, prompts, group):
    """A packed row whose mask transformers builds from the positions: T x T entries."""
    row = packed_inputs(prompts, group)
    counted = row.pop("shift_labels")[0] >= 0
    del row["cu_seqlens"]
    return model.model(**row).last_hidden_state[0, counted]


def compare(model, prompt, group, repeats, by_positions):
    """Print a line per layout; nothing is timed whose gradient is not that of padding."""
    copies = [prompt] * len(group)
    layouts = {
        "padded": lambda: padded(model, prompt, group),
        "packed": lambda: packed_hidden_states(model, copies, group).hidden,
        "shared": lambda: shared_prefix_hidden_states(model, [prompt], [group]).hidden,
    }
    if by_positions:
        layouts["positions"] = lambda: packed_by_positions(model, copies, group)
    warm = {name: step(model, run) for name, run in layouts.items()}
    reference = warm["padded"][2]
    for name, (_, _, gradient) in warm.items():
        difference = ((gradient - reference).norm() / reference.norm()).item()
        if difference > torch.finfo(torch.float32).eps ** 0.5:
            raise SystemExit(f"{name}: gradients differ from those of padding by {difference:.2g}")
    times = {name: [] for name in layouts}
    for _ in range(repeats):
        for name, run in layouts.items():
            times[name].append(step(model, run)[0])
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        ratio = seconds / medians["padded"]
        print(f"{len(prompt):>8}{name:>10}{warm[name][1]:>8}{seconds:>10.3f}{ratio:>10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--completions", type=int, nargs=2, default=[64, 64], help="shortest and longest")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--by-positions", action="store_true", help="also packed with the mask that transformers builds"
    )
    options = parser.parse_args()
    model = model_of(options.width, options.layers)
    low, high = options.completions
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32; Qwen3, {options.layers} layers"
    )
    print(f"of width {options.width}; {options.group} completions of {low} to {high} tokens")
    print(f"{'prompt':>8}{'layout':>10}{'tokens':>8}{'seconds':>10}{'x padded':>10}")
    for length in options.prompts:
        generator = torch.Generator().manual_seed(0)
        sizes = torch.linspace(low, high, options.group).round().int().tolist()
        prompt, *group = (torch.randint(1, 1024, (n,), generator=generator) for n in (length, *sizes))
        compare(model, prompt, group, options.repeats, options.by_positions)


if __name__ == "__main__":
    main()
