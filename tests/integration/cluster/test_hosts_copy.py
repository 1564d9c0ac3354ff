"""What is copied to a host, and how it arrives: real git projects, real folders, no connection."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal
from shoal.cluster.hosts import copy, remote_copy, remote_facts
from shoal.cluster.hosts.copy import FileBundle, code_bundle, make_piece, project_bundle, project_of, stream
from shoal.errors import UsageError
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


def arrives(bundle: FileBundle, base: Path, note: bool = True, **order: Any) -> dict[str, Any]:
    """Through the very program that runs on hosts."""
    wanted = {"digest": bundle.digest, "files": bundle.listing} if note else None
    whole = {"base": str(base), "whole": False, "remove": [], "note": wanted, **order}
    return received(b"".join(stream(whole, bundle.pieces)))


def received(sent: bytes) -> dict[str, Any]:
    done = subprocess.run([sys.executable, remote_copy.__file__], input=sent, capture_output=True, timeout=30)
    assert done.stderr == b""
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if "error" in answer else 0)
    return answer


def contents(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != remote_copy.NOTE)
    return {str(path.relative_to(folder)): path.read_text() for path in found}


# Which files


def test_a_git_project_is_what_git_lists(project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "train.py", "lib")
    assert {piece.path for piece in project_bundle(project).pieces} == {
        *("train.py", "lib/deep.py", "notes.txt", ".gitignore", "alias.py")
    }
    (project / "lib/deep.py").unlink()
    (project / "alias.py").unlink()
    assert "lib/deep.py" not in project_bundle(project).listing, "tracked and deleted"
    assert project_of(project / "lib") == project_of(project) == project


def test_results_that_are_tracked_are_part_of_the_project(project: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "runs")
    assert "runs/mine.txt" in project_bundle(project).listing


def test_a_project_within_the_project(project: Path) -> None:
    git(project, "init", "-q")
    write(project / "inner", {"part.py": "1"})
    git(project / "inner", "init", "-q")
    assert "inner/part.py" in project_bundle(project).listing


def test_outside_git_everything_but_environments_caches_and_results(project: Path) -> None:
    write(project, {"env/pyvenv.cfg": "", ".hidden/x.py": "", "lib/__pycache__/deep.pyc": ""})
    assert project_of(project) is None
    assert {piece.path for piece in project_bundle(project).pieces} == {
        *("train.py", "lib/deep.py", "notes.txt", ".gitignore", "alias.py", "big.bin")
    }


def test_links_within_stay_links_and_others_are_left_out(project: Path, tmp_path: Path) -> None:
    """A link to a key or a password file must not carry it to every host."""
    (tmp_path / "elsewhere.txt").write_text("from afar")
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
        assert b"from afar" not in b"".join(stream({}, bundle.pieces))
        assert {"outside.txt", "chain.txt"} <= set(bundle.left_out)
        assert "outside.txt" in copy.describe_left_out(bundle)
    with pytest.raises(UsageError, match="leads outside"):
        make_piece(project / "outside.txt", "outside.txt", project)


@pytest.mark.parametrize("link", ["/etc/passwd", "../../x", "../.."])
def test_a_link_that_leads_out_of_the_folder_is_not_made_there(link: str, tmp_path: Path) -> None:
    order = {"base": str(tmp_path / "p"), "whole": False, "remove": [], "note": None, "files": [["a/b", 0, 511, link]]}
    answer = received(json.dumps(order).encode() + b"\n")
    assert "lies outside" in answer["error"]
    assert not list((tmp_path / "p").rglob("b"))


def test_too_much_is_refused_with_the_largest_named(project: Path) -> None:
    with (project / "weights.pt").open("wb") as file:
        file.truncate(copy.MOST_PROJECT_BYTES)
    with pytest.raises(UsageError, match="more than 256 MB") as caught:
        project_bundle(project)
    assert caught.value.why.startswith("the largest files are weights.pt (256 MB), big.bin (1 kB)")
    with pytest.raises(UsageError, match="there is no project folder"):
        project_bundle(project / "nowhere")


def test_the_digest_follows_content_mode_and_names(project: Path) -> None:
    before = project_bundle(project)
    assert project_bundle(project) == before
    (project / "notes.txt").chmod(0o755)
    executable = project_bundle(project)
    (project / "notes.txt").rename(project / "notes.md")
    assert len({before.digest, executable.digest, project_bundle(project).digest}) == 3
    assert before.name == executable.name
    assert before.name.startswith("my project-")


def test_the_code_is_the_whole_package() -> None:
    package = Path(shoal.__file__).parent
    bundle = code_bundle()
    assert {"shoal/__init__.py", "shoal/py.typed", "shoal/tools/report/assets/page.js"} <= bundle.listing.keys()
    assert len(bundle.pieces) == len([path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"])
    assert bundle.name == code_bundle().name


# How they arrive


def test_a_project_arrives_whole(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "there" / "p"
    assert arrives(project_bundle(project), there) == {"base": str(there)}
    assert contents(there) == {name: text for name, text in contents(project).items() if not name.startswith("runs")}
    assert (there / "alias.py").readlink() == Path("lib/deep.py")
    assert os.access(there / "train.py", os.X_OK)
    assert not os.access(there / "notes.txt", os.X_OK)


def test_an_update_removes_what_is_gone_and_leaves_what_is_not_ours(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "p"
    arrives(project_bundle(project), there)
    (there / "lib/checkpoint").write_text("made there")
    (project / "alias.py").unlink()
    write(project, {"train.py": "print(2)\n"})
    bundle = project_bundle(project)
    changed = FileBundle(bundle.name, tuple(piece for piece in bundle.pieces if piece.path == "train.py"))
    arrives(changed, there, remove=["alias.py", "notes.txt"])
    assert (there / "train.py").read_text() == "print(2)\n"
    assert (there / "lib/checkpoint").read_text() == "made there"
    assert not (there / "alias.py").is_symlink()
    assert not (there / "notes.txt").exists()


def test_a_folder_may_become_a_file_and_back(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "p"
    arrives(project_bundle(project), there)
    source = project / "notes.txt"
    arrives(FileBundle("", (make_piece(source, "lib"),)), there, remove=["lib/deep.py"])
    assert (there / "lib").read_text() == "later\n"
    arrives(FileBundle("", (make_piece(source, "lib/again"),)), there, remove=["lib"])
    assert (there / "lib/again").read_text() == "later\n"


def test_code_appears_all_at_once_or_not(project: Path, tmp_path: Path) -> None:
    bundle, there = project_bundle(project), tmp_path / "code" / "abc"
    sent = b"".join(stream({"base": str(there), "whole": True, "remove": [], "note": None}, bundle.pieces))
    assert received(sent[:-70])["error"] == "the connection ended in the middle of a file"
    assert list(there.parent.iterdir()) == []
    assert received(sent) == {"base": str(there)}
    (there / "train.py").write_text("somebody was faster")
    assert received(sent) == {"base": str(there)}
    assert (there / "train.py").read_text() == "somebody was faster"


def test_a_damaged_file_never_gets_its_name(project: Path, tmp_path: Path) -> None:
    piece = make_piece(project / "big.bin", "data.tokens")
    sent = bytearray(b"".join(stream({"base": str(tmp_path), "whole": False, "remove": [], "note": None}, [piece])))
    sent[-200] ^= 1
    assert "did not arrive as it was sent" in received(bytes(sent))["error"]
    assert [path.name for path in tmp_path.iterdir()] == [project.name]


def test_an_interrupted_update_is_taken_for_none(project: Path, tmp_path: Path) -> None:
    there = tmp_path / "p"
    before = project_bundle(project)
    arrives(before, there)
    write(project, {"train.py": "print(2)\n"})
    after = project_bundle(project)
    changed = [piece for piece in after.pieces if piece.path == "train.py"]
    note = {"digest": after.digest, "files": after.listing}
    received(b"".join(stream({"base": str(there), "whole": False, "remove": [], "note": note}, changed))[:-65])
    kept = remote_facts.read_note(there / remote_facts.NOTE)
    assert kept["digest"] == ""
    assert kept["files"] == {path: digest for path, digest in before.listing.items() if path != "train.py"}


@pytest.mark.parametrize("path", ["/etc/evil", "../evil", "a/../../evil"])
def test_nothing_is_written_outside_its_folder(project: Path, tmp_path: Path, path: str) -> None:
    answer = arrives(FileBundle("", (make_piece(project / "notes.txt", path),)), tmp_path / "p", note=False)
    assert "would lie outside" in answer["error"]


def test_no_room_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    order = {
        "base": str(tmp_path / "p"),
        "whole": False,
        "remove": [],
        "note": None,
        "files": [["x", 10**18, 0o644, None]],
    }
    answer = received(json.dumps(order).encode() + b"\n")
    assert answer["needed"] > 10**18 > answer["free"]


def test_a_file_that_shrinks_while_it_is_copied(project: Path) -> None:
    piece = make_piece(project / "big.bin", "x")
    (project / "big.bin").write_text("short")
    with pytest.raises(UsageError, match="became shorter"):
        list(stream({}, [piece]))


def test_what_a_power_cut_left_is_thrown_out_later(tmp_path: Path) -> None:
    for name in (".abc.part-1", ".fresh.part-2"):
        (tmp_path / name).write_text("")
    long_ago = time.time() - 3 * 24 * 3600
    os.utime(tmp_path / ".abc.part-1", (long_ago, long_ago))
    remote_copy.remove_stale_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".fresh.part-2"]


# What is there


def test_what_is_held_is_told_by_digest_and_size(tmp_path: Path) -> None:
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


def test_a_machine_describes_itself() -> None:
    expected = {
        name: [entry.address for entry in entries if entry.family.name == "AF_INET"]
        for name, entries in psutil.net_if_addrs().items()
    }
    found = {name: [each for each in own if ":" not in each] for name, own in remote_facts.interfaces().items()}
    assert {name: own for name, own in found.items() if own} == {name: own for name, own in expected.items() if own}
    assert 1 <= remote_facts.cores() <= len(os.sched_getaffinity(0))
    assert remote_facts.free_bytes(Path("/tmp/not/there/yet")) > 0


def test_a_stream_is_read_as_it_was_written(project: Path) -> None:
    sent = io.BytesIO(b"".join(stream({"base": "x"}, project_bundle(project).pieces)))
    assert [path for path, *_ in json.loads(sent.readline())["files"]] == sorted(project_bundle(project).listing)
