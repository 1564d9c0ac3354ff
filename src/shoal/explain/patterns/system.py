"""Errors of the operating system (memory, disks, files, threads), and shoal's own errors."""

from __future__ import annotations

from shoal.explain.pattern import CauseOrder, Pattern

SYSTEM = (
    Pattern(
        "memory.allocation",
        ("DefaultCPUAllocator: ", "_ArrayMemoryError: Unable to allocate", "MemoryError"),
        regex=r"DefaultCPUAllocator: (?:not enough|can't allocate) memory|Unable to allocate|^(?:\S+: )?MemoryError",
        cause="the machine has too little free memory for one allocation: batch, sequences or model are too large, "
        "or a limit (ulimit -v, a container's) is low",
        fix="see: free -h; then use a smaller micro-batch (shoal: --micro-batch, --seq-len), or fewer ranks on it",
        check="memory.free",
    ),
    Pattern(
        "memory.killed",
        ("ut of memory: Killed process", "ut of memory: Kill process", "oom-kill:"),
        regex=r"[Kk]ill(?:ed)? process (?P<pid>\d+) \((?P<name>[^)]+)\)|oom-kill:",
        cause="the kernel ran out of memory (of the machine, or of a control group) and ended process {pid}, {name}; "
        "a rank that ends like this leaves no message in its log",
        fix="see which processes use it: ps -eo pid,rss,cmd --sort -rss | head; then use a smaller micro-batch, or "
        "fewer ranks",
        check="memory.free",
        covers=("torchrun.killed", "memory.silent-kill"),
    ),
    Pattern(
        "memory.slurm",
        ("oom-kill event", "oom_kill event", ": Out Of Memory"),
        regex=r"Detected \d+ oom[-_]kill event\S* in (?:StepId=|step )(?P<step>\d+\S*?)[.,]?(?=\s|$)"
        r"|srun: error: \S+: tasks? [\d,-]+: Out Of Memory",
        cause="the job reached its memory limit in Slurm, and the kernel ended processes of step {step}; a rank that "
        "ends like this leaves no message in its log",
        fix="see what it used and had: sacct -j JOB --format=JobID,MaxRSS,ReqMem,State; then ask for more (sbatch "
        "--mem=…), or use a smaller micro-batch or fewer ranks",
        check="memory.free",
        covers=("torchrun.killed", "memory.silent-kill"),
    ),
    Pattern(
        "memory.silent-kill",
        ("Killed",),
        weight=CauseOrder.LIKELY,
        regex=r"(?:^|[\]:|] *)Killed *$|\bline \d+: +\d+ Killed ",
        cause="the shell reports that a process was killed with SIGKILL, which leaves no other message: most often by "
        "the kernel, because the machine or the container ran out of memory; or by kill -9, or a job manager",
        fix="ask the kernel: sudo dmesg | grep -i 'killed process'; then use a smaller micro-batch, or fewer "
        "ranks on it",
        check="memory.free",
    ),
    Pattern(
        "disk.full",
        ("No space left on device", "inline_container.cc", "iostream error"),
        regex=r"No space left on device|unexpected pos \d+ vs \d+|basic_ios::clear: iostream error",
        cause="the disk is full, and the file is cut short (torch.save prints only `unexpected pos` or `iostream "
        "error`)",
        fix="df -h; remove old runs and checkpoints; a checkpoint that was cut short cannot be used",
        check="disk.free",
    ),
    Pattern(
        "disk.read-only",
        ("Read-only file system",),
        cause="the folder is on a file system that is mounted read-only; the kernel does that when a disk has errors",
        fix="write elsewhere (shoal: --out); look: sudo dmesg | grep -i 'remount'; findmnt -T FOLDER",
        check="disk.readonly",
    ),
    Pattern(
        "system.bus-error",
        ("Bus error",),
        weight=CauseOrder.LIKELY,
        regex=r"(?:^|[\]:|] *)Bus error(?: \(core dumped\))? *$|\bline \d+: +\d+ Bus error "
        r"|Fatal Python error: Bus error",
        cause="a process used shared memory or a mapped file that has no storage behind it: /dev/shm is full (in a "
        "container it has 64 MB), or a data file was cut short while it was read",
        fix="see: df -h /dev/shm; more of it: docker run --shm-size=2g …; sudo mount -o remount,size=2G /dev/shm",
    ),
    Pattern(
        "system.files",
        ("Too many open files",),
        cause="this process has reached its limit of open files and sockets; many ranks and data workers need more "
        "than the usual 1024",
        fix="ulimit -n 65536, before the start; or fewer workers, or "
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        check="limits.files",
    ),
    Pattern(
        "system.threads",
        ("RuntimeError: can't start new thread", "libgomp: Thread creation failed"),
        cause="this user or container has reached its limit of processes and threads",
        fix="see the limit: ulimit -u; the use: ps -eLf | wc -l; set OMP_NUM_THREADS to cores ÷ ranks, and use fewer "
        "workers",
    ),
)


