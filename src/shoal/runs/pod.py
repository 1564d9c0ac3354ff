"""The first process of a pod in the Job that `shoal emit k8s` writes: `python -P -m shoal.runs.pod OUT ON COMMAND …`.

The first pod launches the run, `shoal COMMAND --on ON --out OUT …`, when all pods answer and none of them trains, and
resumes it when it was interrupted. The others serve it. A pod that comes back while the others train starts its agent
again, which asks to rejoin; so does a pod whose agent was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.cluster.pods.server import PodServer, ask
from shoal.cluster.pods.spec import GRACE_S, RUN_FAILED, PodJob, own_job
from shoal.control.channel import Message
from shoal.control.processes import find_processes, kill_processes
from shoal.errors import RunFailed, ShoalError, UnknownSender
from shoal.events import EventTail
from shoal.launch.plan import imports_shoal
from shoal.records.manifest import read_manifest
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.supervisor import read_job

_POLL_S = 1.0
_NOTE_EVERY_S = 30.0
# A Job is deleted by deleting its pods, one after another.
_DELETED_WITHIN_S = 1.5
# What the agent may take to save and end, and then the launch to write the manifest.
_AGENT_WITHIN_S, _LAUNCH_WITHIN_S = GRACE_S * 0.7, GRACE_S * 0.15
# How often a launch may fail before any rank was started: a pod may be lost at that moment.
_LAUNCHES = 3
# An agent that is started again and never rejoins: the machine may be broken, and Kubernetes knows others.
_ATTEMPTS = 6
_LONGEST_WAIT_S = 60.0
# A pod shows in the Job's folder that it is there; the pods of a deleted Job may be there for a while.
_ALIVE_EVERY_S = 4.0
_LEFT = 128 + signal.SIGTERM


class Pod:
    def __init__(self, job: PodJob, out: Path, on: str, command: str, words: Sequence[str]) -> None:
        self._job = job
        self._on, self._command, self._words = on, command, words
        self._run = RunFolder(out)
        self._code = job.read_code()
        self._server = PodServer(job, self._run, self._code)
        self._others = {index: host for index, host in enumerate(job.hosts) if index != job.index}
        self._launch: asyncio.subprocess.Process | None = None
        self._launches = 0
        self._events = EventTail(self._run.supervisor)  # of the supervisor that this pod has launched
        self._attempts = 0
        self._next_attempt = 0.0
        self._notes: dict[str, float] = {}  # when they were printed

    async def work(self) -> int:
        """Return the exit code: 0 where there is nothing left to do, RUN_FAILED where the run failed, another one where
        only this pod ends."""
        await self._server.open()
        working = asyncio.create_task(self._work())
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, working.cancel)
        try:
            return await working
        except asyncio.CancelledError:
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signum, lambda: None)
            await self._leave()
            return _LEFT
        finally:
            await self._server.close()
            if self._launch is not None and self._launch.returncode is None:
                kill_processes(find_processes(self._run.path))
                self._launch.kill()
                await self._launch.wait()

    async def _work(self) -> int:
        showing = asyncio.create_task(self._show_alive())
        try:
            if self._job.index == 0:
                await self._await_former_jobs()
            while not self._job.end.is_file():
                await self._advance()
                await asyncio.sleep(_POLL_S)
        finally:
            showing.cancel()
        end = json.loads(self._job.end.read_text())
        self._note(end["how"])
        # Kubernetes ends the Job by the first pod; a failure of another one would end it too early, without the log.
        return RUN_FAILED if end["code"] and self._job.index == 0 else 0

    async def _advance(self) -> None:
        """Do what is to be done now: rejoin the others, launch the run, or record its end."""
        agent = self._server.agent
        if agent is not None and agent.ended() is None:
            if agent.trains:
                self._attempts = 0
            return
        if self._launch is not None and self._launch.returncode == 0:
            self._end(0, "is finished")
            return
        states = await self._ask_others()
        trains = [self._others[index] for index, state in states.items() if isinstance(state, dict) and state["trains"]]
        silent = [f"{index} ({_describe(state)})" for index, state in states.items() if not isinstance(state, dict)]
        if trains:
            if agent is None or not agent.has_finished:
                await self._rejoin(trains[0])
        elif self._job.index == 0 and (self._launch is None or self._launch.returncode is not None):
            if silent:
                self._note(f"waiting for the pods {', '.join(silent)}")
            else:
                await self._lead()

    async def _ask_others(self) -> dict[int, Message | BaseException]:
        """Return the state of each other pod, or why it gave none."""
        answers = await asyncio.gather(
            *(ask(host, self._code, do="state") for host in self._others.values()), return_exceptions=True
        )
        return dict(zip(self._others, answers, strict=True))

    async def _rejoin(self, peer: str) -> None:
        if not self._job.agent_mark(self._job.index).is_file() or time.monotonic() < self._next_attempt:
            return
        if not self._run.orders(self._job.node).is_file():
            self._note(f"{self._job.node} cannot rejoin: it was lost before the run could continue without it")
            return
        if self._attempts == _ATTEMPTS:
            raise RunFailed(
                f"the agent of {self._job.node} has ended {_ATTEMPTS} times before it could rejoin",
                why="its machine is broken, or the others do not reach it",
                fix=f"see what it did: shoal logs {self._run.path}",
            )
        self._next_attempt = time.monotonic() + min(_LONGEST_WAIT_S, 2.0**self._attempts)
        self._attempts += 1
        self._note(f"{self._job.node} asks the others, which train, to rejoin")
        await self._server.start_again(peer)

    async def _lead(self) -> None:
        """Launch the run, or record its end: all pods are there, and none of them trains."""
        out = self._run.path
        was_launched = self._job.agent_mark(0).is_file()  # by this Job, perhaps by a first pod that was lost
        was_evicted = self._job.evicted.is_file()
        self._job.evicted.unlink(missing_ok=True)
        has_begun = self._run.config.is_file() and self._run.has_begun()
        status = await self._write_manifest() if has_begun else ""
        if status == "finished":
            self._end(0, "is finished")
            return
        if self._launch is not None and not was_evicted:
            code = self._launch.returncode
            was_running = any(event["event"] == "running" for event in self._events.poll())
            if was_running or code != RunFailed.exit_code or self._launches == _LAUNCHES:
                self._end(1, f"ended with exit code {code}; see: kubectl logs POD, for the first pod")
                return
        elif status == "interrupted" and was_launched and not was_evicted:
            self._end(1, "is interrupted")
            return
        if self._run.config.is_file() and (self._command == "train" or self._run.has_checkpoint()):
            words = ["--resume", str(out)]
        else:
            if self._run.job.is_file():
                is_plain = not self._run.config.is_file() and not imports_shoal(read_job(self._run).script)
                if was_launched and is_plain and not was_evicted:
                    self._end(1, "cannot be continued: its script has no session, and the first pod was lost")
                    return
                # Nothing is saved in it.
                moved = out.rename(_free_name(out))
                self._note(f"{out} has no checkpoint: it is {moved} now, and the run starts anew")
            words = ["--on", self._on, "--out", str(out), *self._words]
        self._launches += 1
        self._events = EventTail(self._run.supervisor)
        self._events.skip_to_end()
        command = (sys.executable, "-P", "-m", "shoal", self._command, *words)
        self._launch = await asyncio.create_subprocess_exec(*command, start_new_session=True)

    async def _write_manifest(self) -> str:
        """Write what a supervisor writes at the end, which may be lost; return the status of the run."""
        command = (sys.executable, "-P", "-m", "shoal.records.manifest", str(self._run.path))
        await (await asyncio.create_subprocess_exec(*command)).wait()
        manifest = read_manifest(self._run)
        return "" if manifest is None else manifest.status

    def _end(self, code: int, how: str) -> None:
        write_atomically(self._job.end, json.dumps({"code": code, "how": f"{self._run.path} {how}"}) + "\n")

    async def _leave(self) -> None:
        """End this pod's part: the others continue; where all of them end, all save what was done."""
        agent = self._server.agent
        if agent is None or agent.ended() is not None:
            return
        self._server.is_leaving = True
        await asyncio.sleep(_DELETED_WITHIN_S)
        states = {f"pod-{index}": state for index, state in (await self._ask_others()).items()}
        # One that does not answer may train.
        staying = [
            node
            for node in agent.members
            if node != self._job.node and not (isinstance(state := states.get(node), dict) and state["leaves"])
        ]
        if staying:
            self._note(f"{self._job.node} leaves; the others continue")
            agent.leave()
        else:
            self._note("all pods end: the ranks finish their step and save")
            agent.stop()
            # On a full volume the ranks still save what they can.
            with contextlib.suppress(OSError):
                self._job.evicted.touch()
        await agent.wait(_AGENT_WITHIN_S)
        if self._launch is not None and not staying:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._launch.wait(), _LAUNCH_WITHIN_S)

    # Pods of a Job that was deleted and applied again at once.

    async def _show_alive(self) -> None:
        for count in itertools.count():
            self._job.alive(self._job.index).write_text(str(count))
            await asyncio.sleep(_ALIVE_EVERY_S)

    async def _await_former_jobs(self) -> None:
        """Wait until no pod of a former Job of this run is left; remove what those Jobs knew."""
        for folder in self._job.former_folders():
            while not (folder / self._job.end.name).exists() and (seen := _read_all(folder)):
                await asyncio.sleep(2.5 * _ALIVE_EVERY_S)
                if _read_all(folder) == seen:
                    break
                self._note("waiting for the pods of a former Job of this run, which still end")
            shutil.rmtree(folder, ignore_errors=True)

    def _note(self, text: str) -> None:
        """Print a sentence for the log of the pod; the same one seldom."""
        now = time.monotonic()
        if now - self._notes.get(text, -_NOTE_EVERY_S) >= _NOTE_EVERY_S:
            self._notes = {text: now}
            sys.stderr.write(f"note: {text}\n")
            sys.stderr.flush()


def _describe(error: object) -> str:
    match error:
        case UnknownSender():
            return "it has another code: the pods do not share a volume, see kubectl get pvc"
        case TimeoutError():
            return "it does not answer"
        case OSError():
            return "it is not there yet, or was lost"
        case _:
            return "it does not answer as a pod of this Job"


def _read_all(folder: Path) -> dict[str, str]:
    # Not the times of the files: a network file system shows those late.
    return {path.name: path.read_text() for path in folder.glob("alive-*")}


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}-before-{count}") for count in itertools.count(1))
    return next(name for name in names if not name.exists())


def main(words: list[str]) -> int:
    out, on, command, *rest = words
    try:
        return asyncio.run(Pod(own_job(), Path(out).absolute(), on, command, rest).work())
    except ShoalError as error:
        sys.stderr.write(error.render())
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
