"""`shoal host`: train with machines that join by themselves, without SSH."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.given import advising_flags
from shoal.cli.leftovers import clear_leftovers
from shoal.cli.lines import print_note
from shoal.cli.output import print_json, print_run
from shoal.cli.progress import make_display
from shoal.cli.train import DEFAULT_PRESET
from shoal.config.load import build_config, refuse_twice, refuse_without_effect, typed_settings
from shoal.config.presets import PRESETS, Overrides
from shoal.errors import UsageError
from shoal.trials.inviting import invite
from shoal.trials.training import default_out, refuse_confirm, train_new

app = typer.Typer(add_completion=False)


@app.command()
def host(
    context: typer.Context,
    preset: Annotated[
        str | None,
        typer.Argument(
            help="grammar, shakespeare-char or gpt2-124m; or the folder of a run that goes on.", show_default="grammar"
        ),
    ] = None,
    machines: Annotated[
        int | None, typer.Option(min=2, help="How many take part, this one included.", show_default="2")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Ours, by which the others reach us.", show_default="found")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to wait for them.", show_default="a free one")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="A text file or a folder of them; it is sent to the others.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, as section.key=value; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to create.", show_default="runs/NAME-TIME")] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Ask here, y or n, before a machine that joins gets anything.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON on stdout.")] = False,
) -> None:
    """Train with machines that join by themselves: prints for each what to type there, and a code that works once.

    The same as shoal train --on join:N, which takes every other flag of a training. Into a run that goes on, one more
    machine is invited on any that takes part: shoal host RUN-FOLDER.
    """
    name = preset or DEFAULT_PRESET
    if name not in PRESETS and Path(name).is_dir():
        _refuse_settings(machines, data, steps, config, set_, out, json)
        sys.stdout.write(f"{invite(Path(name), address, port, print_note, confirm)}\n")
        return
    on = f"join:{machines or 2}" + (f",address={address}" if address else "") + (f",port={port}" if port else "")
    flags: Overrides = {"run": {"on": on}}
    if steps is not None:
        flags["train"] = {"steps": steps}
    if data is not None:
        flags["data"] = {"path": data}
    sets = set_ or []
    pairs = (("train.steps", "--steps", steps), ("data.path", "--data", data))
    named = {key: flag for key, flag, value in pairs if value is not None}
    refuse_twice(named, sets)
    if "run.on" in typed_settings(None, sets):
        raise UsageError(
            "--set run.on does not go with shoal host",
            why="shoal host trains with machines that join by themselves",
            fix="say how many: --machines N; or train elsewhere: shoal train --on …",
        )
    settings = build_config(name, config, flags, sets)
    refuse_without_effect(settings, typed_settings(None, sets))
    if confirm:
        refuse_confirm(on)
    clear_leftovers(clean=False)
    with advising_flags(named):
        run, manifest = train_new(settings, out or default_out(name), make_display, confirm=confirm)
    if manifest is not None:
        print_json(manifest.model_dump(mode="json")) if json else print_run(run, manifest)


def _refuse_settings(*given: object) -> None:
    if any(given):
        raise UsageError(
            "a run that goes on keeps its settings",
            why="with a run folder, shoal host takes --address, --port and --confirm only",
            fix="leave the others out",
        )
