"""Check the figures of a published report by arithmetic, with `shoal plan`, and with this machine's roofline."""

from __future__ import annotations

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

HOURS, STEPS, TOKENS_PER_S, PARAMETERS, NODES = 26.4, 1329, 57.0, 126e6, 2
PAYLOAD_BYTES_PER_S = 0.94 * 1e9 / 8
# Read weights forward and backward; write and read gradients; AdamW reads and writes weights and both moments.
BYTES_PER_PARAMETER = 40
MEMORY_BYTES_PER_S = 50e9
# Forward and backward of a token.
FLOPS_PER_PARAMETER = 6
# A cause of the slow step must explain more than this part of it.
MOST = 0.5


def run(experiment: Experiment) -> Result:
    step = HOURS * 3600 / STEPS
    tokens = TOKENS_PER_S * step
    sent = 2 * (NODES - 1) / NODES * 4 * PARAMETERS
    moved = BYTES_PER_PARAMETER * PARAMETERS
    flops = FLOPS_PER_PARAMETER * PARAMETERS * tokens
    exchange, memory = sent / PAYLOAD_BYTES_PER_S, moved / MEMORY_BYTES_PER_S
    parts = {"network": exchange / step, "memory": memory / step}
    limit = max(parts, key=lambda cause: parts[cause])

    words = ("--params", f"{PARAMETERS:.0f}", "--nodes", str(NODES), "--link", "1gbe", "--sync", "ddp")
    [planned] = experiment.shoal("plan", *words, "--json").json()["rows"]
    budget = "5" if experiment.is_quick else "15"
    profile = experiment.shoal("probe", "--on", "local", "--budget", budget, "-o", "here.toml", "--json").json()
    [here] = profile["nodes"]
    experiment.note_load(here["other_programs_cores"])
    roof = here["compute"]
    # Each of the two machines computes half of the tokens, and moves all of its own weights.
    here_arithmetic = flops / NODES / (1e9 * roof["fp32_gflops"])
    here_memory = moved / (1e9 * roof["memory_gbytes_per_s"])
    checks = [
        Check(
            "the report's figures agree with each other: tokens/s × seconds of a step are 4,096 tokens",
            abs(tokens / 4096 - 1) < 0.02,
            f"{tokens:.0f}",
        ),
        Check(
            "shoal plan gives the same time for the exchange, within 5%",
            abs(planned["comm_s"] / exchange - 1) < 0.05,
            f"{planned['comm_s']:.2f} s",
        ),
        Check(
            "on this machine, too, such a step needs more time for arithmetic than for memory",
            here_arithmetic > here_memory,
            f"{here_arithmetic:.0f} s and {here_memory:.1f} s",
            is_timing=True,
        ),
    ]
    return Result(
        theory={"part": 100 * parts["network"], "limit": limit if parts[limit] > MOST else "neither"},
        checks=checks,
        figures={
            "step": step,
            "tokens": tokens,
            "sent": sent / 1e6,
            "exchange": exchange,
            "gain": 100 * exchange / (step - exchange),
            "moved": moved / 1e9,
            "memory": memory,
            "gflops": flops / step / 1e9,
            "here_arithmetic": here_arithmetic,
            "here_memory": here_memory,
        },
        picture=Bars(
            f"Where {step:.1f} s of a step went",
            "s",
            ["all-reduce", "memory", "the rest"],
            {"s": [exchange, memory, step - exchange - memory]},
        ),
    )
