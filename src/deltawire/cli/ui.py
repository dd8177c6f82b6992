"""Common to all commands: options, output for people and for programs, figures, addresses, progress."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option, echo

import deltawire as dw

if TYPE_CHECKING:
    from rich.console import Console as Console
    from rich.table import Table

    from ..engines.threaded import ThreadedServer

JsonOption = Annotated[bool, Option("--json", help="Write JSON to stdout, for programs.")]
RunArgument = Annotated[str, Argument(metavar="RUN", help="Address of the run.")]
RunVersionArgument = Annotated[
    str,
    Argument(
        metavar="RUN[@VERSION]",
        help="Address of the run, and which version: @41, @v41, @latest (as without), @-2, or a tag as in @best.",
    ),
]
ReferenceOption = Annotated[
    Path | None,
    Option(metavar="DIR", exists=True, file_okay=False, help="Folder of the checkpoint that the run starts from."),
]
PollOption = Annotated[float, Option(metavar="SECONDS", min=0.01, help="Longest time between two polls of the run.")]
NameOption = Annotated[str | None, Option(metavar="NAME", help="Name in `log`; host and process by default.")]
AnchorEveryOption = Annotated[int | None, Option(min=1, help="Upload the full weights at least every N versions.")]
TrustOption = Annotated[
    str | None,
    Option(
        metavar="KEY",
        help="Accept only versions signed by this public key, or by those in a file; else DELTAWIRE_TRUST.",
    ),
]
RefuseDelegatedOption = Annotated[
    bool,
    Option(
        "--refuse-delegated",
        help="Use no link that a keeper added, only the trainer's own; else DELTAWIRE_REFUSE_DELEGATED.",
    ),
]
SignOption = Annotated[
    Path | None,
    Option(metavar="PATH", help="File with the private key that signs; else DELTAWIRE_SIGN. See deltawire keygen."),
]

TakeOverOption = Annotated[
    bool,
    Option(
        "--take-over",
        help="Replace the trainer that publishes to the run, wherever it runs: it stops. By default this command is "
        "refused then, and waits half a minute where the trainer may have crashed.",
    ),
]

Encoding = Literal["packed", "context", "auto", "raw"]
HostOption = Annotated[str, Option(help="Address to listen on.")]
TokenFileOption = Annotated[
    Path | None, Option(exists=True, dir_okay=False, help="File with the bearer token; else DELTAWIRE_TOKEN.")
]

Advance = Callable[[str, int, int], None]
"""Counts bytes of a task: (label, bytes done, bytes in all)."""

_PIPE_WIDTH = 160

# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def console() -> Console:
    """Return a console for standard output. In a pipe it is wide, so that no table is cut to 80 columns."""
    from rich.console import Console as Console
    from rich.segment import Segment

    class CleanConsole(Console):
        """Replaces control characters in everything a command prints: text comes from files and buckets."""

        def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
            for text, style, control in super().render(*arguments, **options):
                yield Segment(text if control else clean_lines(text), style, control)

    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    # no markup: names come from files and buckets, and may hold brackets
    return CleanConsole(highlight=False, markup=False, width=_PIPE_WIDTH if piped else None)


def emit(value: Any, render: Callable[[Console], None], as_json: bool) -> None:
    """Print the result of a command: `value` as JSON, or what `render` prints for people."""
    if not as_json:
        render(console())
        return
    import msgspec

    echo(_escaped(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()))


def emit_line(value: Any, text: str, as_json: bool) -> None:
    """Print one event of a long-running command, as a line of JSON or as `text`. Flushed at once."""
    import msgspec

    print(_escaped(msgspec.json.encode(value).decode()) if as_json else clean_lines(text), flush=True)


def pick(value: object, *names: str) -> dict[str, Any]:
    """Return these attributes of an object, for JSON."""
    return {name: getattr(value, name) for name in names}


def step_rows(histogram: dw.Histogram) -> list[dict[str, Any]]:
    """How far weights moved, in ulps, for JSON."""
    return [{"ulps": name, "up": up, "down": down} for name, up, down in histogram.rows()]


def _escaped(json: str) -> str:
    """Escape control characters in JSON. They can only occur in strings, where escapes are valid."""

    def escape(char: str) -> str:
        encoded = char.encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{encoded[at : at + 4]}" for at in range(0, len(encoded), 4))

    def shown(line: str) -> str:
        return line if line.isprintable() else "".join(char if char.isprintable() else escape(char) for char in line)

    return "\n".join(map(shown, json.split("\n")))


def clean(text: str, limit: int = 500) -> str:
    """Make text from a file or bucket safe to print: without control characters, and cut at `limit`."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:limit])
    return shown if len(text) <= limit else shown + " …"


