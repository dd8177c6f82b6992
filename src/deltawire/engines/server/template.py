"""Render chat templates in a separate process.

A template is a program that comes with the model, perhaps out of a bucket, and a client's messages are its input. It
may loop forever or allocate any amount of memory, and a thread that does so cannot be stopped. A process can: it gets
seconds and megabytes, is killed when it takes more, and is started again for the next request.

The process speaks lines of JSON: the template first, answered with its variables, then one conversation per line,
answered with its text. This module is both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

RENDER_S = 5.0
"""Seconds for one conversation; templates take milliseconds."""

START_S = 60.0
"""Seconds for the process to start and read the template."""

MEMORY = 512 << 20
"""Bytes that rendering may take, beside the modules it is made of."""

_OURS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversations", "documents", "messages",
    "return_assistant_tokens_mask", "tools",
}  # fmt: skip
"""Variables that a client sets by other means, or not at all."""


class TemplateFailed(Exception):
    """The template refused these messages, or took too long."""


class ChatTemplate:
    """A chat template with its special tokens. Any thread may use it; conversations are rendered one at a time."""

    def __init__(self, template: str, special: dict[str, Any]) -> None:
        self._opening = {"template": template, "special": special}
        self._special = special
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._variables: frozenset[str] = frozenset()
        self._closed = False

    def render(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], *, prompt: bool, resume: bool, most: int
    ) -> str:
        """Return the text of a conversation.

        variables   what a client sets beside the messages; only variables of the template may be set
        prompt      end with what begins an answer
        resume      leave the last message open, to be continued
        most        bytes that the text may have
        """
        with self._lock:
            process = self._started()
            unknown = sorted(variables.keys() - self._variables)
            if unknown:
                known = ", ".join(sorted(self._variables)) or "none"
                raise TemplateFailed(f"{unknown[0][:60]!r} is no variable of this chat template; it has: {known}")
            asked = {"messages": messages, "variables": variables, "prompt": prompt, "resume": resume, "most": most}
            return str(self._ask(process, asked, RENDER_S)["text"])

    def close(self) -> None:
        """End the process, also while it renders."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise TemplateFailed("the server is shutting down")
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            found = self._ask(self._process, self._opening, START_S)["variables"]
            self._variables = frozenset(found) - _OURS - self._special.keys()
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], asked: Any, seconds: float) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            question = json.dumps(asked).encode() + b"\n"
        except RecursionError:
            raise TemplateFailed("the messages are nested too deeply") from None
        deadline = threading.Timer(seconds, process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            # a process that has been killed answers with nothing
            with suppress(BrokenPipeError):
                process.stdin.write(question)
                process.stdin.flush()
            line = process.stdout.readline()
        finally:
            deadline.cancel()
        if not line.endswith(b"\n"):
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
            self._process = None
            raise TemplateFailed(
                f"it took more than {seconds:g} s or {MEMORY >> 20} MiB; the template or these messages are at fault"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return answer


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _main() -> None:
    # transformers' own rendering, so that a chat has the tokens it had in training
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    lines, out = sys.stdin.buffer, sys.stdout.buffer
    # what a template or a module prints must not pass for an answer
    sys.stdout = sys.stderr
    opening = json.loads(lines.readline())
    _limit_memory()
    _limit_time(RENDER_S)
    try:
        environment = _compile_jinja_template(opening["template"]).environment
        variables = meta.find_undeclared_variables(environment.parse(opening["template"])) - environment.globals.keys()
        answer: dict[str, Any] = {"variables": sorted(variables)}
    except Exception as error:
        answer = {"error": _said(error)}
    while True:
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()
        line = lines.readline()
        if not line:
            return
        _limit_time(RENDER_S)
        try:
            asked = json.loads(line)
            rendered = render_jinja_template(
                conversations=[asked["messages"]],
                chat_template=opening["template"],
                add_generation_prompt=asked["prompt"],
                continue_final_message=asked["resume"],
                **{**opening["special"], **asked["variables"]},
            )
            text = rendered[0][0]
            size = len(text.encode())
            most = asked["most"]
            answer = (
                {"text": text} if size <= most else {"error": f"the chat comes to {size} bytes; {most} are allowed"}
            )
        except Exception as error:
            # templates raise what they like
            answer = {"error": _said(error)}


def _said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {MEMORY >> 20} MiB"
    return f"{type(error).__name__}: {error}"[:500]


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as statm:
            present = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (present + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_time(seconds: float) -> None:
    """Limit the CPU time, for the case that the server, which kills slow rendering, was itself killed."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        soon = int(used.ru_utime + used.ru_stime + seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (soon, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    _main()
