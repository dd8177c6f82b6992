"""`deltawire serve`: a rollout server whose weights follow a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, BadParameter, Context, Option

from . import ui

if TYPE_CHECKING:
    from ..engines.server import RolloutServer


Engine = Literal["builtin", "vllm", "sglang"]

_FLOW, _SIZE, _ACCESS = "Following the run", "Size", "Access"


def command(
    ctx: Context,
    model: Annotated[
        str | None, Argument(metavar="MODEL", help="Checkpoint folder or hub id. Without --run: the run.")
    ] = None,
    run: Annotated[
        str | None, Option("--run", metavar="RUN[@VERSION]", help="The run to follow, or a version to stay at.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        Option(
            "--adapter",
            metavar="NAME=RUN",
            help="With --engine vllm or sglang: follow a run of adapters too, or without --run them alone. "
            "May be repeated.",
        ),
    ] = None,
    engine: Annotated[Engine, Option(help="Inference engine.")] = "builtin",
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[
        str | None, Option("--served-model-name", metavar="NAME", help="What clients call the model.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option(help="To compute in; auto is float32 on a CPU, elsewhere what most weights of the run are."),
    ] = "auto",
    device: Annotated[str, Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    threads: Annotated[int | None, Option(metavar="N", min=1, help="CPU threads.")] = None,
    kv: Annotated[
        Literal["clear", "keep", "version"] | None,
        Option(
            "--kv",
            help="Keys and values of the old weights: clear by default, with vLLM and SGLang version.",
            rich_help_panel=_FLOW,
        ),
    ] = None,
    poll: Annotated[float, Option(metavar="SECONDS", min=0.01, help="How often to look.", rich_help_panel=_FLOW)] = 1.0,
    id: Annotated[
        str | None, Option(metavar="NAME", help="Name in `log`; host and process by default.", rich_help_panel=_FLOW)
    ] = None,
    reference: ui.ReferenceOption = None,
    trust: ui.TrustOption = None,
    refuse_delegated: ui.RefuseDelegatedOption = False,
    folder: Annotated[
        Path | None,
        Option(
            file_okay=False,
            help="With --engine vllm or sglang: where the version to start from is written, and used again while it is "
            "the one wanted; else a temporary folder, removed at the end.",
        ),
    ] = None,
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"], Option(help="Before or after temperature and top_p.")
    ] = "raw_logprobs",
    max_model_len: Annotated[
        int | None, Option(metavar="N", min=2, help="Prompt and answer together.", rich_help_panel=_SIZE)
    ] = None,
    max_batch: Annotated[int, Option(min=1, help="Sequences that run at once.", rich_help_panel=_SIZE)] = 64,
    max_queue: Annotated[
        int, Option(min=1, help="Sequences that may wait; more get a 503.", rich_help_panel=_SIZE)
    ] = 1024,
    kv_memory: Annotated[
        float, Option(metavar="GB", min=0.001, help="Memory for keys and values.", rich_help_panel=_SIZE)
    ] = 2.0,
    max_body: Annotated[
        float, Option(metavar="MB", min=0.001, help="Size of one request.", rich_help_panel=_SIZE)
    ] = 8.0,
    max_connections: Annotated[
        int, Option(min=8, help="Connections at once; fewer under a low ulimit -n.", rich_help_panel=_SIZE)
    ] = 1024,
    request_timeout: Annotated[
        float, Option(metavar="SECONDS", min=0.001, help="For one answer, then a 504.", rich_help_panel=_SIZE)
    ] = 600.0,
    version_wait: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=0,
            envvar="DELTAWIRE_VERSION_WAIT",
            show_envvar=False,
            help="For a version that a request asks for, then a 409.",
            rich_help_panel=_SIZE,
        ),
    ] = 30.0,
    address: Annotated[
        str,
        Option(
            metavar="HOST:PORT",
            envvar="DELTAWIRE_ADDRESS",
            show_envvar=False,
            help="For clients, as `deltawire fleet` shows it; by default where it listens.",
            rich_help_panel=_FLOW,
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        Option(
            exists=True,
            dir_okay=False,
            help="File with the bearer token; else DELTAWIRE_TOKEN.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    guard_all: Annotated[
        bool, Option("--guard-all", help="Ask for the token on /v1 and /metrics too.", rich_help_panel=_ACCESS)
    ] = False,
    grace: Annotated[
        float, Option(metavar="SECONDS", min=0, help="For running requests at the end.", rich_help_panel=_ACCESS)
    ] = 5.0,
    json: ui.JsonOption = False,
) -> None:
    """Serve a model whose weights follow a run, in place, while it answers.

    An OpenAI-compatible server (/v1/completions, /v1/chat/completions). Every
    answer says which versions made it. It is healthy once it has caught up with
    the run; while the run is not there yet, it waits. A new version is fetched
    and checked beside the work and written between two tokens.

    A bearer token in DELTAWIRE_TOKEN (or --token-file) guards the control routes,
    and is required to listen on anything but this machine.

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
    if adapter and builtin:
        raise BadParameter("--adapter is for --engine vllm or sglang")
    if builtin and os.environ.get("DELTAWIRE_ADAPTERS"):
        raise BadParameter("DELTAWIRE_ADAPTERS is set, and this server follows none: unset it, or use --engine")
    if run is None and not adapter:
        model, run = None, model
    if run is None and not model:
        raise BadParameter(
            "name the base model: deltawire serve --engine vllm MODEL --adapter NAME=RUN"
            if adapter
            else "name a run: deltawire serve RUN, or deltawire serve MODEL --run RUN"
        )
    if run is None and model and "://" in model:
        raise BadParameter(
            f"with --adapter the argument is a model, and {model} is a run: give it as --run, with or without a model"
        )
    if folder and (builtin or model):
        raise BadParameter("--folder is for --engine vllm RUN and --engine sglang RUN")
    if kv == "version" and builtin:
        raise BadParameter("--kv version is for --engine vllm or sglang; this server keeps no prefixes: clear or keep")
    if ctx.args and builtin:
        raise BadParameter(f"{ctx.args[0]!r} is a flag of another server, and needs --engine vllm or sglang")

    from ..bucket.trust import REFUSE_DELEGATED, Trust
    from ..engines.access import check_guarded, listen, read_token
    from ..engines.live.settings import named_adapters

    adapters = named_adapters("--adapter", adapter or ())
    if trust:
        # read wherever the run is opened, also in the processes of an engine
        os.environ["DELTAWIRE_TRUST"] = trust
    if refuse_delegated:
        os.environ[REFUSE_DELEGATED] = "1"
    # an engine would say what is wrong with them only after minutes
    Trust.of(None)
    token = read_token(token_file)
    check_guarded(host, token)
    # before anything is imported or fetched; an engine says so only after minutes
    listen(host, port).close()
    where, pin = _pin(run) if run else ("", None)
    following: dict[str, Any] = {
        "run": where,
        "pin": pin,
        "host": host,
        "port": port,
        "name": name,
        "reference": reference,
        "poll": poll,
        "token": token,
        "address": address,
        "version_wait": version_wait,
        "max_model_len": max_model_len,
        "logprobs_mode": logprobs_mode,
    }
    if not builtin:
        from ..engines.live import launch as live
        from ..engines.sglang import launch as sglang
        from ..engines.vllm import launch as vllm

        runs = ", ".join(f"{name}={place}" for name, place in adapters.items())
        chosen = live.Options(**following, kv=kv, adapters=runs, extra=ctx.args)
        # until it is another program, which has its own way to end
        with ui.ended_by_sigterm():
            live.launch(vllm if engine == "vllm" else sglang, chosen, model, folder)
    from ..engines.server import Connections, Limits, RolloutServer, ServerOptions

    options = ServerOptions(
        **following,
        model=model,
        dtype=dtype,
        device=device,
        threads=threads,
        limits=Limits(max_batch, max_queue, int(kv_memory * 1e9)),
        kv_policy="keep" if kv == "keep" else "clear",
        id=id,
        guard_all=guard_all,
        max_body=int(max_body * 1e6),
        request_timeout=request_timeout,
        connections=Connections(max_connections),
        grace=grace,
    )
    # while it waits or loads; the server has its own way to end once it is up
    with ui.ended_by_sigterm():
        try:
            server = RolloutServer(options, on_version=lambda version, timings: _say(version, timings, json))
        except ValueError as error:
            raise BadParameter(str(error)) from None
        server.run(on_listening=lambda: _listening(server, host, json))


def _pin(text: str) -> tuple[str, int | None]:
    """The run to follow, and the version to stay at."""
    from ..bucket.versions import NEWEST, resolve_early, split

    where, version = split(text)
    if _is_checkpoint(where):
        raise BadParameter(
            f"{where} is a checkpoint, not a run: add --run RUN (or --adapter NAME=RUN with --engine vllm or sglang)"
        )
    return where, None if version is None or version in NEWEST else resolve_early(where, version)


def _is_checkpoint(folder: str) -> bool:
    from ..core import keys

    found = os.listdir(folder) if os.path.isdir(folder) else []
    return keys.RUN not in found and any(name == "config.json" or name.endswith(".safetensors") for name in found)


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
