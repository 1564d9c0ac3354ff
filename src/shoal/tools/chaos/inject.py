"""Does to a cluster and its run what a scenario says.

Every action is prepared first, so that the moment that is written down is when it happened, and not when we began to
look for a process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from shoal.cluster.lab import lab as lab_lab
from shoal.cluster.lab.lab import Change, Lab, stop_or_go, up
from shoal.cluster.lab.spec import LabLink, LabSpec
from shoal.cluster.target import LocalSpec, parse_on
from shoal.control.processes import AGENT, RunProcess, find, find_supervisor
from shoal.errors import LabError, UsageError
from shoal.events import EventLog, EventTail
from shoal.run_folder import RunFolder
from shoal.runs.manage import stop
from shoal.runs.start import train_on
from shoal.tools.chaos import scenario
from shoal.tools.chaos.scenario import Action, ChaosScenario, CommandResult, describe
from shoal.units import parse_rate

# SECTION trials/chaos/disks
# Harm to files: a full disk, a checkpoint with one flipped bit.


FILLER = "filler"
_BLOCK = bytes(64 * 1024)

Harm = Literal["flip", "truncate", "zero"]


def fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / FILLER).open("ab", buffering=0) as file:
        block = _BLOCK
        while block:
            try:
                file.write(block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                block = block[: len(block) // 2]


def free(disk: Path) -> None:
    (disk / FILLER).unlink(missing_ok=True)


def corrupt_newest(checkpoints: Path, how: Harm, draw: random.Random) -> Path:
    """One file of the newest whole checkpoint, chosen at random; which one is returned."""
    whole = sorted(path for path in checkpoints.glob("step-*") if (path / "manifest.json").is_file())
    if not whole:
        raise LabError(f"there is no checkpoint in {checkpoints}", why="the run had not come to its first one")
    files = sorted(path for path in whole[-1].iterdir() if path.is_file() and path.stat().st_size)
    chosen = draw.choice(files)
    chosen.write_bytes(harmed(chosen.read_bytes(), how, draw))
    return chosen


def harmed(content: bytes, how: Harm, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    match how:
        case "truncate":
            return content[:place]
        case "zero":
            return bytes(len(content))
        case "flip":
            changed = content[place] ^ (1 << draw.randrange(8))
            return content[:place] + bytes([changed]) + content[place + 1 :]


# SECTION trials/chaos/memory
# Harm to a rank's memory, from outside as a cosmic ray does it: one bit of a weight, or a weight that is no number.
#
# The weight is looked for by its bytes, which the newest checkpoint has. So the scenario's training must stand still: a
# learning rate of 1e-30 changes no weight that is a 32-bit number.


MemoryHarm = Literal["flip", "nan"]
_NOT_A_NUMBER = struct.pack("<f", float("nan"))
# Enough of a matrix to be found nowhere by chance.
_PATTERN = 256
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw\S* \S+ \S+ (\d+)")


def aim(pid: int, checkpoints: Path, how: MemoryHarm, draw: random.Random) -> Callable[[], None]:
    """At every copy of one weight in that process: to look for them takes longer than many steps, to hit them not."""
    name, pattern = known_weight(checkpoints)
    place = 4 * draw.randrange(_PATTERN // 4)
    number = pattern[place : place + 4]
    harmed = _NOT_A_NUMBER if how == "nan" else bytes([number[0] ^ 1 << draw.randrange(8), *number[1:]])
    with _memory(pid) as memory:
        found = list(_addresses(pid, memory, pattern))
    if not found:
        raise LabError(
            f"{name} of the last checkpoint is nowhere in the memory of process {pid}",
            why="its weights have changed since",
            fix="let them stand still: train.lr = 1e-30 in the scenario's training",
        )

    def hit() -> None:
        with _memory(pid) as memory:
            for address in found:
                os.pwrite(memory, harmed, address + place)

    return hit


@contextmanager
def _memory(pid: int) -> Iterator[int]:
    try:
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as file:
            yield file.fileno()
    except PermissionError:
        raise LabError(f"the memory of process {pid} cannot be written", fix="try it as root") from None


def known_weight(checkpoints: Path) -> tuple[str, bytes]:
    """Of the newest whole checkpoint: its first matrix, and how that begins."""
    whole = sorted(path for path in checkpoints.glob("step-*") if (path / "manifest.json").is_file())
    if not whole:
        raise LabError(f"there is no checkpoint in {checkpoints}", why="the run had not come to its first one")
    content = (whole[-1] / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    tensors = json.loads(content[8 : 8 + length])
    matrices = sorted(name for name, entry in tensors.items() if len(entry.get("shape", ())) == 2)
    begin = 8 + length + tensors[matrices[0]]["data_offsets"][0]
    return matrices[0], content[begin : begin + _PATTERN]


def _addresses(pid: int, memory: int, pattern: bytes) -> Iterator[int]:
    """In what the process can write and no file stands behind, so far as it can be read."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = _MAPPING.match(line)
        if match is None or match[3] != "0":
            continue
        begin, end = int(match[1], 16), int(match[2], 16)
        try:
            content = os.pread(memory, end - begin, begin)
        except OSError:
            continue
        at = content.find(pattern)
        while at >= 0:
            yield begin + at
            at = content.find(pattern, at + 1)


