"""Which files are copied to a host, and how they are written there: real git projects, real folders, no SSH.

Exercises cluster.hosts.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cluster.hosts import copy, remote_copy, remote_facts
from shoal.cluster.hosts.copy import FileBundle, code_bundle, make_piece, project_bundle, project_of, stream
from shoal.cluster.hosts.facts import program
from shoal.errors import UsageError
from shoal.host.network import interface_addresses
from tests.support.needs import need_tool


def write(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def git(folder: Path, *words: str) -> None:
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(
        [need_tool("git"), "-C", str(folder), *words], check=True, capture_output=True, env={**os.environ, **quiet}
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my project"
    write(folder, {"train.py": "print(1)\n", "lib/deep.py": "x = 1\n", "notes.txt": "later\n", "big.bin": "0" * 1000})
    write(folder, {"runs/mine.txt": "a result", ".gitignore": "*.bin\n"})
    (folder / "train.py").chmod(0o755)
    (folder / "alias.py").symlink_to("lib/deep.py")
    return folder


def copy_bundle(bundle: FileBundle, base: Path, note: bool = True, **order: Any) -> dict[str, Any]:
    """Copy a bundle with the program that runs on hosts; return its reply."""
    wanted = {"digest": bundle.digest, "files": bundle.listing} if note else None
    whole = {"base": str(base), "whole": False, "remove": [], "note": wanted, **order}
    return send_to_receiver(b"".join(stream(whole, bundle.pieces)))


def send_to_receiver(sent: bytes) -> dict[str, Any]:
    done = subprocess.run([sys.executable, remote_copy.__file__], input=sent, capture_output=True, timeout=30)
    assert done.stderr == b""
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if "error" in answer else 0)
    return answer


def contents(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != remote_copy.NOTE)
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


# Which files


def test_a_git_project_has_the_files_that_git_lists(project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "train.py", "lib")
    assert {piece.path for piece in project_bundle(project).pieces} == {
        *("train.py", "lib/deep.py", "notes.txt", ".gitignore", "alias.py")
    }
    (project / "lib/deep.py").unlink()
    (project / "alias.py").unlink()
    assert "lib/deep.py" not in project_bundle(project).listing, "a tracked file that was deleted is not listed"
    assert project_of(project / "lib") == project_of(project) == project


def test_tracked_results_are_part_of_the_project(project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "runs")
    assert "runs/mine.txt" in project_bundle(project).listing


def test_files_of_a_nested_git_project_are_included(project: Path) -> None:
    git(project, "init", "-q")
    write(project / "inner", {"part.py": "1"})
    git(project / "inner", "init", "-q")
    assert "inner/part.py" in project_bundle(project).listing


def test_outside_git_environments_caches_and_results_are_left_out(project: Path) -> None:
    write(project, {"env/pyvenv.cfg": "", ".hidden/x.py": "", "lib/__pycache__/deep.pyc": ""})
    assert project_of(project) is None
    assert {piece.path for piece in project_bundle(project).pieces} == {
        *("train.py", "lib/deep.py", "notes.txt", ".gitignore", "alias.py", "big.bin")
    }


def test_links_inside_the_project_stay_links_and_others_are_left_out(project: Path, tmp_path: Path) -> None:
    """A link to a key or a password file must not copy it to every host."""
    (tmp_path / "elsewhere.txt").write_text("outside text")
    (tmp_path / "folder").mkdir()
    (project / "outside.txt").symlink_to(tmp_path / "elsewhere.txt")
    (project / "outside").symlink_to(tmp_path / "folder")
    (project / "chain.txt").symlink_to("outside.txt")
    for is_git in (False, True):
        if is_git:
            git(project, "init", "-q")
            git(project, "add", ".")
        bundle = project_bundle(project)
        pieces = {piece.path: piece for piece in bundle.pieces}
        assert pieces["alias.py"].link == "lib/deep.py"
        assert not {"outside", "outside.txt", "chain.txt"} & pieces.keys()
        assert b"outside text" not in b"".join(stream({}, bundle.pieces))
        assert {"outside.txt", "chain.txt"} <= set(bundle.left_out)
        assert "outside.txt" in copy.describe_left_out(bundle)
    with pytest.raises(UsageError, match="leads outside"):
        make_piece(project / "outside.txt", "outside.txt", project)


@pytest.mark.parametrize("link", ["/etc/passwd", "../../x", "../.."])
def test_a_link_that_leads_out_of_the_folder_is_refused_by_the_host(link: str, tmp_path: Path) -> None:
    order = {"base": str(tmp_path / "p"), "whole": False, "remove": [], "note": None, "files": [["a/b", 0, 511, link]]}
    answer = send_to_receiver(json.dumps(order).encode() + b"\n")
    assert "lies outside" in answer["error"]
    assert not list((tmp_path / "p").rglob("b"))


def test_a_project_that_is_too_large_is_refused_with_its_largest_files(project: Path) -> None:
    with (project / "weights.pt").open("wb") as file:
        file.truncate(copy.MOST_PROJECT_BYTES)
    with pytest.raises(UsageError, match="more than 256 MB") as caught:
        project_bundle(project)
    assert caught.value.why.startswith("the largest files are weights.pt (256 MB), big.bin (1 kB)")
    with pytest.raises(UsageError, match="there is no project folder"):
        project_bundle(project / "nowhere")


def test_the_digest_depends_on_content_mode_and_names(project: Path) -> None:
    before = project_bundle(project)
    assert project_bundle(project) == before
    (project / "notes.txt").chmod(0o755)
    executable = project_bundle(project)
    (project / "notes.txt").rename(project / "notes.md")
    assert len({before.digest, executable.digest, project_bundle(project).digest}) == 3
    assert before.name == executable.name
    assert before.name.startswith("my project-")


def test_the_code_bundle_has_the_whole_package_and_the_lab() -> None:
    package = Path(shoal.__file__).parent
    bundle = code_bundle()
    assert {"shoal/__init__.py", "shoal/py.typed", "shoal/tools/report/assets/page.js"} <= bundle.listing.keys()
    assert "shoal_lab/spec.py" in bundle.listing
    paths = [*package.rglob("*"), *package.with_name("shoal_lab").rglob("*")]
    assert len(bundle.pieces) == len([path for path in paths if path.is_file() and path.suffix != ".pyc"])
    assert bundle.name == code_bundle().name


# How they are written


def test_a_project_is_copied_whole(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "there" / "p"
    assert copy_bundle(project_bundle(project), there) == {"base": str(there)}
    assert contents(there) == {name: text for name, text in contents(project).items() if not name.startswith("runs")}
    assert (there / "alias.py").readlink() == Path("lib/deep.py")
    assert os.access(there / "train.py", os.X_OK)
    assert not os.access(there / "notes.txt", os.X_OK)


def test_an_update_removes_deleted_files_and_keeps_files_made_on_the_host(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "p"
    copy_bundle(project_bundle(project), there)
    (there / "lib/checkpoint").write_text("made there")
    (project / "alias.py").unlink()
    write(project, {"train.py": "print(2)\n"})
    bundle = project_bundle(project)
    changed = FileBundle(bundle.name, tuple(piece for piece in bundle.pieces if piece.path == "train.py"))
    copy_bundle(changed, there, remove=["alias.py", "notes.txt"])
    assert (there / "train.py").read_text() == "print(2)\n"
    assert (there / "lib/checkpoint").read_text() == "made there"
    assert not (there / "alias.py").is_symlink()
    assert not (there / "notes.txt").exists()


def test_an_update_can_replace_a_folder_by_a_file_and_back(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "p"
    copy_bundle(project_bundle(project), there)
    source = project / "notes.txt"
    copy_bundle(FileBundle("", (make_piece(source, "lib"),)), there, remove=["lib/deep.py"])
    assert (there / "lib").read_text() == "later\n"
    copy_bundle(FileBundle("", (make_piece(source, "lib/again"),)), there, remove=["lib"])
    assert (there / "lib/again").read_text() == "later\n"


def test_code_is_installed_completely_or_not_at_all(project: Path, tmp_path: Path) -> None:
    bundle, there = project_bundle(project), tmp_path / "code" / "abc"
    sent = b"".join(stream({"base": str(there), "whole": True, "remove": [], "note": None}, bundle.pieces))
    assert send_to_receiver(sent[:-70])["error"] == "the connection ended in the middle of a file"
    assert list(there.parent.iterdir()) == []
    assert send_to_receiver(sent) == {"base": str(there)}
    (there / "train.py").write_text("written by another copy")
    assert send_to_receiver(sent) == {"base": str(there)}
    assert (there / "train.py").read_text() == "written by another copy"


def test_a_damaged_file_is_not_kept(project: Path, tmp_path: Path) -> None:
    piece = make_piece(project / "big.bin", "data.tokens")
    sent = bytearray(b"".join(stream({"base": str(tmp_path), "whole": False, "remove": [], "note": None}, [piece])))
    sent[-200] ^= 1
    assert "did not arrive as it was sent" in send_to_receiver(bytes(sent))["error"]
    assert [path.name for path in tmp_path.iterdir()] == [project.name]


def test_an_interrupted_update_leaves_a_note_without_a_digest(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "p"
    before = project_bundle(project)
    copy_bundle(before, there)
    write(project, {"train.py": "print(2)\n"})
    after = project_bundle(project)
    changed = [piece for piece in after.pieces if piece.path == "train.py"]
    note = {"digest": after.digest, "files": after.listing}
    send_to_receiver(b"".join(stream({"base": str(there), "whole": False, "remove": [], "note": note}, changed))[:-65])
    kept = remote_facts.read_note(there / remote_facts.NOTE)
    assert kept["digest"] == ""
    assert kept["files"] == {path: digest for path, digest in before.listing.items() if path != "train.py"}


@pytest.mark.parametrize("path", ["/etc/evil", "../evil", "a/../../evil"])
def test_no_file_is_written_outside_its_folder(project: Path, tmp_path: Path, path: str) -> None:
    answer = copy_bundle(FileBundle("", (make_piece(project / "notes.txt", path),)), tmp_path / "p", note=False)
    assert "would lie outside" in answer["error"]


def test_a_lack_of_room_is_reported_before_files_are_sent(tmp_path: Path) -> None:
    order = {
        "base": str(tmp_path / "p"),
        "whole": False,
        "remove": [],
        "note": None,
        "files": [["x", 10**18, 0o644, None]],
    }
    answer = send_to_receiver(json.dumps(order).encode() + b"\n")
    assert answer["needed"] > 10**18 > answer["free"]


def test_a_file_that_shrinks_while_it_is_copied_is_an_error(project: Path) -> None:
    piece = make_piece(project / "big.bin", "x")
    (project / "big.bin").write_text("short")
    with pytest.raises(UsageError, match="became shorter"):
        list(stream({}, [piece]))


def test_stale_partial_files_are_removed(tmp_path: Path) -> None:
    for name in (".abc.part-1", ".fresh.part-2"):
        (tmp_path / name).write_text("")
    long_ago = time.time() - 3 * 24 * 3600
    os.utime(tmp_path / ".abc.part-1", (long_ago, long_ago))
    remote_copy.remove_stale_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".fresh.part-2"]


# What a host has


def test_holdings_are_identified_by_digest_and_size(tmp_path: Path) -> None:
    write(tmp_path, {"data/abc.tokens": "12345", "code/xyz/x.py": "", "projects/p/a": ""})
    remote_copy.write_note(tmp_path / "projects/p", {"digest": "d1", "files": {"a": "1"}})
    held: dict[str, Any] = {"code": "xyz", "project": "p", "project_digest": "d1"}
    held["files"] = {"abc.tokens": 5, "no.tokens": 5}
    there = remote_facts.holdings(tmp_path, held)
    assert there == {"has_code": True, "files": ["abc.tokens"], "project_digest": "d1", "project_files": {}}
    changed = remote_facts.holdings(
        tmp_path, {**held, "code": "no", "project_digest": "d2", "files": {"abc.tokens": 6}}
    )
    assert changed == {"has_code": False, "files": [], "project_digest": "d1", "project_files": {"a": "1"}}
    assert remote_facts.holdings(tmp_path, {**held, "project": ""})["project_digest"] == ""


def test_the_program_for_facts_needs_no_shoal_on_the_host(tmp_path: Path) -> None:
    """It is sent as text, and run by a Python that has nothing installed."""
    request = {"folder": str(tmp_path / "not/there/yet"), "packages": ["torch"], "code": "-", "files": {}}
    request |= {"project": "", "project_digest": ""}
    argv = [sys.executable, "-I", "-S", "-c", program("remote_facts"), json.dumps(request), "named"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True, cwd="/")
    answer = json.loads(done.stdout)
    assert answer["interfaces"] == interface_addresses()
    assert (answer["python"]["executable"], answer["python"]["packages"]) == (sys.executable, {})


def test_a_stream_begins_with_the_listing_of_its_files(project: Path) -> None:
    sent = io.BytesIO(b"".join(stream({"base": "x"}, project_bundle(project).pieces)))
    assert [path for path, *_ in json.loads(sent.readline())["files"]] == sorted(project_bundle(project).listing)
