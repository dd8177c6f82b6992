"""`deltawire plan`: estimate what a run costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import BadParameter, Option

from . import ui
from .quantities import count, rate, seconds

if TYPE_CHECKING:
    from .estimate import Costs, Figure, Setup


def command(
    params: Annotated[float, Option(parser=count, metavar="COUNT", help="Weights of the model: 405e9, 405B, 600M.")],
    lr: Annotated[float, Option(min=0, help="Learning rate (AdamW, bf16 weights with an fp32 master).")] = 1e-6,
    bandwidth: Annotated[
        float, Option(parser=rate, metavar="RATE", help="From the trainer into the bucket: 1Gbit, 2GB/s.")
    ] = "1Gbit",  # type: ignore[assignment]  # parsed like what is typed
    replicas: Annotated[int, Option(min=0, help="Number of replicas that follow.")] = 1,
    replica_bandwidth: Annotated[
        float | None, Option(parser=rate, metavar="RATE", help="From the bucket to each replica; else as --bandwidth.")
    ] = None,
    step_seconds: Annotated[
        float | None,
        Option(parser=seconds, metavar="TIME", help="Time between two versions: 45s, 2min. By default 60s."),
    ] = None,
    steps_per_hour: Annotated[float | None, Option(min=0.001, help="The same as a rate: versions per hour.")] = None,
    density: Annotated[
        float | None,
        Option(min=0, max=1, help="Share of weights that changes per version, where you know it (`log` shows it)."),
    ] = None,
    dtype: Annotated[str, Option(help="Of the weights on the wire: bf16, fp16, fp32, fp8.")] = "bf16",
    encoding: Annotated[str, Option(help="How deltas are coded: packed, context, auto or raw.")] = "packed",
    cores: Annotated[int, Option(min=1, help="For deltawire, on the trainer and on each replica.")] = 16,
    keep_last: Annotated[int, Option(min=0, help="As for `prune`.")] = 20,
    price_storage: Annotated[float | None, Option(min=0, metavar="USD", help="Per GB and month; no default.")] = None,
    price_egress: Annotated[float | None, Option(min=0, metavar="USD", help="Per GB fetched; no default.")] = None,
    all: Annotated[bool, Option("--all", help="Every figure, and where it comes from.")] = False,
    json: ui.JsonOption = False,
) -> None:
    """Estimate what a run costs: sizes, times, storage, traffic, money.

    Needs no run and no bucket. With --all, every figure says how it is known:
    given by you, exact, measured (by what), or extrapolated from what was
    measured.

    \b
    Examples
      deltawire plan --params 7B --replicas 8
      deltawire plan --params 405e9 --lr 1e-6 --bandwidth 1Gbit --replicas 64
      deltawire plan --params 600M --step-seconds 10s --density 0.012
      deltawire plan --params 7B --bandwidth 100Mbit --encoding auto --all
      deltawire plan --params 70B --price-storage 0.023 --price-egress 0.09
    """
    from ..core.costs import DTYPES, UnknownCost
    from .estimate import Setup, estimate

    if steps_per_hour is not None and step_seconds is not None:
        raise BadParameter("say it one way: --steps-per-hour or --step-seconds")
    if dtype not in DTYPES:
        raise BadParameter(f"{dtype!r} is unknown; known: {', '.join(DTYPES)}", param_hint="--dtype")
    setup = Setup(
        params=params,
        lr=lr,
        dtype=dtype,
        density=density,
        encoding=encoding,
        step_seconds=3600 / steps_per_hour if steps_per_hour else step_seconds or 60.0,
        bandwidth=bandwidth,
        replica_bandwidth=replica_bandwidth or bandwidth,
        replicas=replicas,
        cores=cores,
        keep_last=keep_last,
        price_storage=price_storage,
        price_egress=price_egress,
    )
    try:
        costs = estimate(setup)
    except UnknownCost as error:
        raise BadParameter(str(error)) from None
    figures = {name: asdict(figure) for name, figure in costs.figures.items()}
    ui.emit(
        {"setup": asdict(setup), "figures": figures, "notes": costs.notes},
        lambda out: _render(out, setup, costs, all),
        json,
    )


_MAIN = (
    "density", "versions", "held", "egress", "join_bytes", "join_seconds", "usd_held", "usd_egress", "usd_full_egress",
)  # fmt: skip
"""The figures that most people ask for, beside those in the headline."""


def _render(out: ui.Console, setup: Setup, costs: Costs, all: bool) -> None:
    figures = costs.figures
    fits = "within" if costs["sync"] <= setup.step_seconds else "longer than"
    out.print(
        f"A version is a delta of {_amount(figures['delta_bytes'])} instead of {_amount(figures['anchor_bytes'])} "
        f"({_amount(figures['smaller'])} smaller) and is on a replica {_amount(figures['sync'])} after the step, "
        f"{fits} the {ui.duration(setup.step_seconds)} of a step; "
        f"full weights would take {_amount(figures['full_sync'])}."
    )
    if not all:
        for name in _MAIN:
            if name in figures:
                figure = figures[name]
                out.print(f"  {_amount(figure):>10}  {figure.section}: {figure.text}", soft_wrap=True)
        for note in costs.notes:
            out.print(f"note: {note}", soft_wrap=True)
        out.print("--all has every figure and how it is known; --density takes what `log` shows of a run of yours.")
        return
    from ..core.costs import MACHINE, SCRIPT, TIMED

    rows = ui.table("", "figure", "known", "from", left=("", "known", "from"))
    section = ""
    for figure in costs.figures.values():
        if figure.section != section:
            if section:
                rows.add_section()
            section = figure.section
            rows.add_row(section, style="bold")
        rows.add_row(f"  {figure.text}", _amount(figure), figure.basis, figure.source)
    out.print(rows)
    for note in costs.notes:
        out.print(f"note: {note}", soft_wrap=True)
    out.print(f"measured: {SCRIPT}; speeds: {TIMED} on {MACHINE}. Round trips are not counted.", soft_wrap=True)
    out.print("Trained weights change less than random ones: see `log` of a run of yours, and give it as --density.")


def _amount(figure: Figure) -> str:
    value = figure.value
    if figure.unit == "share":
        return ui.percent(value, 1)
    if figure.unit == "bytes":
        return ui.size(value)
    if figure.unit == "seconds":
        return ui.duration(value)
    if figure.unit == "USD":
        return f"{value:,.2f} USD"
    if figure.unit == "times":
        return f"{value:,.1f}×" if value < 100 else f"{value:,.0f}×"
    return f"{value:,.1f} bits" if figure.unit == "bits" else f"{value:,.0f}"