# SECTION trials/chaos/strangers
# Connections from nobody: nonsense and silence at every port that the processes of a run listen on.


# Runs on a node: a socket belongs to the network of whoever made it. Many at a time, since a server that takes its time
# with strangers is right to, and at a port of gloo's, which is shut, a knock takes its whole second. Idle ones are held
# until the last has knocked.
_PROGRAM = """
import os, socket, sys
from concurrent.futures import ThreadPoolExecutor
count, idle, places = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
def knock(job):
    (address, port), talks = job
    try:
        peer = socket.create_connection((address, port), timeout=1)
        if not talks:
            return peer
        with peer:
            peer.sendall(os.urandom(64))
    except OSError:
        pass
doors = [(place.rpartition(":")[0], int(place.rpartition(":")[2])) for place in places]
jobs = [(door, number < count) for number in range(count + idle) for door in doors]
with ThreadPoolExecutor(100) as pool:
    held = list(pool.map(knock, jobs))
print("done", sum(peer is not None for peer in held), flush=True)
"""
_DEADLINE_S = 180.0
_LISTENING = "0A"


def garbage(run: Path, lab: Lab | None, connections: int, idle: int) -> Callable[[], None]:
    """Knocks at the ports that are open now; the idle connections last as long as the knocking does."""
    ports = listening(run)
    if not ports:
        raise LabError(f"no process of {run} listens", why="it is over, or they are not ours to look into")

    def knock_everywhere() -> None:
        with ThreadPoolExecutor(len(ports)) as nodes:
            enter = {node: partial(lab.command, node) if lab else list for node in ports}
            done = [nodes.submit(knock, places, connections, idle, enter[node]) for node, places in ports.items()]
            for each in done:
                each.result()

    return knock_everywhere


def knock(places: list[str], connections: int, idle: int, enter: Callable[[list[str]], list[str]]) -> None:
    """`enter` makes the command one that runs on the node."""
    argv = enter([sys.executable, "-P", "-c", _PROGRAM, str(connections), str(idle), *places])
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(
            f"knocking at the ports took more than {_DEADLINE_S:.0f} s", fix="try fewer connections"
        ) from None
    said = re.fullmatch(r"done (\d+)\n", done.stdout)
    if said is None or (idle and not int(said[1])):
        raise LabError("nobody could knock", why=done.stderr.strip()[-300:])


def listening(run: Path) -> dict[str, list[str]]:
    """`address:port` by node. Read from each process's own table: one of a node is in another network than ours."""
    found: dict[str, list[str]] = {}
    for process in find(run):
        place = Path("/proc") / str(process.pid)
        with contextlib.suppress(OSError):
            held = {str(link.readlink()) for link in (place / "fd").iterdir()}
            found.setdefault(process.node, []).extend(open_ports((place / "net/tcp").read_text(), held))
    return {node: places for node, places in found.items() if places}


