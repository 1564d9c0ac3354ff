"""Give the site pages for the files outside docs/ that its pages link to: mkdocs calls this module's functions.

The pages of docs/ are read on a git forge, too, where a link such as ../examples/images.py leads to the file itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages of the project that are not in docs/, by their names in the site.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security-policy.md"}
# How much a page counts in the search: solutions before logs.
_BOOSTS = {
    "get-started.md": 2,
    "troubleshooting.md": 3,
    "commands.md": 0.5,
    "measurements.md": 0.3,
    "changelog.md": 0.3,
}
_LINK = re.compile(r"(\]\()([^)#:\s]+)")
_LANGUAGES = {".py": "python", ".ipynb": "json", ".toml": "toml", "": "docker"}


def page_of(path: str) -> str:
    """Return the page of the site that shows a file of the project."""
    return path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, f"files/{path}.md")


def move_links(text: str, path: str) -> str:
    """Return the text of a page of the project with links that lead to the same files from its place in the site."""

    def move(match: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(path).parent / match[2])
        return match[1] + os.path.relpath(page_of(target), PurePosixPath(page_of(path)).parent)

    # On a forge a page is known by its file; in the site its name is enough.
    return _LINK.sub(move, re.sub(r"\[([\w-]+)\.md\]\(", r"[\1](", text))


def show_file(path: str) -> str:
    """Return the page of a file that is no page itself."""
    file = ROOT / path
    return f"# {path}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}\n````\n"


def on_files(files: Files, config: Any) -> Files:
    linked = {
        match for page in ROOT.glob("docs/*.md") for match in re.findall(r"\]\(\.\./([^)#\s]+)", page.read_text())
    }
    for path in sorted(linked | set(PAGES)):
        if path.startswith("docs/"):
            continue
        text = move_links((ROOT / path).read_text(), path) if path in PAGES else show_file(path)
        files.append(File.generated(config, page_of(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    page.meta["search"] = {"boost": _BOOSTS.get(name, 1), "exclude": name.startswith("files/")}
    return move_links(markdown, f"docs/{name}") if page.file.generated_by is None else markdown


def on_post_build(config: Any) -> None:
    """Remove the page for wrong addresses, whose links begin at the root of a web server, and maps for debuggers."""
    for file in Path(config.site_dir).rglob("*"):
        if file.name == "404.html" or file.suffix == ".map":
            file.unlink()
