"""Plays against a server with the real `openenv` client. Run by test_env_openenv, in an environment that has it.

    python openenv_client.py URL '{"secrets": {"7": "crane"}}'

Prints what happened as JSON, for the test to judge; knows nothing of deltawire.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

from openenv.core import EnvClient, GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import Action, Observation, SchemaResponse, State


class WordleAction(Action):
    guess: str


class WordleObservation(Observation):
    message: str
    guess: str
    feedback: str
    known: bool
    solved: bool
    guesses_left: int


class WordleState(State):
    guesses: list[str]
    feedback: list[str]
    guesses_left: int
    solved: bool
    done: bool
    secret: str | None


class Wordle(EnvClient[WordleAction, WordleObservation, WordleState]):
    """A typed client as an environment's author would write it; its models forbid what they do not know."""

    def _step_payload(self, action: WordleAction) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[WordleObservation]:
        observation = WordleObservation(**payload["observation"], reward=payload["reward"], done=payload["done"])
        return StepResult(observation=observation, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> WordleState:
        return WordleState(**payload)


def play_generic(url: str, seed: int, secret: str) -> dict[str, Any]:
    with GenericEnvClient(base_url=url).sync() as env:
        begun = env.reset(seed=seed)
        missed = env.step({"guess": "zzzzz"})
        solved = env.step({"guess": secret})
        state = env.state()
        try:
            env.step({"guess": secret})
            after = "no error"
        except RuntimeError as error:
            after = str(error)
    return {
        "left": begun.observation["guesses_left"],
        "missed": [missed.observation["feedback"], missed.reward, missed.done],
        "solved": [solved.observation["feedback"], solved.reward, solved.done],
        "state": state,
        "after": after,
    }


async def play_typed(url: str, seed: int, secret: str) -> dict[str, Any]:
    async with Wordle(base_url=url) as env:
        await env.reset(seed=seed, episode_id=f"episode-{seed}")
        result = await env.step(WordleAction(guess=secret))
        state = await env.state()
    return {
        "solved": result.observation.solved, "reward": result.reward, "done": result.done,
        "episode": state.episode_id, "secret": state.secret, "steps": state.step_count,
    }  # fmt: skip


async def main(url: str, secrets: dict[str, str]) -> None:
    seed, secret = next(iter(secrets.items()))
    generic = await asyncio.to_thread(play_generic, url, int(seed), secret)
    typed = await asyncio.gather(*(play_typed(url, int(seed), secret) for seed, secret in secrets.items()))
    import httpx

    schema = SchemaResponse(**httpx.get(f"{url}/schema").json())
    print(
        json.dumps(
            {
                "openenv": version("openenv"),
                "generic": generic,
                "typed": typed,
                "same_action_fields": sorted(schema.action["properties"]) == sorted(WordleAction.model_fields),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])["secrets"]))