def open_ports(table: str, held: set[str]) -> list[str]:
    """From the kernel's table of TCP sockets: those that listen and are among the descriptors `held`."""
    rows = (line.split() for line in table.splitlines()[1:])
    return [_place(row[1]) for row in rows if row[3] == _LISTENING and f"socket:[{row[9]}]" in held]


def _place(digits: str) -> str:
    """The kernel prints an address as a number in the machine's own order."""
    address, _, port = digits.partition(":")
    return f"{socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder))}:{int(port, 16)}"


# SECTION trials/chaos/ground
# Where a scenario is played: a lab of its own, or this machine; with a small disk for the checkpoints if need be.


@dataclass(frozen=True)
class TestBed:
    """`on` is what the training gets; `lab` is None on this machine itself; `disk` is the one that can be filled, or
    lose its power; `holds_run`: the whole run folder lies on it."""

    on: str
    lab: Lab | None = None
    disk: Path | None = None
    holds_run: bool = False

    def need_lab(self) -> Lab:
        if self.lab is None:
            raise UsageError("this fault needs emulated nodes", fix="--on lab:3")
        return self.lab

    def thaw_all(self) -> None:
        """The kernel ends no process that it keeps frozen."""
        for name in sorted(self.lab.state.frozen) if self.lab is not None else ():
            with contextlib.suppress(LabError):
                self.need_lab().perform(stop_or_go(name, frozen=False))

    def before(self, run: RunFolder) -> None:
        """The run's checkpoints go to the small disk."""
        if self.disk is not None and not self.holds_run:
            run.checkpoints.symlink_to(self.disk)

    def run_folder(self, kept: Path) -> Path:
        """Where the run is made that will be `kept` there."""
        return self.disk / "run" if self.disk is not None and self.holds_run else kept

    def keep_run(self, kept: Path) -> None:
        """What the small disk holds stays when the disk goes."""
        folder = self.run_folder(kept)
        if folder != kept and folder.is_dir():
            shutil.copytree(folder, kept, dirs_exist_ok=True)

    def cut_power(self) -> None:
        """What the kernel has not put on disk is lost. The image is copied as it is now, and the copy is mounted: its
        file system repairs itself as after a real power cut."""
        disk = self.disk
        if disk is None or not _image(disk).is_file():
            raise LabError("there is no disk that could lose its power", fix='disk_mb = 64, disk_holds = "run"')
        after = _image(disk).with_suffix(".after")
        shutil.copyfile(_image(disk), after)
        _run_as_root("umount", "--lazy", str(disk))
        after.replace(_image(disk))
        _mount_image(disk)


def why_not(scenario: ChaosScenario, on: str) -> str:
    """Why the scenario cannot be played there; nothing when it can."""
    match parse_on(on):
        case LabSpec(nodes=nodes):
            count, kind = len(nodes), "nodes"
            if scenario.cuts_power:
                return "it needs the disk of this machine itself: --on local:2"
        case LocalSpec(ranks=count):
            kind = "ranks"
            if scenario.needs_lab:
                return "it needs emulated nodes: --on lab:3"
        case _:
            return "faults are played on a lab made for them (--on lab:3) or on this machine (--on local:3)"
    if scenario.disk_mb and os.geteuid() != 0:
        return "it needs root, to make a disk that can be filled"
    return f"it needs {scenario.nodes} {kind}" if count < scenario.nodes else ""


@contextlib.contextmanager
def opened(scenario: ChaosScenario, on: str, folder: Path, number: int) -> Iterator[TestBed]:
    """Gone with us, whatever ends us. The disk stands before the lab does: nodes see the mounts of their beginning."""
    with contextlib.ExitStack() as stack:
        disk, holds_run = None, scenario.disk_holds == "run"
        if scenario.disk_mb:
            place = folder / f"disk-{scenario.name}-{number}"
            disk = stack.enter_context(_small_disk(place, scenario.disk_mb, scenario.cuts_power))
        match parse_on(on):
            case LabSpec() as spec:
                own = {"name": f"chaos-{os.getpid()}-{number}", "nodes": spec.nodes[: scenario.nodes]}
                lab = up(spec.model_copy(update=own), owner=os.getpid())
                stack.callback(lab.close)
                yield TestBed(f"lab:{lab.name}", lab, disk, holds_run)
            case _:
                yield TestBed(f"local:{scenario.nodes}", None, disk, holds_run)


