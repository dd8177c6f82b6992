"""Were samples made by the version in their label? Computes their log-probabilities again, to compare.

    python benchmarks/_wordle_labels.py FOLDER RUN MODEL --device cuda --count 300

Of the completions that an arm of wordle_gpu.py noted, those are taken that one version made. Its weights are checked
out of the run, and so are versions before and after it: the log-probabilities that the server reported should fit those
of the version that it named, and fit others the worse the further away they are. What remains of a difference under the
named version is the arithmetic: vLLM computes in bf16 with its own kernels, this in fp32 from the same bf16 weights.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import deltawire as dw
from _wordle_figures import Lines
from deltawire_wordle.processes import say

AWAY = (-16, -4, -2, -1, 0, 1, 2, 4, 16)
AT_ONCE = 16


def versions_of(completion: dict[str, Any]) -> list[int]:
    return [span["version"] for span in completion["versions"] or ()]


def labels(folder: Path) -> dict[str, int]:
    """Whether the label of a group is the oldest version that had a part in any of its games."""
    oldest: dict[tuple[int, int], int] = {}
    for found in Lines(folder / "completions.jsonl").more():
        key = found["worker"], found["group"]
        oldest[key] = min([*versions_of(found), oldest.get(key, 1 << 30)])
    groups = {(line["worker"], line["group"]): line["label"] for line in Lines(folder / "groups.jsonl").more()}
    return {"groups": len(groups), "wrong": sum(oldest.get(key) != label for key, label in groups.items())}


def chosen(folder: Path, count: int, versions: int) -> dict[int, list[dict[str, Any]]]:
    """By version: completions of so many versions, spread over the run."""
    by_version = defaultdict(list)
    for found in Lines(folder / "completions.jsonl").more():
        if len({*versions_of(found)}) == 1 and found["tokens"]:
            by_version[versions_of(found)[0]].append(found)
    wanted = sorted(by_version)
    wanted = [wanted[len(wanted) * at // versions] for at in range(versions)] if len(wanted) > versions else wanted
    dice = random.Random(0)
    each = -(-count // max(1, len(wanted)))
    return {v: dice.sample(by_version[v], min(each, len(by_version[v]))) for v in wanted}


@torch.no_grad()
def logprobs(model: Any, completions: list[dict[str, Any]]) -> list[list[float]]:
    """Of the sampled tokens of each."""
    result, device = [], next(model.parameters()).device
    for at in range(0, len(completions), AT_ONCE):
        some = completions[at : at + AT_ONCE]
        rows = [one["prompt"] + one["tokens"] for one in some]
        longest = max(map(len, rows))
        # on the right: what follows a token does not change it
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        logits = model(input_ids=ids).logits.float()
        for number, one in enumerate(some):
            begin, end = len(one["prompt"]), len(rows[number])
            scores = torch.log_softmax(logits[number, begin - 1 : end - 1], -1)
            result.append(scores.gather(1, ids[number, begin:end, None])[:, 0].tolist())
    return result


def check(given: argparse.Namespace) -> dict[str, Any]:
    run = dw.Run.open(given.run)
    there = {version: run.manifest(version).digest for version in run.listed()}
    found = chosen(given.folder, given.count, given.versions)
    # a sync that changed nothing, as the first one, is no other version
    pairs = sorted(
        {
            (v + away, v)
            for v in found
            for away in AWAY
            if v + away in there and (away == 0 or there[v + away] != there.get(v))
        }
    )
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, trust_remote_code=False)
    model = model.to(given.device).eval()
    # in the run's own dtype a version is patched where it lies
    weights = {tensor.name: model.get_parameter(tensor.name).detach().bfloat16() for tensor in run.schema.tensors}
    errors: dict[int, list[float]] = defaultdict(list)
    by_completion: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    replica, at = dw.Replica(given.run, heartbeat=0), None
    for under, version in pairs:
        if under != at:
            at = replica.sync(weights, under)
            with torch.no_grad():
                for name, tensor in weights.items():
                    model.get_parameter(name).copy_(tensor)
        for number, (one, computed) in enumerate(zip(found[version], logprobs(model, found[version]), strict=True)):
            differences = [abs(a - b) for a, b in zip(computed, one["logprobs"], strict=True)]
            errors[under - version] += differences
            by_completion[version, number][under - version] = fmean(differences)
    whole = [fits for fits in by_completion.values() if 0 in fits]
    return {
        **labels(given.folder),
        "completions": len(whole),
        "versions": len(found),
        "tokens": len(errors[0]),
        "mean_difference": {str(away): fmean(values) for away, values in sorted(errors.items()) if values},
        "largest_under_the_label": max(errors[0], default=None),
        "fits_best_against": {
            str(away): [
                sum(fits[0] < fits[away] for fits in whole if away in fits),
                sum(away in fits for fits in whole),
            ]
            for away in AWAY
            if away
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run")
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--versions", type=int, default=12, help="that completions are taken of")
    say("checked", **check(parser.parse_args()))


if __name__ == "__main__":
    main()
