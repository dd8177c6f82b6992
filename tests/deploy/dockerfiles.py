"""As much of a Dockerfile's language as the files under deploy/ use."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Dockerfile:
    path: Path
    instructions: tuple[tuple[str, str], ...]
    # in order, such as ("RUN", "pip install …")

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
        pairs = (line.split(None, 1) for line in joined.splitlines() if line.strip())
        return cls(path, tuple((name.upper(), rest.strip()) for name, rest in pairs))

    def all(self, name: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == name]

    def last(self, name: str) -> str:
        return self.all(name)[-1]

    @property
    def arguments(self) -> dict[str, str]:
        """Build arguments and what they are unless a build says otherwise."""
        return dict(_pair(rest) for rest in self.all("ARG"))

    @property
    def environment(self) -> dict[str, str]:
        return dict(_pair(word) for rest in self.all("ENV") for word in rest.split())

    @property
    def command(self) -> list[str]:
        """What a container runs, in the form that needs no shell."""
        words: list[str] = json.loads(self.last("CMD"))
        return words

    def installs(self) -> list[str]:
        """The lines that install Python packages, with build arguments as they are by default."""
        return [_filled(rest, self.arguments) for rest in self.all("RUN") if rest.startswith("pip install")]


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _filled(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: known.get(match[1], match[0]), text)
