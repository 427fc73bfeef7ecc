"""Plots and tables of the page, all of them from the results file."""

import re
from statistics import mean

from gspo_kernels.trainer.report import BLUE, GRID, INK, ORANGE, smoothed

COLORS = {"GRPO": ORANGE, "GSPO": BLUE, "GSPO, GRPO's range": "#1b7837"}
PAPER_CLIPPED = {"GRPO": 0.0013, "GSPO": 0.15}
"""Shares of clipped tokens in the paper's figure 2."""
NAMES = {"dense": "Dense", "moe": "MoE"}
LAST = 10


def write(records, output):
    """Draw both plots into a directory, and renew the tables of its page if there is one."""
    runs = runs_of(records)
    probes = [record for record in records if record["kind"] == "probe"]
    draw_training(runs, output / "training.png")
    draw_perturbation(runs, probes, output / "perturbation.png")
    page = output / "README.md"
    if page.exists():
        page.write_text(renewed(page.read_text(encoding="utf-8"), records), encoding="utf-8")


def runs_of(records):
    """Return the training runs: by model, source of old log-probs, objective and seed."""
    sources, objectives = ["exact", "bf16", "noise", "routing"], list(COLORS)
    return sorted(
        (record for record in records if record["kind"] == "run"),
        key=lambda run: (
            list(NAMES).index(run["model"]),
            sources.index(run["old_logprobs"].split("=")[0]),
            objectives.index(run["objective"]),
            run["seed"],
        ),
    )


def renewed(text, records):
    """Return the page with what stands between its markers made anew."""
    runs = runs_of(records)
    probes = [record for record in records if record["kind"] == "probe"]
    tables = {
        "settings": settings_line(records),
        "runs": runs_table(runs),
        "probes": probes_table(probes),
        "experts": experts_table(runs),
    }
    for name, table in tables.items():
        found = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(
            found, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL
        )
    return text


def settings_line(records):
    """Return what was run where, and how long it took."""
    settings = next(record for record in records if record["kind"] == "settings")
    seeds = sorted({record["seed"] for record in records if record["kind"] == "run"})
    seconds = sum(record.get("cpu_seconds", 0.0) for record in records)
    count = sum(record["kind"] == "run" for record in records)
    return (
        f"{count} runs of {settings['steps']} rollouts ({settings['prompts']} prompts, 8 completions each, 4 "
        f"minibatches), seeds {', '.join(map(str, seeds))}. Processor: {settings['machine']}; PyTorch "
        f"{settings['torch']}. All of it took {seconds / 60:.1f} minutes of processor time, on a machine "
        "that other work shared."
    )


def runs_table(runs):
    """Return one row per model, source and objective, with the values of the seeds."""
    rows = []
    for (kind, source, objective), group in grouped(runs, "model", "old_logprobs", "objective").items():
        rows.append(
            [
                NAMES[kind],
                source,
                objective,
                values([mean(run["reward"][:LAST]) for run in group], ".3f"),
                values([mean(run["reward"][-LAST:]) for run in group], ".3f"),
                " / ".join("{:.1%} to {:.1%}".format(*run["greedy_accuracy"]) for run in group),
                " / ".join("{:.1%} to {:.1%}".format(*run["sampled_accuracy"]) for run in group),
                *(f"{clipped(group, number):.2%}" for number in (0, 3)),
                f"{clipped(group):.2%}",
            ]
        )
    heads = ["model", "old log-probs", "objective", f"reward, first {LAST}", f"last {LAST}"]
    heads += ["held-out, greedy", "held-out, sampled", "clipped, minibatch 1", "minibatch 4", "all"]
    return markdown(heads, rows)


