"""Plots and tables of ``docs/stability.md``, all of them from the results file."""

import re
from statistics import mean

from examples.stability.study import Setting
from gspo_kernels.trainer.report import BLUE, GRID, INK, ORANGE

WINDOW = 8
"""Rollouts at the end of a run that its final reward is the mean of, at the least."""
NAMES = {"dense": "dense", "moe": "mixture of experts"}
BASELINE = "the baseline"


def summary(record):
    """What a run comes down to: its best and final reward, whether it collapsed, and means of its curves."""
    reward = record["reward"]
    window = max(1, min(WINDOW, len(reward) // 4))
    smooth = [mean(reward[i : i + window]) for i in range(len(reward) - window + 1)]
    return {
        "best": max(smooth),
        "final": smooth[-1],
        "collapsed": collapsed(smooth),
        "clipped": mean(record["clipped"]),
        "spread": mean(record["spread"]),
        "mismatch": mean(record["mismatch"]),
        "experts_changed": mean(record["experts_changed"]),
    }


def collapsed(reward):
    """Whether a smoothed reward falls below half of its best and stays there."""
    best = max(range(len(reward)), key=reward.__getitem__)
    return reward[-1] < reward[best] / 2


def varied(record):
    """What a run changes of the baseline, in words; the same for all seeds and models."""
    baseline = Setting()
    changed = {
        name: record[name]
        for name in vars(baseline)
        if name not in ("model", "seed") and record[name] != getattr(baseline, name)
    }
    words = {
        "objective": lambda value: value,
        "old": lambda value: "old log-probs from the engine",
        "head": lambda value: "head in bf16",
        "updates": lambda value: f"{value} update{'s' if value > 1 else ''} per rollout",
        "correction": lambda value: value,
        "replay": lambda value: "routing replayed",
        "learning_rate": lambda value: f"learning rate {value:g}",
    }
    return ", ".join(words[name](value) for name, value in changed.items()) or BASELINE


def table(records):
    """A row for each setting: of each model how many runs collapsed, and means over the seeds."""
    lines = [
        "| changed | model | runs | collapsed | best reward | final reward | clipped | spread of log s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for change in dict.fromkeys(varied(record) for record in records):
        for model, name in NAMES.items():
            runs = [summary(r) for r in records if varied(r) == change and r["model"] == model]
            if not runs:
                continue
            numbers = {key: mean(run[key] for run in runs) for key in runs[0]}
            final = [run["final"] for run in runs]
            lines.append(
                f"| {change} | {name} | {len(runs)} | {sum(run['collapsed'] for run in runs)} | "
                f"{numbers['best']:.3f} | {numbers['final']:.3f} ({min(final):.3f} to {max(final):.3f}) | "
                f"{numbers['clipped']:.1%} | {numbers['spread']:.1e} |"
            )
    return "\n".join(lines)


def facts(records):
    """How many runs there are, what they took, and how far engine and trainer lie apart."""
    hours = sum(record["cpu_seconds"] for record in records) / 3600
    seeds = sorted({record["seed"] for record in records})
    apart = {
        model: mean(summary(r)["mismatch"] for r in records if r["model"] == model)
        for model in NAMES
        if any(r["model"] == model for r in records)
    }
    changed = mean(summary(r)["experts_changed"] for r in records if r["model"] == "moe")
    distance = " and ".join(f"{value:.1e} ({NAMES[model]})" for model, value in apart.items())
    return (
        f"{len(records)} runs, seeds {seeds[0]} to {seeds[-1]}, {hours:.1f} hours of one core. The engine's "
        f"log-probs lie {distance} nats from the trainer's in the mean over tokens, and {changed:.1%} of its "
        "experts differ."
    )


def write(records, directory):
    """Renew the page of a directory, and draw its plots."""
    page = directory / "README.md"
    page.write_text(renewed(page.read_text(encoding="utf-8"), records), encoding="utf-8")
    draw(records, directory)


def renewed(text, records):
    """The page with what stands between its markers made anew."""
    for name, new in (("facts", facts(records)), ("runs", table(records))):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, new=new: f"{match[1]}{new}\n{match[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


def draw(records, directory):
    """Three plots: reward by update, final reward by setting, and what clips before anything was learned."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK})
    changes = list(dict.fromkeys(varied(record) for record in records))
    figures = {
        "stability_reward.png": (_reward, (11, 4)),
        "stability_final.png": (_final, (11, 0.28 * len(changes) + 1.2)),
        "stability_spread.png": (_spread, (11, 4)),
    }
    for name, (plot, size) in figures.items():
        figure, axes = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
        for axis, model in zip(axes, NAMES, strict=True):
            plot(axis, [record for record in records if record["model"] == model], changes)
            axis.set_title(NAMES[model])
            axis.grid(color=GRID)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        if plot is not _final:
            handles = axes[0].get_legend_handles_labels()
            figure.legend(*handles, frameon=False, fontsize=8, loc="outside right center")
        figure.savefig(directory / name, dpi=150)
        plt.close(figure)


SHOWN = (BASELINE, "GRPO", "CISPO", "M2PO", "old log-probs from the engine", "16 updates per rollout")
COLORS = dict(zip(SHOWN, (INK, ORANGE, "#1b7837", "#762a83", BLUE, "#b2182b"), strict=True))


def _reward(axis, records, changes):
    """Mean over the seeds, by update."""
    for change in SHOWN:
        runs = [record for record in records if varied(record) == change]
        if runs:
            length = min(len(run["reward"]) for run in runs)
            curve = [mean(run["reward"][i] for run in runs) for i in range(length)]
            axis.plot(
                [runs[0]["updates"] * (i + 1) for i in range(length)],
                curve,
                color=COLORS[change],
                label=change,
            )
    axis.set_xlabel("updates")
    axis.set_ylabel("reward: share of right tokens")
    axis.set_ylim(0, 1)


def _final(axis, records, changes):
    """A dot for each seed; a cross for a run that collapsed."""
    for row, change in enumerate(changes):
        for run in (summary(record) for record in records if varied(record) == change):
            axis.plot(
                run["final"],
                row,
                "x" if run["collapsed"] else "o",
                color=ORANGE if run["collapsed"] else BLUE,
            )
    axis.set_yticks(range(len(changes)), changes)
    axis.set_ylim(len(changes) - 0.5, -0.5)
    axis.set_xlim(0, 1.03)
    axis.set_xlabel("final reward, a point for each seed")


def _spread(axis, records, changes):
    """The standard deviation of log s before the first update beside the clip range, by rollout."""
    for change in SHOWN:
        runs = [r for r in records if varied(r) == change and max(r["spread"]) > 1e-7]
        if runs:
            length = min(len(run["spread"]) for run in runs)
            curve = [mean(run["spread"][i] for run in runs) for i in range(length)]
            axis.plot(
                [runs[0]["updates"] * (i + 1) for i in range(length)],
                curve,
                color=COLORS[change],
                label=change,
            )
    axis.axhspan(3e-4, 4e-4, color=GRID, label="GSPO's clip range")
    axis.set_yscale("log")
    axis.set_ylim(1e-5, 1e-1)
    axis.set_xlabel("updates")
    axis.set_ylabel("spread of log s before the first update")
