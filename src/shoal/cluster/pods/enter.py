"""Enters another pod of the job, as srun enters a node: `python -P -m shoal.cluster.pods.enter POD agent RUN`, or
`POD run MODULE [WORD …]`. What it reads goes to that program, line by line; it prints what the program prints.

The agent outlives this process. When the connection to its pod is lost, this process connects again, for as long as
that takes: the other agents decide whether the pod is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from shoal.cluster.pods.spec import PORT, PodJob, own_job
from shoal.control.channel import Channel, Message, dial
from shoal.control.orders import read_stdin, seal_token
from shoal.errors import ControlError, RunFailed, ShoalError, from_dict

_AGAIN_AFTER_S = 1.0


class EnteredPod:
    """A connection to a pod, and the lines that go there."""

    def __init__(self, job: PodJob, pod: int, request: Message) -> None:
        self._job, self._host, self._request = job, job.hosts[pod], request
        self._code = job.read_code()
        self._unsent: Message | None = None

    async def work(self) -> int:
        lines = await read_stdin()
        try:
            code = await self._exchange(await self._dial(self._request), lines)
        except (OSError, EOFError) as error:
            if self._request["do"] == "agent":
                return await self._attach(lines)
            raise RunFailed(
                f"{self._host} does not answer: {getattr(error, 'strerror', None) or type(error).__name__}",
                why="the pod waits for a node or for its image, or was lost",
                fix="see its state: kubectl get pods",
            ) from None
        return code

    async def _attach(self, lines: asyncio.StreamReader) -> int:
        """Find the pod's agent again, in the same pod or in the one that took its place, until it has ended."""
        while True:
            await asyncio.sleep(_AGAIN_AFTER_S)
            # A pod that took the place of another has no agent at first.
            with contextlib.suppress(OSError, EOFError, ControlError):
                return await self._exchange(await self._dial({**self._request, "attach": True}), lines)

    async def _dial(self, request: Message) -> Channel:
        channel = await dial(self._host, PORT, self._code)
        await channel.send(request)
        return channel

    async def _feed(self, channel: Channel, lines: asyncio.StreamReader) -> None:
        while True:
            if self._unsent is None:
                line = await lines.readline()
                self._unsent = {"line": seal_token(line, self._code).decode() if line else None}
            await channel.send(self._unsent)
            if self._unsent["line"] is None:
                return
            self._unsent = None

    async def _exchange(self, channel: Channel, lines: asyncio.StreamReader) -> int:
        """Pass lines on and print what comes back, until the program has ended."""
        feeding = asyncio.create_task(self._feed(channel, lines))
        try:
            while True:
                match await channel.receive():
                    case {"type": "out" | "err" as kind, "text": str(text)}:
                        stream = sys.stdout if kind == "out" else sys.stderr
                        stream.buffer.write(text.encode("latin-1"))
                        stream.buffer.flush()
                    case {"type": "exit", "code": int(code)}:
                        return code
                    case {"type": "ended", "how": str(how)}:
                        sys.stderr.write(how + "\n")
                        return 1
                    case {"type": "refused", **error}:
                        raise from_dict(error)
        finally:
            feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await feeding
            channel.close()


def main(words: list[str]) -> int:
    pod, do, what, *rest = words
    request: Message = {"do": "agent", "run": what, "attach": False}
    if do == "run":
        request = {"do": "run", "module": what, "words": rest}
    try:
        return asyncio.run(EnteredPod(own_job(), int(pod), request).work())
    except ShoalError as error:
        sys.stderr.write(f"{error.seen}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