def probes_table(probes):
    """Return one row per model, source and length, means over seeds."""
    entries = [{**entry, "model": kind} for kind in NAMES for entry in entries_of(probes, kind)]
    rows = []
    for (kind, source, length), group in grouped(entries, "model", "old_logprobs", "length").items():
        row = [NAMES[kind], source, str(length)]
        row += [f"{mean(entry[name] for entry in group):.1e}" for name in ("token_sd", "sequence_sd")]
        changed = [entry["experts_changed"] for entry in group]
        row.append("-" if None in changed else f"{mean(changed):.1%}")
        by_objective = grouped(group, "objective")
        row += [f"{mean(e['clip_tokens'] for e in found):.0%}" for found in by_objective.values()]
        row += [f"{mean(e['cosine'] for e in found):.4f}" for found in by_objective.values()]
        rows.append(row)
    objectives = list(grouped(entries, "objective"))
    heads = ["model", "old log-probs", "tokens", "sd per token", "sd of log s", "experts changed"]
    heads += [f"clipped: {name}" for (name,) in objectives] + [f"cosine: {name}" for (name,) in objectives]
    return markdown(heads, rows)


def entries_of(probes, kind):
    """Return the entries of one model's probes, lengths of a source together."""
    entries = [entry for probe in probes if probe["model"] == kind for entry in probe["entries"]]
    sources = list(grouped(entries, "old_logprobs"))
    return sorted(entries, key=lambda entry: (sources.index((entry["old_logprobs"],)), entry["length"]))


def experts_table(runs):
    """Return the share of activated experts that changed, by minibatch, means over steps and seeds."""
    rows = []
    of_experts = [run for run in runs if run["experts_changed"]]
    for (source, objective), group in grouped(of_experts, "old_logprobs", "objective").items():
        steps = [step for run in group for step in run["experts_changed"] if step]
        shares = [mean(step[n] for step in steps) for n in range(4)] if steps else []
        rows.append([source, objective, *(f"{share:.2%}" for share in shares)])
    return markdown(["old log-probs", "objective", "no update", "1 update", "2 updates", "3 updates"], rows)


def clipped(runs, minibatch=None):
    """Return the share of clipped tokens, over the steps of all runs: of one minibatch, or of all."""
    steps = [step for run in runs for step in run["clip_tokens"]]
    return mean(mean(step) if minibatch is None else step[minibatch] for step in steps)


def grouped(records, *names):
    """Return the records by the values of some keys, in the order of their first appearance."""
    groups = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return groups


def values(numbers, form):
    """Return the values of the seeds."""
    return " / ".join(format(number, form) for number in numbers)


