"""Plots and tables of ``docs/stability.md``, all of them from the results file."""

import re
from pathlib import Path
from statistics import mean, stdev

from examples.stability.study import Setting, setting_of
from gspo_kernels.plots import BLUE, GRID, INK, ORANGE, style

DOCS = Path(__file__).parents[2] / "docs"
LAST = 32
"""The final reward is the mean over this many updates at the end of a run."""
MODELS = {"dense": "dense", "moe": "MoE"}
BASELINE = "baseline: GSPO, 4 updates"
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t at 97.5%, for 1 to 9 degrees of freedom."""


def summary(record):
    """Return a run's rewards, whether it collapsed, and the means of its curves.

    "final", "best" and "lowest" are means over ``LAST`` updates, "reward" over the whole run.
    """
    reward = record["reward"]
    window = max(1, min(len(reward), LAST // record["updates"]))
    smooth = [mean(reward[i : i + window]) for i in range(len(reward) - window + 1)]
    return {
        "reward": mean(reward),
        "best": max(smooth),
        "lowest": min(smooth),
        "final": smooth[-1],
        "collapsed": collapsed([reward[0], *smooth]),
        **{name: mean(record[name]) for name in ("clipped", "spread", "mismatch", "experts_changed", "kept")},
    }


def collapsed(reward):
    """Return whether a smoothed reward ends below half of its best."""
    return reward[-1] < max(reward) / 2


def varied(record):
    """Return in words what a run changes from the baseline; the same for all seeds and models."""
    setting, baseline = setting_of(record), Setting()
    words = {
        "objective": lambda value: value,
        "old": lambda value: "engine's old log-probs",
        "head": lambda value: "head in bf16",
        "updates": lambda value: f"{value} update{'s' if value > 1 else ''}",
        "correction": lambda value: value,
        "replay": lambda value: "routing replayed",
        "learning_rate": lambda value: f"learning rate {value:g}",
        "warm_up": lambda value: "warm-up",
    }
    changed = [name for name in words if getattr(setting, name) != getattr(baseline, name)]
    return ", ".join(words[name](getattr(setting, name)) for name in changed) or BASELINE


def by_change(records):
    """Return the summaries of all runs, by what their setting changes and then by (model, seed)."""
    found = {}
    for record in records:
        found.setdefault(varied(record), {})[record["model"], record["seed"]] = summary(record)
    return found


def against_baseline(runs, baseline):
    """Return each run's mean reward minus the baseline's with the same model and seed, by (model, seed)."""
    return {pair: runs[pair]["reward"] - baseline[pair]["reward"] for pair in runs if pair in baseline}


def interval(values):
    """Return the mean of values, and half the width of its 95% interval (None for fewer than two values)."""
    half = STUDENT[len(values) - 2] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return mean(values), half


def table(records):
    """Return a table with a row per setting: means over the seeds and the differences from the baseline."""
    lines = [
        "| changed | final reward, dense | MoE | lowest | collapsed | clipped "
        "| against the baseline | lower in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    settings = by_change(records)
    for change, runs in settings.items():
        finals = []
        for model in MODELS:
            final = [run["final"] for (its_model, _), run in runs.items() if its_model == model]
            finals.append(f"{mean(final):.2f} ({min(final):.2f} to {max(final):.2f})" if final else "")
        lowest, clipped = (mean(run[name] for run in runs.values()) for name in ("lowest", "clipped"))
        fallen = sum(run["collapsed"] for run in runs.values())
        cells = [change, *finals, f"{lowest:.2f}", f"{fallen} of {len(runs)}", f"{clipped:.1%}"]
        differences = list(against_baseline(runs, settings[BASELINE]).values())
        middle, half = interval(differences)
        if change == BASELINE:
            cells += ["", ""]
        elif half is None:
            cells += [f"{middle:+.3f}", f"{sum(d < 0 for d in differences)} of {len(differences)}"]
        else:
            bold = "**" if abs(middle) > half else ""
            cells += [
                f"{bold}{middle:+.3f} ± {half:.3f}{bold}",
                f"{sum(d < 0 for d in differences)} of {len(differences)}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def facts(records):
    """Return the number of runs, the hours they took, and how far engine and trainer are apart, as text."""
    hours = sum(record["cpu_seconds"] for record in records) / 3600
    summaries = {model: [summary(r) for r in records if r["model"] == model] for model in MODELS}
    apart = " and ".join(
        f"{mean(run['mismatch'] for run in runs):.4f} ({MODELS[model]})" for model, runs in summaries.items()
    )
    changed = mean(run["experts_changed"] for run in summaries["moe"])
    fallen = sum(run["collapsed"] for runs in summaries.values() for run in runs)
    return (
        f"{len(records)} runs, {len({record['seed'] for record in records})} seeds, {hours:.1f} hours of one "
        f"core; {fallen} collapsed. Engine and trainer differ by {apart} nats per token in the mean, and in "
        f"{changed:.1%} of the chosen experts."
    )


def write(records, docs=DOCS):
    """Renew the page, and draw its plots."""
    page = docs / "stability.md"
    page.write_text(renewed(page.read_text(encoding="utf-8"), records), encoding="utf-8")
    draw(records, docs)


def renewed(text, records):
    """Return the page with new text between its markers."""
    for name, new in (("facts", facts(records)), ("runs", table(records))):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, new=new: f"{match[1]}{new}\n{match[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


def draw(records, docs):
    """Draw three plots: the cost of every setting, reward by update, and the share that is clipped."""
    from matplotlib.figure import Figure

    settings = [change for change in by_change(records) if change != BASELINE]
    plots = {
        "stability_cost.png": (_cost, (10, 0.3 * len(settings) + 1.2), 1),
        "stability_reward.png": (_rewards, (13, 4), len(CURVES)),
        "stability_clipped.png": (_clipping, (13, 4), 2),
    }
    for name, (plot, size, columns) in plots.items():
        figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
        plot(figure.subplots(1, columns), records)
        figure.savefig(docs / name)


def _cost(axis, records):
    """Draw each run's mean reward minus that of its baseline, and the mean of these differences."""
    settings = by_change(records)
    baseline = settings.pop(BASELINE)
    style(axis, "What each change costs or gains", "mean reward over the run, minus the baseline's")
    for row, runs in enumerate(settings.values()):
        differences = against_baseline(runs, baseline)
        for model, color in zip(MODELS, (BLUE, ORANGE), strict=True):
            dots = [value for (its_model, _), value in differences.items() if its_model == model]
            label = f"a run, {MODELS[model]}" if row == 0 else None
            axis.plot(dots, [row] * len(dots), "o", color=color, alpha=0.5, markersize=5, label=label)
        middle, half = interval(list(differences.values()))
        label = "mean and its 95% interval" if row == 0 else None
        axis.errorbar(middle, row, xerr=half, fmt="|", color=INK, capsize=4, label=label)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(settings)), settings)
    axis.invert_yaxis()
    axis.legend(frameon=False, loc="upper left", fontsize=9, labelcolor=INK)


