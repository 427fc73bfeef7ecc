"""What the site shows besides docs/: pages from elsewhere in the tree, the reference, and links that hold.

MkDocs calls the two functions whose names begin with ``on_`` (``hooks`` in mkdocs.yml). Pages are written for
who reads the tree; here their links are turned to where the site has the target. Files that are not pages
become plain names, or links into the repository once ``repo_url`` says where that is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Place in the site by place in the tree of what lies outside of docs/."""

OBJECTIVES = re.findall(r"^\| \[(\w+)\]", (DOCS / "objectives.md").read_text(encoding="utf-8"), re.MULTILINE)
"""Names of the objectives, from the table of their page."""

REFERENCE = {
    "losses": (
        "Losses",
        "gspo_kernels.fused_linear_policy_loss gspo_kernels.fused_policy_loss gspo_kernels.policy_loss "
        "gspo_kernels.policy_coefficients gspo_kernels.normalizer gspo_kernels.explain_schedule "
        "gspo_kernels.prefetch gspo_kernels.LossOutput gspo_kernels.Parallel "
        "gspo_kernels.ScoreCentering gspo_kernels.RatioWeight "
        "gspo_kernels.fused_linear_distillation_loss gspo_kernels.distillation_loss "
        "gspo_kernels.DistillationOutput",
    ),
    "logprobs": (
        "Log-probs",
        "gspo_kernels.linear_token_logprobs gspo_kernels.token_logprobs gspo_kernels.TokenLogprobs "
        "gspo_kernels.selected_logprobs gspo_kernels.linear_selected_logprobs gspo_kernels.SelectedLogprobs "
        "gspo_kernels.LoRAHead gspo_kernels.kept_mask gspo_kernels.sampling_mask "
        "gspo_kernels.set_batch_invariant gspo_kernels.is_batch_invariant gspo_kernels.enable_tensor_maps",
    ),
    "advantages": (
        "Advantages and weights",
        "gspo_kernels.advantages gspo_kernels.rollout_weights gspo_kernels.off_policy_mask",
    ),
    "objectives": (
        "Objectives",
        " ".join(f"gspo_kernels.{name}" for name in OBJECTIVES)
        + " gspo_kernels.objectives.base.Objective gspo_kernels.objectives.base.PolicyBatch "
        "gspo_kernels.objectives.base.ObjectiveLoss gspo_kernels.objectives.check",
    ),
    "layouts": ("Layouts", "gspo_kernels.models.layouts"),
    "rewards": ("Ready-made rewards", "gspo_kernels.rewards"),
    "trainer": (
        "The bundled trainer",
        "gspo_kernels.trainer.loop.GSPOTrainer gspo_kernels.trainer.config.TrainConfig "
        "gspo_kernels.trainer.config.load_config",
    ),
}
"""Titles and contents of the pages of the reference; the text is the docstrings'."""

LINK = re.compile(
    r"^```.*?^```|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)|`[^`\n]+`",
    re.DOTALL | re.MULTILINE,
)
"""A link, or code, in which there are none."""


def reference_page(name: str) -> str:
    """The text of a page of the reference, for mkdocstrings."""
    title, names = REFERENCE[name]
    return "\n\n".join((f"# {title}", *(f"::: {one}" for one in names.split()))) + "\n"


def in_site(path: Path) -> str | None:
    """Where the site has a file of the tree; None if it doesn't."""
    inside = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    for place, source in OUTSIDE.items():
        if source == inside:
            return place
    if inside.startswith("docs/") and path.suffix in (".md", ".png", ".svg"):
        return inside.removeprefix("docs/")
    return None


def turned(markdown: str, place: str, repository: str | None = None) -> str:
    """The text of a page with links that hold in the site, and code of its tables as it is meant.

    Args:
        markdown: as it is in the tree.
        place: of the page in the site.
        repository: address under which files that are not pages can be read.
    """
    source = ROOT / OUTSIDE[place] if place in OUTSIDE else DOCS / place

    def turn(link: re.Match[str]) -> str:
        image, text, target, anchor = link.group(1), link.group(2), link.group(3), link.group(4) or ""
        if re.fullmatch("`[^`\n]+`", link.group(0)):  # for | in code GitHub wants \|, the site doesn't
            return link.group(0).replace("\\|", "|")
        if not target or re.match(r"\w+:", target):  # code in a block, an anchor of this page, or elsewhere
            return link.group(0)
        path = (source.parent / target).resolve()
        if path.parent == ROOT / "gspo_kernels" / "objectives" and text in OBJECTIVES:
            return f"[{text}](reference/objectives.md#gspo_kernels.{text})"
        found = in_site(path)
        if found is not None:
            link_there = f"[{text}]({posixpath.relpath(found, posixpath.dirname(place) or '.')}{anchor})"
            # a plot on a phone wants to be opened by itself
            return f"[!{link_there}]{link_there.removeprefix(f'[{text}]')}" if image else link_there
        if repository is not None and path.is_relative_to(ROOT):
            return f"{image}[{text}]({repository.rstrip('/')}/blob/HEAD/{path.relative_to(ROOT).as_posix()})"
        return text

    return LINK.sub(turn, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside of docs/, and the reference."""
    from mkdocs.structure.files import File

    for place, source in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for name in REFERENCE:
        files.append(File.generated(config, f"reference/{name}.md", content=reference_page(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn the links of every page of the tree."""
    place = page.file.src_uri
    if place == "index.md":
        page.meta["hide"] = ["navigation"]  # it would be the only entry
    return markdown if place.startswith("reference/") else turned(markdown, place, config.repo_url)
