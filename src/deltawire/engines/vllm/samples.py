"""Pick up the versions of tokens from the outputs of vLLM's engine, which marks each step's tokens (since 0.32)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from ..live.samples import Record, current, number


def observe(client: Any, present: Callable[[], Any]) -> None:
    """Record versions from the outputs of the engine. `present` returns the version to use where it reports none."""
    generate = client.generate

    def observed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        record = current.get()
        if record is None:
            return generate(*args, **kwargs)  # type: ignore[no-any-return]
        prompt, record.prompts = record.prompts, record.prompts + 1
        return _noted(generate(*args, **kwargs), record, prompt, present)

    client.generate = observed


async def _noted(outputs: Any, record: Record, prompt: int, present: Callable[[], Any]) -> AsyncIterator[Any]:
    first = present()
    async with aclosing(outputs) as stream:
        async for output in stream:
            for choice in output.outputs:
                spans = getattr(choice, "weight_versions", None)
                if spans is not None:
                    found = [{"version": number(s.version), "start": s.start, "end": s.end} for s in spans]
                elif choice.finish_reason is not None:
                    # no more is known than what it began and ended with
                    found = [{"version": version} for version in dict.fromkeys((first, present()))]
                else:
                    continue
                if record.adapter_version is not None:
                    # the engine marks tokens with the version of the base weights
                    ends = {"start": 0, "end": found[-1]["end"]} if spans else {}
                    found = [{"version": record.adapter_version, **ends}]
                record.spans[prompt * len(output.outputs) + choice.index] = found
            yield output
