"""Tokenizer training is reproducible across processes.

Exercises data.tokenizer.
"""

from __future__ import annotations

import subprocess
import sys

from shoal.data.tokenizer import digest
from tests.unit.data.test_tokenizer import BPE, TEXT


def test_bpe_training_is_the_same_in_another_process() -> None:
    code = "import sys; from shoal.data.tokenizer import *; print(digest(BpeTokenizer.train(sys.stdin.read(), 280)))"
    done = subprocess.run([sys.executable, "-c", code], input=TEXT, text=True, capture_output=True, encoding="utf-8")
    assert done.stdout.strip() == digest(BPE), done.stderr
