"""`shoal plan`: predict before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli import planargs
from shoal.cli.output import command, print_json, shown
from shoal.cli.plantext import plan_document, print_plan
from shoal.cost.advice import Option, advise
from shoal.cost.catalogue import LINKS, MACHINES
from shoal.cost.plan import Plan, make_plan
from shoal.cost.sheet import Overrides, describe, find_link, find_machines, make_setting

app = typer.Typer(add_completion=False)

HOSTS = "hosts.toml"


@app.command()
def plan(
    preset: Annotated[
        str | None, typer.Argument(help="grammar, shakespeare-char or gpt2-124m.", show_default="grammar")
    ] = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes: 4, 1..8 or 1,2,4.")] = "1..8",
    link: Annotated[str, typer.Option(help=f"Between nodes: {', '.join(LINKS)}, or a rate as 300mbit.")] = "1gbe",
    latency: Annotated[str | None, typer.Option(help="What a message waits, software included, as 0.5ms.")] = None,
    efficiency: Annotated[float | None, typer.Option(help="Part of the link's rate that gradients get.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(MACHINES)}; unequal ones as desktop,laptop.", show_default="by link"),
    ] = None,
    flops: Annotated[float | None, typer.Option(help="The machine's matrix peak, as 2e12.")] = None,
    mfu: Annotated[float | None, typer.Option(help="The part of that which training reaches.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="The machine's memory.")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, max=64, help="Ranks on each node, as GPUs in it.")] = 1,
    params: Annotated[float | None, typer.Option(help="A model of this size instead of a preset, as 760e6.")] = None,
    grad_dtype: Annotated[str, typer.Option(help="Gradients are computed in fp32 or bf16.")] = "fp32",
    tokens: Annotated[float | None, typer.Option(help="Tokens in a step of the whole world.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, as section.key=value; may be repeated.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="One dial for the model's size; 12 is GPT-2.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences in a step of the whole world.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences a rank computes at once.")] = None,
    scaling: Annotated[str | None, typer.Option(help="strong: the global batch is fixed; weak: each rank's.")] = None,
    accumulate: Annotated[int, typer.Option(help="So many times the batch between two exchanges.")] = 1,
    wire: Annotated[str | None, typer.Option(help="fp32, fp16, bf16, int8 or powersgd:RANK.")] = None,
    sync: Annotated[str | None, typer.Option(help="ddp, local:STEPS, diloco:STEPS, streaming:STEPS, sharded.")] = None,
    on: Annotated[str, typer.Option(help="Where the command to paste would run; nothing is looked at.")] = HOSTS,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A picture to write (PNG).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON on stdout.")] = False,
) -> None:
    """Predict step time and speed on 1, 2, 3 … machines, and say which lever helps. Starts nothing."""
    given = locals()
    if output is not None:
        planargs.check_picture(output)
    counts = planargs.parse_nodes(nodes)
    overrides = Overrides(efficiency, latency, flops, mfu, memory_gb)
    wired = find_link(link)
    machines = find_machines(machine, wired)
    setting = make_setting(wired, machines, ranks_per_node, overrides)
    workload, lever, notes = planargs.what_to_plan(given, max(counts) * ranks_per_node)
    made = make_plan(workload, lever, setting, counts)
    show(made, [describe(wired, machines, setting), *notes], given)


def show(made: Plan, notes: list[str], given: dict[str, Any]) -> None:
    """`notes` say what the plan was made from."""
    advice = advise(made)
    commands = {option.lever: _command(given, made, option) for option in (*advice.options, advice.best) if option}
    if given["output"] is not None:
        from shoal.report.plan_picture import plot_plan

        plot_plan(made, given["output"])
    if given["json"]:
        print_json(plan_document(made, advice, notes, commands))
        return
    print_plan(made, advice, notes, commands)
    if given["output"] is not None:
        typer.echo(f"\npicture: {shown(given['output'])}")


def _command(given: dict[str, Any], made: Plan, option: Option) -> str | None:
    """None for what shoal cannot do: a lever of tomorrow, or a model that is no preset."""
    if given["params"] is not None or not option.is_possible:
        return None
    return command(*planargs.train_words(given, made, option))
