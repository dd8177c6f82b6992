"""The application around the commands: help, exit codes, and how figures and addresses are written."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import invoke, spawn
from typer.main import get_command

import deltawire as dw
from deltawire.bucket.versions import address_only, split_version
from deltawire.cli import app, ui
from deltawire.core import errors
from servers import end

COMMANDS = (
    "demo", "publish", "checkout", "follow", "serve", "env", "log", "show", "tag", "runs", "verify", "prune",
    "plan", "doctor", "fleet", "import",
)  # fmt: skip


def test_help_lists_commands_and_exit_codes() -> None:
    text = invoke("--help").stdout
    for command in COMMANDS:
        assert f" {command} " in text
    for code in (0, 1, 2, 3, 4, 5, 6, 130):
        assert f" {code} " in text


@pytest.mark.parametrize("how, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_commands_that_go_on_end_at_a_signal(run: Path, tmp_path: Path, how: signal.Signals, code: int) -> None:
    missing = tmp_path / "missing"
    commands: list[tuple[object, ...]] = [
        ("follow", missing, "--exec", "true"),
        ("keep", missing),
        ("derive", missing, tmp_path / "derived"),
        ("dash", run, "--port", 0),
        ("fleet", run, "--watch", "--nginx", tmp_path / "servers"),
    ]
    for command in commands:
        with spawn(*command, stderr=subprocess.STDOUT) as process:
            said = process.stdout.readline()
            assert said, command
            assert end(process, how) == code, command
            assert "Traceback" not in process.stdout.read()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_teaches_by_example(command: str) -> None:
    text = invoke(command, "--help", columns=80).stdout
    examples = text.partition("Examples")[2].partition("╭")[0].splitlines()
    assert any(line.strip().startswith(f"deltawire {command}") for line in examples)
    # nothing wraps on a terminal of 80 columns: every line of an example keeps its indentation
    assert all(line.startswith("   ") for line in examples if line.strip())
    assert "--json" in text


def test_help_has_no_line_that_a_terminal_of_80_columns_breaks() -> None:
    for function in (app.registered_callback, *app.registered_commands):
        lines = (inspect.getdoc(function.callback) or "").splitlines()  # type: ignore[union-attr]
        # the first one is a paragraph of its own, which may wrap; of the others the line ends are kept
        assert not [line for line in lines[1:] if len(line) > 78]


def test_help_has_no_brackets_that_are_taken_for_markup() -> None:
    commands = get_command(app).commands.values()  # type: ignore[attr-defined]
    assert not [(c.name, p.name) for c in commands for p in c.params if "[" in (getattr(p, "help", None) or "")]


def test_version() -> None:
    assert invoke("--version").stdout.startswith("deltawire 0.")


def test_no_arguments_is_help() -> None:
    assert "Usage" in invoke(code=2).output


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from deltawire.cli import app; from typer.main import get_command; get_command(app);"
        "print([m for m in ('numba', 'numpy', 'torch', 'obstore', 'rich.console') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("deltawire pu", {"publish"}), ("deltawire s", {"serve", "show"}), ("deltawire keygen --jso", {"--json"})],
)
def test_the_shell_completes_commands(typed: str, offered: set[str]) -> None:
    """As a shell asks: in a process of its own, which has nothing heavy to load before it answers."""
    heavy = {"numba", "numpy", "obstore", "torch"}
    code = f"import sys, deltawire.cli\ntry: deltawire.cli.main()\nfinally: assert not {heavy} & {{*sys.modules}}"
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_DELTAWIRE_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert {*done.stdout.split()} == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown(shell: str) -> None:
    command = [sys.executable, "-m", "deltawire", "--show-completion", shell]
    environ = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    assert f"_DELTAWIRE_COMPLETE=complete_{shell}" in shown.stdout


def test_every_error_has_a_documented_exit_code() -> None:
    from deltawire.cli import EXIT_CODES

    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.DeltawireError)]
    documented = {int(line.split()[0]) for line in EXIT_CODES.splitlines() if line.strip()[:1].isdigit()}
    assert {c.exit_code for c in classes} <= documented


@pytest.mark.parametrize(
    "args, code",
    [
        (("log", "/nowhere/at/all"), 4),
        (("log", "gopher://runs/chat"), 2),
        (("log",), 2),
        (("log", "/nowhere", "-n", "0"), 2),
        (("nonsense",), 2),
    ],
)
def test_exit_codes(args: tuple[str, ...], code: int) -> None:
    assert invoke(*args, code=code).stderr


def test_an_error_is_one_line() -> None:
    result = invoke("log", "/nowhere/at/all", code=4)
    assert result.stdout == ""
    assert result.stderr.startswith("deltawire: there is no run at file:///nowhere/at/all")
    assert result.stderr.count("\n") == 1


def test_trouble_with_files_is_one_line_too(tmp_path: Path, run: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("checkout", run, "-o", tmp_path / "file" / "below", code=1)
    assert result.stderr.startswith("deltawire: ")
    assert "Traceback" not in result.output


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltawire.bucket.run.Run.open", interrupt)
    assert invoke("log", "/anything", code=130).output == ""


def test_verbose_logs_to_stderr(tmp_path: Path, checkpoints: list[Path]) -> None:
    result = invoke("-v", "publish", checkpoints[0], tmp_path / "other", "--json")
    assert "v0" in result.stderr
    assert result.stdout.startswith("{")
    assert invoke("publish", checkpoints[1], tmp_path / "other").stderr == ""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("s3://runs/chat", ("s3://runs/chat", None)),
        ("s3://runs/chat@41", ("s3://runs/chat", "41")),
        ("s3://runs/chat@v41", ("s3://runs/chat", "v41")),
        ("s3://runs/chat@newest", ("s3://runs/chat", "newest")),
        ("s3://runs/chat@latest", ("s3://runs/chat", "latest")),
        ("s3://runs/chat@-1", ("s3://runs/chat", "-1")),
        ("s3://runs/chat@best", ("s3://runs/chat", "best")),
        ("s3://runs/me@home/chat", ("s3://runs/me@home/chat", None)),
        ("s3://runs/me@home/chat@7", ("s3://runs/me@home/chat", "7")),
        ("memory://name@2", ("memory://name", "2")),
        ("hf://buckets/me/runs/chat@best", ("hf://buckets/me/runs/chat", "best")),
        ("/tmp/run@12", ("/tmp/run", "12")),
        ("/tmp/run@best", ("/tmp/run", "best")),
        ("/tmp/me@12/run", ("/tmp/me@12/run", None)),
        ("file:///tmp/me%4012", ("file:///tmp/me%4012", None)),
        ("@3", ("@3", None)),
        ("run@-1", ("run", "-1")),
        ("run@1.5", ("run@1.5", None)),
        # before and after a query
        ("s3://r/c@v2?endpoint=http://127.0.0.1:8333", ("s3://r/c?endpoint=http://127.0.0.1:8333", "v2")),
        ("s3://r/c?endpoint=http://127.0.0.1:8333@v2", ("s3://r/c?endpoint=http://127.0.0.1:8333", "v2")),
        ("s3://r/c?endpoint=http://[::1]:8333@best", ("s3://r/c?endpoint=http://[::1]:8333", "best")),
        ("s3://r/c?endpoint=http://h:1&region=eu@-1", ("s3://r/c?endpoint=http://h:1&region=eu", "-1")),
        ("s3://r/c?region=eu@best", ("s3://r/c?region=eu", "best")),
        # what could be a secret stays in the address, which is refused without being repeated
        ("s3://key:secret@host/chat", ("s3://key:secret@host/chat", None)),
        ("s3://key:secret@10/chat@3", ("s3://key:secret@10/chat", "3")),
        ("s3://key:secret@10", ("s3://key:secret@10", None)),
        ("s3://token@host", ("s3://token@host", None)),
        ("s3://r/c?endpoint=http://key:secret@host", ("s3://r/c?endpoint=http://key:secret@host", None)),
        ("s3://r/c?endpoint=http://token@host", ("s3://r/c?endpoint=http://token@host", None)),
    ],
)
def test_addresses_with_a_version(text: str, expected: tuple[str, str | None]) -> None:
    assert split_version(text) == expected


def test_where_no_version_is_taken_one_is_refused(tmp_path: Path, checkpoints: list[Path], run: Path) -> None:
    for command in (("publish", checkpoints[0]), ("follow", "--exec", "true"), ("verify",), ("prune",)):
        result = invoke(*command, f"{run}@v2", code=2)
        assert "leave out @v2" in result.stderr
    assert not (tmp_path / "run@v2").exists()
    for open_it in (dw.Publisher, dw.Replica, lambda where: next(dw.watch(where))):
        with pytest.raises(errors.BadURL, match="leave out @3"):
            open_it(f"{run}@3")
    assert address_only(tmp_path / "me@3") == str(tmp_path / "me@3"), "a Path is meant as it is"


def test_the_package_is_a_program_too() -> None:
    told = subprocess.run([sys.executable, "-m", "deltawire", "-h"], capture_output=True, text=True, check=True)
    assert "publish" in told.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_short_help(command: str) -> None:
    assert "Usage" in invoke(command, "-h").stdout


@pytest.mark.parametrize(
    "shown, expected",
    [
        (ui.size(0), "0 B"),
        (ui.size(999), "999 B"),
        (ui.size(1000), "1 kB"),
        (ui.size(4_900_000), "4.9 MB"),
        (ui.size(812_345), "812 kB"),
        (ui.size(999_999), "1 MB"),
        (ui.size(810e9), "810 GB"),
        (ui.percent(0, 10), "0 %"),
        (ui.percent(10, 10), "100 %"),
        (ui.percent(1, 10**6), "<0.01 %"),
        (ui.percent(94, 10_000), "0.94 %"),
        (ui.percent(1, 3), "33.3 %"),
        (ui.duration(0.0613), "61 ms"),
        (ui.duration(3.24), "3.2 s"),
        (ui.duration(240), "4.0 min"),
        (ui.duration(86_400 * 12), "12 d"),
        (ui.times(1000, 10), "100×"),
        (ui.times(1000, 0), "–"),
        (ui.sparkline([0, 4, 8]), "▁▅█"),
        (ui.sparkline([]), ""),
        (ui.sparkline([0, 0]), "▁▁"),
        (ui.clean("a\x1b[31mb\n"), "a\ufffd[31mb\ufffd"),
        (ui.clean("x" * 600, 5), "xxxxx …"),
    ],
)
def test_figures(shown: str, expected: str) -> None:
    assert shown == expected


def test_age() -> None:
    assert ui.age(time.time() + 100) == "now"
    assert ui.age(-1e308) == "–"
    assert ui.age(time.time() - 12.2) == "12 s"
    assert ui.age(time.time() - 3 * 3600) == "3.0 h"