@contextlib.contextmanager
def _small_disk(folder: Path, size_mb: int, can_lose_power: bool) -> Iterator[Path]:
    folder.mkdir(parents=True)
    try:
        if can_lose_power:
            _make_image(folder, size_mb)
            _mount_image(folder)
        else:
            _run_as_root("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "shoal-chaos", str(folder))
    except LabError:
        folder.rmdir()
        _image(folder).unlink(missing_ok=True)
        raise
    try:
        yield folder
    finally:
        unmount = ("umount", "--lazy", str(folder))
        subprocess.run(unmount, check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        _image(folder).unlink(missing_ok=True)


def _image(folder: Path) -> Path:
    """The file that holds the disk mounted at `folder`."""
    return folder.with_name(f"{folder.name}.image")


def _make_image(folder: Path, size_mb: int) -> None:
    with _image(folder).open("wb") as file:
        file.truncate(size_mb << 20)
    _run_as_root("mkfs.ext4", "-q", "-F", str(_image(folder)))


def _mount_image(folder: Path) -> None:
    """The kernel puts nothing on this disk by itself for five minutes: all that is there was asked for by fsync."""
    _run_as_root("mount", "-o", "loop,commit=300", str(_image(folder)), str(folder))


def _run_as_root(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LabError(f"cannot make a small disk: there is no {words[0]}", fix="install e2fsprogs") from None
    if done.returncode:
        raise LabError("cannot make a small disk", why=done.stderr.strip(), fix="run as root, outside a container")


def keep_checkpoints(run: RunFolder, disk: Path | None) -> None:
    """What the small disk held stays with the run when the disk goes."""
    if disk is not None and run.checkpoints.is_symlink():
        copy = run.checkpoints.with_name("checkpoints.copy")
        shutil.copytree(disk, copy, ignore=shutil.ignore_patterns("filler"))
        run.checkpoints.unlink()
        copy.rename(run.checkpoints)


Deed = Callable[[], object]
_COMMAND_S = 120.0
_AGAIN_S = 0.3
_POLL_S = 0.01
_LOOK_AGAIN_S = 1.0


class NoDisplay:
    """A display that shows nothing: who plays a scenario tells of it in its own words."""

    def __init__(self, config: object) -> None: ...
    def __call__(self, events: object) -> None: ...
    def close(self) -> None: ...


class Injector:
    def __init__(self, name: str, run: RunFolder, ground: TestBed, draw: random.Random) -> None:
        self._name, self._run, self._ground, self._draw = name, run, ground, draw
        self._log: EventLog | None = None
        self._last_at = 0.0
        self.answers: list[CommandResult] = []
        self.joined: list[subprocess.Popen[bytes]] = []

    def inject(self, action: Action) -> dict[str, object]:
        """What was done, and when: the line that the run folder gets, too."""
        deed = self._prepare(action)
        fields = {"scenario": self._name, "fault": describe(action), **action.model_dump(exclude_none=True)}
        at = self._last_at = round(time.time(), 6)
        deed()
        event = {"event": "injected", "time": at, "done": round(time.time(), 6), **fields}
        self._write(event)
        return event

    def close(self) -> None:
        for process in self.joined:
            process.kill()
            process.wait()
        if self._log is not None:
            self._log.close()

    def _write(self, event: dict[str, object]) -> None:
        """Opened with the first one: a scenario without a training has no folder."""
        if self._log is None and self._run.path.is_dir():
            self._log = EventLog(self._run.chaos, 0)
        if self._log is not None:
            self._log.append(event)

    def _prepare(self, action: Action) -> Deed:
        match action:
            case scenario.KillRank(rank=rank, node=node, signal=name):
                return self._signal(_rank_of(self._run.path, rank, node), f"SIG{name}")
            case scenario.KillSourceInCopy(within_s=within_s):
                return self._signal(self._source_in_copy(within_s), "SIGKILL")
            case scenario.KillNode(node=node, silent=False):
                return self._kill_all(node)
            case scenario.KillRun():
                return self._kill_run()
            case scenario.KillAgent(node=node):
                return self._signal(_agent_of(self._run.path, node), "SIGKILL")
            case scenario.FreezeRank(rank=rank):
                return self._signal(_rank_of(self._run.path, rank, None), "SIGSTOP")
            case scenario.ThawRank(rank=rank):
                return self._signal(_rank_of(self._run.path, rank, None), "SIGCONT")
            case scenario.SignalSupervisor(signal=name, twice=twice):
                return self._signal(_need(find_supervisor(self._run.path), "the supervisor"), f"SIG{name}", 1 + twice)
            case scenario.LimitMemory(rank=rank):
                found = _rank_of(self._run.path, rank, None)
                return lambda: no_more_memory(found.pid)
            case scenario.CorruptMemory(rank=rank, how=harm):
                found = _rank_of(self._run.path, rank, None)
                return aim(found.pid, self._run.checkpoints, harm, self._draw)
            case scenario.FillDisk():
                return lambda: fill(self._disk())
            case scenario.FreeDisk():
                return lambda: free(self._disk())
            case scenario.CutPower():
                return self._cut_power()
            case scenario.CorruptCheckpoint(how=how):
                return lambda: corrupt_newest(self._run.checkpoints, how, self._draw)
            case scenario.StopRun():
                return lambda: stop(self._run)
            case scenario.Resume():
                return lambda: train_on(self._run.path, NoDisplay, detach=True)
            case scenario.UnknownConnections(connections=connections, idle=idle):
                return garbage(self._run.path, self._ground.lab, connections, idle)
            case scenario.RunShoal(words=words):
                return lambda: self.answers.append(self._ask(words))
            case scenario.PowerOn(node=node):
                return lambda: self._power_on(node)
            case _:
                change = _change(action)
                return lambda: self._ground.need_lab().perform(change)

    def _source_in_copy(self, within_s: float) -> RunProcess:
        """The sending rank, once a receiving one has written that a copy begins. To find processes takes a while, so
        they are looked for before."""
        tails: dict[Path, EventTail] = {}
        deadline = time.monotonic() + within_s
        ranks: list[RunProcess] = []
        looked_at = 0.0
        while time.monotonic() < deadline:
            if time.monotonic() - looked_at > _LOOK_AGAIN_S:
                ranks, looked_at = find(self._run.path), time.monotonic()
            for path in self._run.event_files().values():
                for event in tails.setdefault(path, EventTail(path)).poll():
                    if event.get("event") == "copy" and float(event["time"]) > self._last_at:
                        return _oldest(ranks, f"rank-{event['source']}")
            time.sleep(_POLL_S)
        raise LabError(f"no copy began within {within_s:g} s", why="no rank came back, or none was behind")

    def _signal(self, found: RunProcess, name: str, times: int = 1) -> Deed:
        def deed() -> None:
            for number in range(times):
                # Two at once are one: the kernel keeps no count of them.
                time.sleep(_AGAIN_S if number else 0.0)
                os.kill(found.pid, signal.Signals[name])

        return deed

    def _kill_all(self, node: str) -> Deed:
        """The node itself stands: its kernel still says goodbye for its processes, as a real one does. When it goes
        with them, that is at times lost on the way, and would be a power cut."""
        lab = self._ground.need_lab()
        victims = [pid for pid, _ in lab.processes(node)]
        if not victims:
            raise LabError(f"nothing runs on {node}", why="an earlier fault ended it, or the run is over")

        def deed() -> None:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        return deed

    def _kill_run(self) -> Deed:
        """Until nothing of it is found any more: an agent may have started a rank meanwhile."""
        victims = find(self._run.path)
        _need(victims[0] if victims else None, "the run")

        def deed() -> None:
            left = victims
            while left:
                for found in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(found.pid, signal.SIGKILL)
                left = find(self._run.path)

        return deed

    def _cut_power(self) -> Deed:
        kill = self._kill_run()

        def deed() -> None:
            kill()
            if self._log is not None:
                # It lies on the disk, too.
                self._log.close()
                self._log = None
            self._ground.cut_power()

        return deed

    def _disk(self) -> Path:
        if self._ground.disk is None:
            raise LabError("there is no disk to fill", fix="say how large it is: disk_mb = 4")
        return self._ground.disk

    def _power_on(self, node: str) -> None:
        lab = self._ground.need_lab()
        if not lab.is_alive(node):
            lab.perform(lab_lab.restart(node))
        words = (sys.executable, "-P", "-m", "shoal", "join", str(self._run.path), "--node", node)
        log = self._run.log(node, "join")
        self.joined.append(lab.start(node, words, {}, log))

    def _ask(self, words: tuple[str, ...]) -> CommandResult:
        said = [word.format(on=self._ground.on, run=self._run.path) for word in words]
        began = time.monotonic()
        argv = [sys.executable, "-P", "-m", "shoal", *said]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        except subprocess.TimeoutExpired:
            raise LabError(f"shoal {' '.join(said)} gave no answer within {_COMMAND_S:.0f} s") from None
        return CommandResult(done.returncode, done.stdout + done.stderr, time.monotonic() - began)


def no_more_memory(pid: int) -> None:
    import resource

    import psutil

    limit = int(psutil.Process(pid).memory_info().vms)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def _change(action: Action) -> Change:
    match action:
        case scenario.KillNode(node=node):
            return lab_lab.kill(node, silent=True)
        case scenario.Freeze(node=node):
            return lab_lab.stop_or_go(node, frozen=True)
        case scenario.Thaw(node=node):
            return lab_lab.stop_or_go(node, frozen=False)
        case scenario.Cut(between=between, one_way=one_way):
            return lab_lab.cut_off(between[0], between[1] if len(between) > 1 else None, one_way)
        case scenario.Heal():
            return lab_lab.heal_cuts(None, None)
        case scenario.SetLink(node=node, rate=rate):
            rate_bps = parse_rate(rate)
            return lab_lab.set_link(node, lambda link: link.model_copy(update={"rate_bps": rate_bps}))
        case scenario.Loss(node=node, percent=percent):
            return lab_lab.set_link(node, lambda link: _lossy(link, percent))
        case scenario.LimitCpu(node=node, share=share):
            return lab_lab.set_cpu(node, share)
    raise AssertionError(f"nobody knows how to {describe(action)}")


def _lossy(link: LabLink, percent: float) -> LabLink:
    return link.model_copy(update={"loss": percent / 100})


def _rank_of(run: Path, rank: int | None, node: str | None) -> RunProcess:
    """The rank itself and not a process it started: that is younger."""
    ranks = [found for found in find(run) if found.part.startswith("rank-")]
    wanted = [found for found in ranks if (found.part == f"rank-{rank}" if node is None else found.node == node)]
    return _need(
        min(wanted, key=lambda found: found.started_at, default=None), f"rank {rank}" if node is None else node
    )


def _oldest(ranks: list[RunProcess], part: str) -> RunProcess:
    """The rank itself and not a process it started."""
    wanted = (found for found in ranks if found.part == part)
    return _need(min(wanted, key=lambda found: found.started_at, default=None), part)


def _agent_of(run: Path, node: str) -> RunProcess:
    wanted = (found for found in find(run) if found.part == AGENT and found.node == node)
    return _need(next(wanted, None), f"the agent of {node}")


def _need(found: RunProcess | None, what: str) -> RunProcess:
    if found is None:
        raise LabError(f"{what} is not running", why="an earlier fault ended it, or the run is over")
    return found
