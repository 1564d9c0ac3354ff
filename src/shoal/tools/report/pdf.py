"""Print a page as a PDF, with a Chromium that is on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from shoal.errors import ShoalError, UsageError

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_TIMEOUT_S = 120


def find_chromium() -> str:
    """Return the path of a browser that prints without a display."""
    for name in _BROWSERS:
        if program := shutil.which(name):
            return program
    raise UsageError(
        "--pdf needs Chromium or Chrome, and none is on PATH",
        why="the page's figures are drawn by a browser, also for a PDF",
        fix="install it (Debian: sudo apt install chromium; Fedora: sudo dnf install chromium; macOS: brew install "
        "--cask chromium), or print the page from any browser",
    )


def print_pdf(page: Path, browser: str) -> Path:
    """Write the PDF beside the page and return its path."""
    pdf = page.with_suffix(".pdf")
    with tempfile.TemporaryDirectory(prefix="shoal-pdf-") as folder:
        printed = Path(folder) / "page.pdf"
        words = [
            browser, "--headless", "--disable-gpu", "--no-first-run", "--no-pdf-header-footer",
            "--window-size=800,1200", "--disable-background-networking",
            f"--user-data-dir={folder}/profile", f"--print-to-pdf={printed}",
            # Chromium refuses to run as root inside its sandbox. The page runs only its own two scripts.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            page.resolve().as_uri(),
        ]  # fmt: skip
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
            if printed.is_file():
                shutil.copyfile(printed, pdf)
                return pdf
            reason = next(
                (line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}"
            )
        except subprocess.TimeoutExpired:
            reason = f"no answer within {_TIMEOUT_S} s"
        except OSError as error:
            reason = error.strerror or str(error)
    raise ShoalError(
        f"{browser} did not print {page}: {reason}",
        why="the page itself is written; only its PDF is missing",
        fix=f"print it from a browser, or look at what Chromium says: {shlex.quote(browser)} --headless --print-to-pdf "
        f"{shlex.quote(str(page))}",
    )