ENGINE, FAST = "engine's old log-probs", "learning rate 0.004"
CURVES = {
    "Objective": (BASELINE, "GRPO", "M2PO", "CISPO"),
    "Updates per rollout": (
        BASELINE,
        "1 update",
        "1 update, learning rate 0.0005",
        "16 updates",
        "GRPO, 16 updates",
    ),
    "Old log-probs and learning rate": (BASELINE, ENGINE, FAST, f"{ENGINE}, {FAST}"),
}
"""The settings that each panel of the plot of rewards compares."""
COLORS = (INK, ORANGE, BLUE, "#1b7837", "#762a83")


def _lines(axis, records, changes, curve, colors=COLORS):
    """Draw a line for each setting: the mean over its runs, at the update where a rollout was sampled."""
    for change, color in zip(changes, colors, strict=False):
        runs = [record for record in records if varied(record) == change]
        if runs:
            values = [mean(several) for several in zip(*(run[curve] for run in runs), strict=False)]
            updates = [runs[0]["updates"] * rollout for rollout in range(len(values))]
            axis.plot(updates, values, color=color, label=change, linewidth=1.6)
    axis.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left")


def _rewards(axes, records):
    """Draw the reward by update, as the mean over both models and all seeds."""
    for axis, (title, changes) in zip(axes, CURVES.items(), strict=True):
        style(axis, title, "updates")
        _lines(axis, records, changes, "reward")
        axis.set_ylim(0, 1.35)
        axis.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes[0].set_ylabel("reward: share of right digits", color=INK)


def _clipping(axes, records):
    """Draw the share of clipped tokens, and how far the engine's log-probs move a sequence's ratio."""
    style(axes[0], "Tokens that a clip leaves out of the gradient", "updates")
    _lines(axes[0], records, (BASELINE, ENGINE, "16 updates", "GRPO", "M2PO"), "clipped")
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0].set_ylim(0, 0.8)
    style(axes[1], "Engine's old log-probs: deviation of log s before the first update", "updates")
    for (model, name), color in zip(MODELS.items(), (BLUE, ORANGE), strict=True):
        of_model = [record for record in records if record["model"] == model]
        _lines(axes[1], of_model, (ENGINE,), "spread", (color,))
        axes[1].lines[-1].set_label(name)
    axes[1].axhspan(3e-4, 4e-4, color=GRID, label="ends of GSPO's clip range")
    axes[1].set_yscale("log")
    axes[1].set_ylim(1e-4, 1e-1)
    axes[1].legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left")
