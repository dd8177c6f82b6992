"""OpenEnv's messages for Wordle, and one session of it: text in, text out, no network.

The client sends reset, step, state or close, and gets an observation, a state or an error for each but the last.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from .errors import IllegalMove
from .wordle import Game, Rules

LARGEST_MESSAGE = 4096
"""Characters of a message; the longest honest one has a few hundred."""

Seed = Annotated[int, Meta(ge=0, le=2**63 - 1, description="The same seed gives the same secret.")]
Name = Annotated[str, Meta(max_length=255)]


class Action(Struct, forbid_unknown_fields=True):
    guess: Annotated[str, Meta(max_length=256, description="A word of five letters; anything else costs a turn too.")]
    metadata: dict[str, Any] = {}


class Observation(Struct):
    message: Annotated[str, Meta(description="What happened, in words.")]
    guess: Annotated[str, Meta(description="The last guess.")] = ""
    feedback: Annotated[str, Meta(description="Its answer: G here, Y elsewhere, X absent, for each letter.")] = ""
    known: Annotated[bool, Meta(description="The last guess is in the word list.")] = False
    solved: bool = False
    guesses_left: int = 0
    metadata: dict[str, Any] = {}


class State(Struct):
    episode_id: str | None = None
    step_count: int = 0
    guesses: list[str] = []
    feedback: list[str] = []
    guesses_left: int = 0
    solved: bool = False
    done: bool = False
    secret: Annotated[str | None, Meta(description="Once the game is over.")] = None


class Result(Struct):
    """What reset and step return."""

    observation: Observation
    reward: float | None = None
    done: bool = False


class Reset(Struct, forbid_unknown_fields=True):
    seed: Seed | None = None
    episode_id: Name | None = None


class ResetMessage(Struct, tag_field="type", tag="reset", forbid_unknown_fields=True):
    data: Reset = field(default_factory=Reset)


class StepMessage(Struct, tag_field="type", tag="step", forbid_unknown_fields=True):
    data: Action


class StateMessage(Struct, tag_field="type", tag="state", forbid_unknown_fields=True):
    pass


class CloseMessage(Struct, tag_field="type", tag="close", forbid_unknown_fields=True):
    pass


Message = ResetMessage | StepMessage | StateMessage | CloseMessage
TYPES = ("reset", "step", "state", "close")

Code = Literal[
    "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR", "CAPACITY_REACHED", "SESSION_ERROR"
]


class Closed(Exception):
    """The client said goodbye."""


class Session:
    """One game after another, each begun by a reset."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._game: Game | None = None
        self._episode: str | None = None

    def answer(self, text: str) -> str:
        """The reply to a message; raises Closed for the last one."""
        if len(text) > LARGEST_MESSAGE:
            return error("VALIDATION_ERROR", f"a message of {len(text)} characters; the largest is {LARGEST_MESSAGE}")
        try:
            message = _decode(text)
            match message:
                case ResetMessage(data):
                    return reply("observation", self.reset(data))
                case StepMessage(data):
                    return reply("observation", self.step(data))
                case StateMessage():
                    return reply("state", self.state)
                case CloseMessage():
                    raise Closed
        except _Refused as refused:
            return error(refused.code, refused.message)
        except IllegalMove as illegal:
            return error("EXECUTION_ERROR", str(illegal))

    def reset(self, wanted: Reset) -> Result:
        self._game = self._rules.game(wanted.seed)
        self._episode = wanted.episode_id or str(uuid.uuid4())
        return Result(
            Observation(f"guess a word of five letters; {_guesses(self._game.left)}", guesses_left=self._game.left)
        )

    def step(self, action: Action) -> Result:
        if self._game is None:
            raise IllegalMove("there is no game yet; send reset first")
        self._game = game = self._rules.play(self._game, action.guess)
        last = game.guesses[-1]
        observation = Observation(
            message=_say(game),
            guess=last.word,
            feedback=last.feedback,
            known=last.known,
            solved=game.solved,
            guesses_left=game.left,
        )
        return Result(observation, game.reward, game.over)

    @property
    def state(self) -> State:
        if self._game is None:
            return State()
        game = self._game
        return State(
            episode_id=self._episode,
            step_count=len(game.guesses),
            guesses=[guess.word for guess in game.guesses],
            feedback=[guess.feedback for guess in game.guesses],
            guesses_left=game.left,
            solved=game.solved,
            done=game.over,
            secret=game.secret if game.over else None,
        )


def reply(kind: str, data: Any) -> str:
    return msgspec.json.encode({"type": kind, "data": data}).decode()


def error(code: Code, message: str, **more: Any) -> str:
    return reply("error", {"message": message, "code": code, **more})


class _Refused(Exception):
    def __init__(self, code: Code, message: str) -> None:
        self.code: Code = code
        self.message = message


def _decode(text: str) -> Message:
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as bad:
        raise _Refused("INVALID_JSON", f"not JSON: {bad}") from None
    if not isinstance(parsed, dict):
        raise _Refused("VALIDATION_ERROR", 'a message is an object like {"type": "reset"}')
    if parsed.get("type") not in TYPES:
        kind = str(parsed.get("type"))[:40]
        raise _Refused("UNKNOWN_TYPE", f"unknown message type {kind!r}; known: {', '.join(TYPES)}")
    try:
        message: Message = msgspec.convert(parsed, Message)
        return message
    except msgspec.ValidationError as bad:
        raise _Refused("VALIDATION_ERROR", str(bad)) from None


def _say(game: Game) -> str:
    last = game.guesses[-1]
    if game.solved:
        return f"solved with guess {len(game.guesses)} of {game.limit}"
    remark = "" if last.known else f"{last.word[:20]!r} is not in the word list; "
    return remark + (_guesses(game.left) if game.left else f"lost: the word was {game.secret}")


def _guesses(left: int) -> str:
    return f"{left} guess{'' if left == 1 else 'es'} left"