def clean_lines(text: str) -> str:
    """Make text of any length safe to print, and keep its line breaks."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def complain(text: str) -> None:
    """Print an error as one line on stderr."""
    echo(f"deltawire: {clean(' '.join(text.splitlines()), 2000)}", err=True)


def table(*columns: str, title: str | None = None, left: Sequence[str] = ()) -> Table:
    """Make a plain table. Columns are right-aligned, except those named in `left`."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", no_wrap=column not in left)
    return made


def print_table(
    out: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str] = (),
    drop: Sequence[str] = (),
    shorten: str = "",
) -> None:
    """Print a table with one line per row, whatever the width of the terminal.

    Where it does not fit, the columns in `drop` are left out one after the other, and then the column `shorten` loses
    the beginning of what is too long: tensor names differ at their ends.
    """
    from rich.cells import cell_len

    # by index: two columns may have the same name, which may come from a bucket
    widths = {at: max([cell_len(name), *(cell_len(row[at]) for row in rows)]) for at, name in enumerate(columns)}

    def missing() -> int:
        # three spaces between columns, one before and after
        return sum(widths.values()) + 3 * len(widths) - 1 - out.width

    for name in drop:
        for at in [at for at in widths if columns[at] == name][-1:]:
            if missing() > 0:
                del widths[at]
    if shorten and missing() > 0:
        at = columns.index(shorten)
        widths[at] = max(widths[at] - missing(), 12)

    def cut(text: str, width: int) -> str:
        return text if len(text) <= width else "…" + text[1 - width :]

    made = table(*(columns[at] for at in widths), left=left)
    for column in made.columns:
        column.no_wrap = True
    for row in rows:
        made.add_row(*(cut(row[at], widths[at]) for at in widths))
    out.print(made)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def size(n: float) -> str:
    """Format bytes in decimal units: 4.9 MB, 812 kB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or abs(n) >= 99.5 else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} PB"


def percent(part: float, whole: float) -> str:
    """Format a share: 0.94 %, 12.5 %; 0 % only if `part` is zero."""
    if not part or part == whole:
        return "100 %" if part else "0 %"
    share = 100 * part / whole if whole else 0.0
    return "<0.01 %" if share < 0.005 else f"{share:.2f} %" if share < 9.995 else f"{share:.1f} %"


def duration(seconds: float) -> str:
    """Format seconds: 61 ms, 3.2 s, 4 min, 2.5 h, 12 d."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            value = seconds / divisor
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def durations(timings: Mapping[str, float]) -> str:
    """Format seconds by phase: encode 61 ms  put 118 ms."""
    return "  ".join(f"{name} {duration(seconds)}" for name, seconds in timings.items())


def age(at: float) -> str:
    """Format how long ago a timestamp was. Timestamps in the future are "now", negative ones "–"."""
    if at < 0:
        return "–"
    seconds = max(time.time() - at, 0)
    return "now" if seconds < 1 else f"{seconds:.0f} s" if seconds < 60 else duration(seconds)


def times(full: float, sent: float) -> str:
    """Format how many times smaller than the full weights."""
    if not sent:
        return "–"
    ratio = full / sent
    return f"{ratio:.1f}×" if ratio < 99.5 else f"{ratio:,.0f}×"


def ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers: 1–3, 7."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans)


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, the largest full height."""
    bars = "▁▂▃▄▅▆▇█"
    top = max(values, default=0) or 1
    return "".join(bars[min(int(value / top * len(bars)), len(bars) - 1)] for value in values)


# ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def ended_by_sigterm() -> Iterator[threading.Event]:
    """Let SIGTERM end the block in order, with exit code 0.

    Yields an event for its loops to look at, which SIGTERM sets too: where the signal arrives while a finalizer runs,
    Python prints the exception and goes on.
    """
    stop = threading.Event()

    def end(*_: object) -> None:
        # in another thread: this one may have been interrupted inside stop.wait(), with the lock that set() needs
        _thread.start_new_thread(stop.set, ())
        # not an Exception, so nothing on the way mistakes it for trouble and goes on
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def serve_until_ended(server: ThreadedServer, value: Any, text: str, as_json: bool = False) -> None:
    """Say where a server is, as `emit_line` does, and serve until SIGTERM or Ctrl-C."""
    with ended_by_sigterm():
        try:
            emit_line(value, text, as_json)
            server.serve_forever()
        finally:
            server.server_close()


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def progress() -> Iterator[Advance]:
    """Show progress bars on stderr during the block; nothing if stderr is not a terminal.

    Yields `advance(label, bytes, total)`, which makes a bar for each new label. It may be called from any thread.
    """
    from rich.console import Console as Console

    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield lambda label, n, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=stderr, transient=True) as bars:
        tasks: dict[str, Any] = {}
        lock = threading.Lock()

        def advance(label: str, n: int, total: int) -> None:
            with lock:
                if label not in tasks:
                    tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], advance=n, total=total)

        yield advance
