"""`deltawire serve`: a rollout server whose weights follow a run."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from typer import Argument, BadParameter, Context, Option

import deltawire as dw

from ..engines.options import BUILTIN, FLOW, WHAT, WHERE, ServerOptions, Setting, named_adapters, settings
from . import ui

if TYPE_CHECKING:
    from ..engines.server import RolloutServer

Engine = Literal["builtin", "vllm", "sglang"]

_TITLES = {"token_file": WHERE, "trust": FLOW, "refuse_delegated": FLOW}
"""Where the flags that other commands have too stand in --help."""


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace `**flags` of a command by one parameter for each option of a server that has a flag."""
    texts = _docstrings(ServerOptions)
    *own, _ = inspect.signature(command, eval_str=True).parameters.values()
    own = [it.replace(annotation=_titled(it.annotation, _TITLES.get(it.name))) for it in own]
    at = next(at for at, it in enumerate(own) if it.name in _TITLES)
    own[at:at] = [_parameter(setting, texts[setting.name]) for setting in settings() if setting.panel]
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = {it.name: it.annotation for it in own}
    return command


def _titled(annotation: Any, title: str | None) -> Any:
    if title is None:
        return annotation
    kind, option = get_args(annotation)
    option = copy(option)
    option.rich_help_panel = title
    return Annotated[kind, option]


def _parameter(setting: Setting, text: str) -> inspect.Parameter:
    option = Option(
        setting.flag,
        metavar=setting.value or None,
        min=setting.least,
        max=setting.most,
        exists=setting.exists,
        file_okay=False,
        help=f"{text.removesuffix('.')} ({setting.variable})." if setting.variable else text,
        rich_help_panel=setting.panel,
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=setting.default,
        annotation=Annotated[setting.type if setting.default is not None else setting.type | None, option],
    )


def _docstrings(record: type) -> dict[str, str]:
    """Return the docstring after each field of a class, as one line."""
    module = ast.parse(Path(inspect.getfile(record)).read_bytes())
    (body,) = (part.body for part in module.body if isinstance(part, ast.ClassDef) and part.name == record.__name__)
    found, name = {}, ""
    for part in body:
        if isinstance(part, ast.AnnAssign):
            name = ast.unparse(part.target)
        elif name and isinstance(part, ast.Expr):
            found[name] = " ".join(ast.literal_eval(part.value).split())
    return found


