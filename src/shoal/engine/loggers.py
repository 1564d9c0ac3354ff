"""Writers for `session.on_step`: follow a run in TensorBoard or Weights & Biases while it trains.

    session.on_step(shoal.loggers.TensorBoard("board"))
    session.on_step(shoal.loggers.WandB(project="my-project"))

They run on the main rank. A disk or a network that fails ends the writing with a warning, and not the training.
"""

from __future__ import annotations

import os
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from shoal.engine.step_callbacks import StepRecord
from shoal.events import to_stderr
from shoal.tensorboard import ScalarWriter, event_file_name
from shoal.wandb_client import import_wandb


class TensorBoard:
    """Writes scalars into a folder for `tensorboard --logdir`, without tensorboard itself."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._path: Path | None = None
        self._content = BytesIO()  # What the next write appends to the file.
        self._writer: ScalarWriter | None = None
        self._has_failed = False

    def __call__(self, record: StepRecord) -> None:
        if self._has_failed:
            return
        try:
            now = time.time()
            if self._path is None or self._writer is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                # Each process has a file of its own: a launch, or a main rank, that follows another one.
                self._path = self._folder / f"{event_file_name(now)}.{os.getpid()}"
                self._writer = ScalarWriter(self._content, now)
            self._writer.write(record.step, now, record.scalars())
            with self._path.open("ab") as file:
                file.write(self._content.getvalue())
            self._content.seek(0)
            self._content.truncate()
        except OSError as error:
            self._has_failed = True
            to_stderr(
                f"warning: TensorBoard's files in {self._folder} end before step {record.step}: "
                f"{error.strerror or error}; the training continues, and shoal export --format tensorboard writes all"
            )


class WandB:
    """Sends scalars to Weights & Biases. `settings` are those of `wandb.init`.

    The run has the name of the run folder, also as its id: a resumed training, or another main rank, continues it.
    """

    def __init__(self, **settings: Any) -> None:
        # At once, so that a missing module is known before the training.
        self._wandb = import_wandb()
        self._settings = settings
        self._has_begun = False
        self._has_failed = False

    def __call__(self, record: StepRecord) -> None:
        if self._has_failed:
            return
        try:
            if not self._has_begun:
                name = record.run.name
                self._wandb.init(**{"name": name, "id": name, "resume": "allow", **self._settings})
                self._has_begun = True
            self._wandb.log(record.scalars(), step=record.step)
        except Exception as error:
            # Errors of another program, of any type: no network, no account, no disk.
            self._has_failed = True
            to_stderr(
                f"warning: wandb failed at step {record.step}: {type(error).__name__}: {error}; the training "
                "continues, and shoal export --format wandb sends the whole run"
            )
