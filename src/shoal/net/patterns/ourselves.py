"""What shoal itself says. Its errors come with why and what next; here they get their place among the others."""

from __future__ import annotations

from shoal.net.pattern import Pattern, Weight

_ITS_LOG = "read its log"


def _ours(name: str, words: str, cause: str, check: str = "", fix: str = _ITS_LOG, regex: str = "") -> Pattern:
    return Pattern(
        f"shoal.{name}",
        Weight.CAUSE,
        (words,),
        cause,
        fix,
        regex=regex,
        check=check,
        covers=("shoal.error",),
        own_words=True,
    )


OURSELVES = (
    _ours(
        "diverged",
        " became ",
        "the training diverged, most often because the learning rate is too high",
        fix="start a new run with a lower rate: --set train.lr=…",
        regex=r"the (?:loss|gradient norm) became (?:nan|-?inf) in step \d+",
    ),
    _ours(
        "memory",
        "when the machine ran out of memory",
        "the kernel ended the rank because the machine (or the control group) had no memory left",
        check="memory.free",
    ),
    _ours(
        "rank-killed",
        "was killed (SIGKILL) by somebody",
        "somebody killed the rank (kill -9, a job manager, a container's limit); the kernel's own log knows of no "
        "lack of memory",
    ),
    _ours(
        "node-gone",
        " is gone, and ",
        "the whole machine was lost: switched off, asleep, off the network, or its agent was killed",
        check="speed.lid",
        regex=r"error: \S+ is gone, and ",
    ),
    _ours(
        "not-formed",
        "the world did not form",
        "those processes were not started, died early, or cannot reach the others",
        check="reach.store",
    ),
    _ours(
        "cannot-meet",
        " could not meet ",
        "a firewall drops connections between the machines, or they reach each other by other addresses",
        check="reach.pair",
        regex=r"error: \S+ could not meet .* within \d+ s",
    ),
    _ours(
        "different",
        "cannot train together",
        "replicas would drift apart, or fail in the middle of a run",
        check="sameness.torch",
        fix="bring all machines to the same versions: shoal setup HOSTS",
    ),
    _ours(
        "code",
        "did not accept the code",
        "it was used before, or mistyped",
        fix="ask at the host for a new line",
    ),
    _ours(
        "port-taken",
        "cannot be used: Address already in use",
        "another process listens on the port that was asked for",
        check="port.taken",
        fix="leave --port out: a free one is found",
    ),
    Pattern(
        "shoal.error",
        Weight.REPORT,
        ("error: ",),
        cause="",
        fix="",
        regex=r"(?:^|\] )error: (?P<seen>\S.*)",
        own_words=True,
        needs_words=True,
    ),
)