@_with_flags
def command(
    ctx: Context,
    model: Annotated[
        str | None, Argument(metavar="MODEL", help="Checkpoint folder or hub id; without --run, the address of a run.")
    ] = None,
    run: Annotated[
        str | None,
        Option(
            "--run",
            metavar="RUN[@VERSION]",
            help="The run to follow, or a version to stay at (DELTAWIRE_RUN, DELTAWIRE_PIN).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        Option(
            "--adapter",
            metavar="NAME=RUN",
            help="With --engine vllm or sglang: also follow a run of adapters; without --run, adapters alone. "
            "Repeatable (DELTAWIRE_ADAPTERS).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    engine: Annotated[Engine, Option(help="Inference engine.", rich_help_panel=WHAT)] = "builtin",
    token_file: ui.TokenFileOption = None,
    trust: ui.TrustOption = None,
    refuse_delegated: ui.RefuseDelegatedOption = False,
    json: ui.JsonOption = False,
    **flags: Any,
) -> None:
    """Serve a model whose weights follow a run, in place, while it answers.

    An OpenAI-compatible server (/v1/completions, /v1/chat/completions). Every
    answer says which versions made it. The server waits for the run if it does
    not exist yet, and is healthy once it has caught up. A new version is fetched
    and checked during generation and written between two tokens.

    A bearer token in DELTAWIRE_TOKEN (or --token-file) guards the control routes,
    and is required to listen on anything but this machine.

    A flag that is not given is read from the environment variable in parentheses.
    Variables without a flag: DELTAWIRE_FOLLOW, DELTAWIRE_HEARTBEAT,
    DELTAWIRE_PAUSE, DELTAWIRE_STAGING_MEMORY, DELTAWIRE_ADAPTERS_KEEP.

    With --json there is one JSON object per line: the address, then each version.

    \b
    Examples
      deltawire serve s3://runs/chat              all of it from the run
      deltawire serve Qwen/Qwen3-0.6B --run s3://runs/chat
      deltawire serve --run s3://runs/chat@41     stay at version 41
      deltawire serve --engine vllm s3://runs/chat -- --max-num-seqs 64
      deltawire serve --engine vllm my-model --adapter policy=s3://runs/lora
      deltawire serve --engine sglang s3://runs/chat -- --tp-size 2
    """
    builtin = engine == "builtin"
    options = replace(ServerOptions.read(), **_typed(ctx, flags, builtin))
    if builtin:
        _refuse_variables_of_plugins(options)
    if adapter and builtin:
        raise BadParameter("--adapter is for --engine vllm or sglang")
    if run is None and not adapter:
        model, run = None, model
    if run is None and not options.run and not model:
        raise BadParameter(
            "name the base model: deltawire serve --engine vllm MODEL --adapter NAME=RUN"
            if adapter
            else "name a run: deltawire serve RUN, or deltawire serve MODEL --run RUN"
        )
    if run is None and model and "://" in model:
        raise BadParameter(
            f"with --adapter the argument is a model, and {model} is a run: give it as --run, with or without a model"
        )
    if options.folder and model:
        raise BadParameter("--folder is for --engine vllm RUN and --engine sglang RUN")
    if options.kv == "version" and builtin:
        raise BadParameter("--kv version is for --engine vllm or sglang; this server keeps no prefixes: clear or keep")
    if ctx.args and builtin:
        raise BadParameter(f"{ctx.args[0]!r} is a flag of another server, and needs --engine vllm or sglang")

    from ..engines.live import access

    if adapter:
        options = replace(options, adapters=named_adapters("--adapter", adapter))
    if trust:
        # read wherever the run is opened, also in the processes of an engine
        os.environ["DELTAWIRE_TRUST"] = trust
    if refuse_delegated:
        os.environ["DELTAWIRE_REFUSE_DELEGATED"] = "1"
    # an engine would say what is wrong with them only after minutes
    dw.Trust.of(None)
    if token_file:
        options = replace(options, token=access.read_token(token_file))
    access.check_guarded(options.host, options.token)
    # before anything is imported or fetched; an engine says so only after minutes
    access.listen(options.host, options.port).close()
    options = replace(options, model=model, extra=ctx.args, **_followed(run or options.run))
    # while it waits or loads; a server has its own way to end once it is up
    with ui.ended_by_sigterm():
        if not builtin:
            from ..engines.live import launch as live
            from ..engines.sglang import launch as sglang
            from ..engines.vllm import launch as vllm

            live.launch(vllm if engine == "vllm" else sglang, options)
        from ..engines.server import RolloutServer

        try:
            server = RolloutServer.open(options, on_version=lambda version, timings: _say(version, timings, json))
        except ValueError as error:
            raise BadParameter(str(error)) from None
        server.run(on_listening=lambda: _listening(server, options.host, json))


def _typed(ctx: Context, flags: Mapping[str, Any], builtin: bool) -> dict[str, Any]:
    """Return the options of the command line. Raises BadParameter for one that the engine does not have."""
    found = {}
    for setting in settings():
        source = ctx.get_parameter_source(setting.name)
        if setting.name not in flags or source is None or source.name != "COMMANDLINE":
            continue
        if setting.only_plugins and builtin:
            raise BadParameter(f"{setting.flag} is for --engine vllm or sglang")
        if setting.panel == BUILTIN and not builtin:
            raise BadParameter(f"{setting.flag} is for the built-in server; flags of the engine itself come after --")
        found[setting.name] = flags[setting.name]
    return found


def _refuse_variables_of_plugins(options: ServerOptions) -> None:
    """Raise BadParameter where the environment asks for what the built-in server does not have."""
    for setting in settings():
        if setting.only_plugins and setting.variable and getattr(options, setting.name) != setting.default:
            raise BadParameter(f"{setting.variable} is set, which is for --engine vllm or sglang: unset it")


def _followed(text: str) -> dict[str, Any]:
    """Return the run to follow, and the version to stay at where one is written behind it."""
    if not text:
        return {}
    where, version = dw.split_version(text)
    if _is_checkpoint(where):
        raise BadParameter(
            f"{where} is a checkpoint, not a run: add --run RUN (or --adapter NAME=RUN with --engine vllm or sglang)"
        )
    if version is None:
        return {"run": where}
    if version in ("latest", "newest"):
        return {"run": where, "pin": None}
    # a version that is named by its number need not exist yet
    number = re.fullmatch(r"v?([0-9]+)", version)
    return {"run": where, "pin": int(number[1]) if number else dw.Run.at(text)[1]}


def _is_checkpoint(folder: str) -> bool:
    found = os.listdir(folder) if os.path.isdir(folder) else []
    return "run.json" not in found and any(name == "config.json" or name.endswith(".safetensors") for name in found)


def _listening(server: RolloutServer, host: str, json: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{server.port}"
    value = {"event": "listening", "url": url, "host": host, "port": server.port, "model": server.name}
    ui.emit_line(value, f"listening on {url}", json)


def _say(version: int, timings: Mapping[str, float], json: bool) -> None:
    phases = {name: seconds for name, seconds in timings.items() if name != "pause"}
    pause, total = timings.get("pause", 0.0), sum(phases.values())
    value = {"event": "version", "version": version, "pause_s": pause, "total_s": total, "timings": phases}
    took = "  ".join(f"{name} {ui.duration(seconds)}" for name, seconds in phases.items())
    ui.emit_line(value, f"v{version}  pause {pause * 1e3:.1f} ms  {took or 'already here'}", json)
