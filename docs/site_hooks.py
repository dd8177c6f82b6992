"""What mkdocs needs beyond the documents: pages of the repository's root, charts of benchmarks, the API's page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}  # fmt: skip
API = {
    "Train": ("deltawire.Publisher", "deltawire.PublishHandle", "deltawire.Published", "deltawire.Shard"),
    "Follow": (
        "deltawire.Replica",
        "deltawire.Synced",
        "deltawire.watch",
        "deltawire.wait_for_run",
        "deltawire.Watcher",
    ),
    "An adapter in training": ("deltawire.adapter", "deltawire.merged_weights"),
    "Without a run": ("deltawire.encode", "deltawire.decode"),
    "TRL and transformers": ("deltawire.trl.BucketTransfer", "deltawire.trl.DeltaSyncCallback"),
    "Detectors and optimizers": ("deltawire.trainer.detectors", "deltawire.trainer.adamw.DeltaAdamW"),
    "Write your own": (
        "deltawire.store.base.Store",
        "deltawire.testing",
        "deltawire.Target",
        "deltawire.Update",
        "deltawire.PartTarget",
        "deltawire.Staged",
    ),
    "Engines": (
        "deltawire.engines.live.ServerOptions",
        "deltawire.engines.live.Follower",
        "deltawire.engines.live.Bound",
        "deltawire.engines.live.Endpoint",
        "deltawire.engines.live.Engine",
        "deltawire.engines.live.Answer",
        "deltawire.engines.live.Rank",
        "deltawire.engines.live.Layer",
        "deltawire.engines.live.copy_of",
        "deltawire.engines.live.without_data",
        "deltawire.engines.live.common_problems",
        "deltawire.engines.live.write_all",
        "deltawire.engines.live.undo_all",
        "deltawire.engines.live.salted",
        "deltawire.engines.live.observe",
        "deltawire.engines.live.Record",
        "deltawire.engines.live.Adapters",
        "deltawire.engines.live.Loaded",
        "deltawire.engines.live.LoadingAdapter",
        "deltawire.engines.live.Arrangement",
        "deltawire.engines.live.lacks_tokenizer",
        "deltawire.engines.live.fingerprint",
        "deltawire.engines.access",
        "deltawire.engines.control",
        "deltawire.engines.names",
        "deltawire.engines.live.launch",
        "deltawire.engines.live.ahead",
    ),
    "Runs": (
        "deltawire.Run",
        "deltawire.runs",
        "deltawire.ListedRun",
        "deltawire.split_version",
        "deltawire.Manifest",
        "deltawire.Link",
        "deltawire.Summary",
        "deltawire.Tag",
        "deltawire.Heartbeat",
        "deltawire.Roster",
        "deltawire.latest_heartbeats",
        "deltawire.SyncRecord",
        "deltawire.host_and_port",
    ),
    "Weights": (
        "deltawire.checkout",
        "deltawire.State",
        "deltawire.Source",
        "deltawire.Checkpoint",
        "deltawire.FullFile",
        "deltawire.ModelView",
        "deltawire.checkout_folder",
        "deltawire.CurrentFolder",
        "deltawire.Schema",
        "deltawire.TensorSpec",
        "deltawire.Region",
        "deltawire.Change",
        "deltawire.StateDigest",
        "deltawire.digest_of",
    ),
    "What changed": (
        "deltawire.tensor_changes",
        "deltawire.TensorPart",
        "deltawire.step_sizes",
        "deltawire.Histogram",
        "deltawire.difference",
        "deltawire.TensorDifference",
        "deltawire.FileContents",
    ),
    "Maintenance": (
        "deltawire.verify",
        "deltawire.Verification",
        "deltawire.verify_derived",
        "deltawire.prune",
        "deltawire.Retention",
        "deltawire.PrunePlan",
        "deltawire.Keeper",
        "deltawire.KeeperOptions",
        "deltawire.KeptVersion",
        "deltawire.Deriver",
        "deltawire.costs",
    ),
    "Signatures": ("deltawire.SigningKey", "deltawire.Trust", "deltawire.delegate"),
    "Errors": ("deltawire.core.errors",),
}


def on_files(files: Files, config: Any) -> Files:
    for name, source in PAGES.items():
        # the front page has wide code, and needs no table of contents beside it
        head = "---\nhide: [toc]\n---\n" if name == "index.md" else ""
        files.append(File.generated(config, name, content=head + (ROOT / source).read_text()))
    files.append(File.generated(config, "api.md", content=api()))
    for chart in sorted((ROOT / "benchmarks" / "results").glob("*.svg")):
        files.append(File.generated(config, f"benchmarks/results/{chart.name}", content=chart.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository become links of the site."""
    if page.file.src_uri in PAGES:
        markdown = re.sub(r"\]\(docs/", "](", markdown).replace("](README.md)", "](index.md)")
    markdown = _FIGURE.sub(_framed, markdown)
    return markdown.replace("](../benchmarks/", "](benchmarks/").replace("](../SECURITY.md)", "](SECURITY.md)")


_FIGURE = re.compile(r"^Interactive: \[(.+?)\]\(((?:figures/)?\w+\.html)\).*$", re.M)


def _framed(found: re.Match[str]) -> str:
    """A figure right below the line that links to it."""
    return f'{found[0]}\n\n<iframe class="figure" src="{found[2]}" title="{found[1]}" loading="lazy"></iframe>'


def api() -> str:
    parts = [
        "# API",
        "From the docstrings. `import deltawire as dw` has every name that is shown as `deltawire.…` without a module; "
        "`deltawire.store` has what stores are made of, `deltawire.engines.live` what engines are made of. The command "
        "line, the page and all engines here use no others. They are provisional until trainers have been built on "
        "them: a name may still change, with a line in the changelog.",
    ]
    for title, names in API.items():
        parts += [f"## {title}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts)