def _own(name: str, sign: str, cause: str, check: str = "", fix: str = "read its log", regex: str = "") -> Pattern:
    return Pattern(
        f"shoal.{name}",
        (sign,),
        cause=cause,
        fix=fix,
        regex=regex,
        check=check,
        covers=("shoal.error",),
        has_own_advice=True,
    )


# shoal's own errors. They are printed with cause and fix; these patterns rank them among the others. A cause that
# repeats the error's own `why` is shown once.
SHOAL = (
    _own(
        "diverged",
        " became ",
        "the training diverged, most often because the learning rate is too high",
        fix="start a new run with a lower rate: --set train.lr=…",
        regex=r"the (?:loss|gradient norm) became (?:nan|-?inf) in step \d+",
    ),
    _own(
        "memory",
        "was killed (SIGKILL) when ",
        "the kernel killed the rank because the machine (or its control group) had no memory left",
        regex=r"was killed \(SIGKILL\) when (?:the machine ran out of memory|\S+ had reached its memory limit)",
        check="memory.free",
    ),
    _own(
        "rank-killed",
        "was killed (SIGKILL) from outside",
        "another program killed the rank (kill -9, a job manager, a container's limit); the kernel reports no lack "
        "of memory",
    ),
    _own(
        "node-gone",
        " is gone, and ",
        "the whole machine was lost: switched off, asleep, off the network, or its agent was killed",
        check="speed.lid",
        regex=r"error: \S+ is gone, and ",
    ),
    _own(
        "not-formed",
        "the world did not form",
        "those processes were not started, died early, or cannot reach the others",
        check="reach.store",
    ),
    _own(
        "cannot-meet",
        " could not meet ",
        "a firewall drops connections between the machines, or they reach each other by other addresses",
        check="reach.pair",
        regex=r"error: \S+ could not meet .* within \d+ s",
    ),
    _own(
        "different",
        "cannot train together",
        "replicas would drift apart, or fail in the middle of a run",
        check="sameness.torch",
        fix="bring all machines to the same versions: shoal setup HOSTS",
    ),
    _own(
        "code",
        "did not accept the code",
        "it was used before, or mistyped",
        fix="ask at the host for a new code",
    ),
    _own(
        "port-taken",
        "cannot be used: Address already in use",
        "another process listens on the port that was asked for",
        check="port.taken",
        fix="leave --port out: a free one is found",
    ),
    Pattern(
        "shoal.hung",
        (
            " keeps the others waiting: it has done nothing",
            " did not stop when it was told to, and was killed",
            " hangs after step ",
        ),
        regex=r"rank[ -]\d+ (?:keeps the others waiting|did not stop|on \S+ hangs after step \d+)",
        cause="the program of that rank is stuck in the line that is named, and an exchange needs every rank",
        fix="look at what that line waits for (all ranks: shoal stacks RUN); if it only takes long, give it more time: "
        "--set sync.timeout_s=…",
        covers=("shoal.error",),
        has_own_advice=True,
    ),
    # What the agents print about every change of members; see `control.membership.sentences`.
    Pattern(
        "shoal.members",
        (
            "no committed step is lost.",
            "a lost part of the model is looked for.",
            ", before the first step. ",
            " and continues with step ",
            "No machine has the training's state any more",
            "No machine that could be reached had the training's state",
            " paused: ",
            "it commits nothing more and asks to join again",
            "cannot write that decision to disk",
            " has trained apart from ",
            "cannot write its vote to disk",
        ),
        weight=CauseOrder.HARMLESS,
        cause="ranks or machines were lost, hung or came back, and the sentence says how the training continues",
        fix="nothing, unless it repeats: shoal logs RUN; shoal stacks RUN",
    ),
    Pattern(
        "shoal.error",
        ("error: ",),
        weight=CauseOrder.REPORT,
        cause="",
        fix="",
        regex=r"(?:^|\] )error: (?P<seen>\S.*)",
        has_own_advice=True,
        needs_advice=True,
    ),
)