def markdown(heads, rows):
    """Return a table; everything but its first columns of words is right-aligned."""
    rule = ["---:" if re.match(r"[\d-]", cell) else "---" for cell in (rows or [heads])[0]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def draw_training(runs, path):
    """Draw reward, clipping and the effect of the sources for both models."""
    figure, axes = panels(2, 3, (13, 7))
    for row, kind in zip(axes, NAMES, strict=True):
        of_kind = [run for run in runs if run["model"] == kind]
        exact = [run for run in of_kind if run["old_logprobs"] == "exact"]
        draw_rewards(row[0], exact, kind)
        draw_clipping(row[1], exact, kind)
        draw_sources(row[2], of_kind, kind)
    figure.savefig(path)


def draw_rewards(ax, runs, kind):
    """Draw the reward of every run, smoothed, and the mean of the seeds."""
    title(ax, f"{NAMES[kind]}: reward")
    for (objective,), group in grouped(runs, "objective").items():
        curves = [smoothed(run["reward"], 5) for run in group]
        x = range(1, len(curves[0]) + 1)
        for curve in curves:
            ax.plot(x, curve, color=COLORS[objective], alpha=0.3, linewidth=1)
        means = [mean(at_step) for at_step in zip(*curves, strict=True)]
        ax.plot(x, means, color=COLORS[objective], linewidth=2, label=objective)
    ax.set_xlabel("step", color=INK)
    legend(ax, loc="upper left")


def draw_clipping(ax, runs, kind):
    """Draw the clipped share of the tokens, and the paper's."""
    title(ax, f"{NAMES[kind]}: clipped share of tokens")
    for (objective,), group in grouped(runs, "objective").items():
        by_step = zip(*(run["clip_tokens"] for run in group), strict=True)
        shares = smoothed([mean(mean(step) for step in steps) for steps in by_step], 5)
        color = COLORS[objective]
        x = range(1, len(shares) + 1)
        drawn = [share or float("nan") for share in shares]  # a log scale has no zero
        ax.plot(x, drawn, color=color, linewidth=2, label=f"{objective}: {clipped(group):.2%}")
        if objective in PAPER_CLIPPED:
            paper = PAPER_CLIPPED[objective]
            ax.axhline(paper, color=color, linewidth=1, linestyle=":", label=f"paper: {paper:.2%}")
    ax.set_yscale("log")
    ax.set_ylim(1e-4, 1)
    ax.set_xlabel("step", color=INK)
    legend(ax, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, columnspacing=1)


def draw_sources(ax, runs, kind):
    """Draw the last rewards of every run, by where its old log-probs came from."""
    title(ax, f"{NAMES[kind]}: last rewards, by old log-probs")
    sources = [source for (source,) in grouped(runs, "old_logprobs")]
    for number, ((objective,), group) in enumerate(grouped(runs, "objective").items()):
        x = [sources.index(run["old_logprobs"]) + 0.2 * (number - 1) for run in group]
        y = [mean(run["reward"][-LAST:]) for run in group]
        ax.scatter(x, y, color=COLORS[objective], s=36, label=objective)
    ax.set_xticks(range(len(sources)), sources)
    ax.set_xlim(-0.5, max(len(sources), 1) - 0.5)
    legend(ax, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, columnspacing=1)


def draw_perturbation(runs, probes, path):
    """Draw the cosine between perturbed and exact gradients, and how experts change."""
    figure, axes = panels(1, 3, (13, 5))
    for ax, kind in zip(axes, NAMES, strict=False):
        draw_cosines(ax, entries_of(probes, kind))
        title(ax, f"{NAMES[kind]}: cosine with the exact gradient")
    draw_experts(axes[2], [run for run in runs if run["experts_changed"] and run["old_logprobs"] == "exact"])
    figure.savefig(path)


def draw_cosines(ax, entries):
    """Draw a dot per seed and objective, one row for each source and length."""
    rows = list(grouped(entries, "old_logprobs", "length"))
    objectives = [name for (name,) in grouped(entries, "objective")]
    for number, name in enumerate(objectives):
        found = [entry for entry in entries if entry["objective"] == name]
        y = [rows.index((entry["old_logprobs"], entry["length"])) + 0.24 * (number - 1) for entry in found]
        x = [entry["cosine"] for entry in found]
        ax.scatter(x, y, s=24, alpha=0.8, color=COLORS[name], label=name)
    ax.set_yticks(range(len(rows)), [f"{source}, {length} tokens" for source, length in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(right=1.02)
    ax.set_xlabel("cosine", color=INK)
    legend(ax, loc="upper center", bbox_to_anchor=(0.4, -0.11), ncols=3, columnspacing=1)


def draw_experts(ax, runs):
    """Draw the share of experts that differ after three updates on the same rollout."""
    title(ax, "Experts changed after 3 updates")
    for (objective,), group in grouped(runs, "objective").items():
        by_step = zip(*(run["experts_changed"] for run in group), strict=True)
        last = [[step[-1] for step in steps if step] for steps in by_step]
        shares = smoothed([mean(found) if found else None for found in last], 5)
        ax.plot(range(1, len(shares) + 1), shares, color=COLORS[objective], linewidth=2, label=objective)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    ax.set_xlabel("step", color=INK)
    legend(ax, loc="best")


def panels(rows, columns, size):
    """Return a figure and its axes in the style of the trainer's plot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns)
    for ax in axes.flatten():
        ax.grid(color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(colors=INK, length=0)
        ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return figure, axes


def title(ax, text):
    """Set a panel's title, in the style of the trainer's plot."""
    ax.set_title(text, loc="left", fontsize=10.5, color=INK, pad=8)


def legend(ax, **options):
    """Add a legend if there is anything to tell apart."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8, labelcolor=INK, **options)
