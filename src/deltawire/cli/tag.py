"""`deltawire tag`: name versions."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, BadParameter, Option

import deltawire as dw

from . import ui


def command(
    run: ui.RunVersionArgument,
    name: Annotated[str | None, Argument(metavar="NAME", help="The tag to set; without it, list them.")] = None,
    delete: Annotated[str | None, Option("--delete", metavar="NAME", help="Delete this tag.")] = None,
    json: ui.JsonOption = False,
) -> None:
    """Give a version a name, list the names there are, or delete one.

    RUN@NAME then means that version in `checkout`, `show`, `serve` and all other
    commands. A tag can be set again and then means another version; the weights
    are never touched. `prune` keeps every version with a tag.

    A name has at most 64 letters, digits, '.', '_' and '-', and starts with a
    letter. latest, newest and v41 are reserved.

    \b
    Examples
      deltawire tag s3://runs/chat@41 best      v41 is now @best
      deltawire tag s3://runs/chat best         the newest version is
      deltawire tag s3://runs/chat              which tags there are
      deltawire tag s3://runs/chat --delete best
      deltawire checkout s3://runs/chat@best -o models/best
    """
    marked = dw.split_version(run)[1] is not None
    if delete is not None and (name is not None or marked):
        raise BadParameter("--delete goes with the address of a run alone", param_hint="--delete")
    for given, hint in ((name, "NAME"), (delete, "--delete")):
        try:
            if given is not None:
                dw.Tag.check_name(given)
        except ValueError as error:
            raise BadParameter(str(error), param_hint=hint) from None
    if name is None and marked:
        raise BadParameter("name the tag that this version gets, or leave out the version to list all")
    opened, version = dw.Run.at(run)
    value: dict[str, object] = {"run": opened.store.url}
    said = ""
    if name is not None:
        before = opened.tag(version, name)
        value |= {"tag": name, "version": version, "before": before.version if before else None}
        moved = f" (was v{before.version})" if before and before.version != version else ""
        said = f"{name} → v{version}{moved}"
    elif delete is not None:
        opened.untag(delete)
        value |= {"deleted": delete}
        said = f"{delete} deleted"
    found = opened.tags()
    value["tags"] = {key: {"version": tag.version, "at": tag.at} for key, tag in sorted(found.items())}
    ui.emit(value, lambda out: out.print(said) if said else _render(out, found), json)


def _render(out: ui.Console, found: dict[str, dw.Tag]) -> None:
    if not found:
        out.print("no tags; set one with `deltawire tag RUN@VERSION NAME`")
        return
    newest_last = sorted(found.items(), key=lambda item: (item[1].version, item[0]))
    rows = [[name, f"v{tag.version}", ui.age(tag.at)] for name, tag in newest_last]
    ui.print_table(out, ("tag", "version", "set"), rows, left=("tag",))
