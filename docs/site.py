"""What `make docs` adds to mkdocs: README.md as the home page, the examples, and the files that the pages link to.

A page links as it is right in the repository. On the site, a link to a file outside of docs/ leads to a page that shows
the file; a link to a folder is plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".cpp": "cpp", ".cu": "cpp", ".h": "cpp", ".json": "json", ".py": "python", ".sh": "bash", ".toml": "toml"}
PICTURE = ".png"


def _address(path: str) -> str:
    """Where a file of the repository is on the site, as mkdocs counts: a page ends in .md."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith((".md", PICTURE)) else f"source/{path}.md"


def _target(link: str, page: str) -> str | None:
    """The path in the repository that a link of a page leads to; None where it leads elsewhere, or nowhere."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return None if ":" in link or path.startswith("..") or not (ROOT / path).exists() else path


def _on_site(text: str, page: str) -> str:
    """The text of a page of the repository with its links as they are on the site."""
    here = posixpath.dirname(_address(page)) or "."

    def replace(found: re.Match[str]) -> str:
        words, link, anchor = found.groups()
        path = _target(link, page)
        if path is None:  # mkdocs tells of those that lead nowhere
            return found[0]
        if (ROOT / path).is_dir():
            return words
        return f"[{words}]({posixpath.relpath(_address(path), here)}{anchor or ''})"

    return LINK.sub(replace, text)


def _generated(config: Any, path: str) -> File:
    if path.endswith(PICTURE):
        return File.generated(config, _address(path), abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return File.generated(config, _address(path), content=_on_site(text, path))
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return File.generated(config, _address(path), content=f"# {path}\n\n````{language}\n{text}\n````\n")


def on_files(files: Files, config: Any) -> Files:
    """Adds what is not in docs/."""
    asked = [path for path in PAGES if (ROOT / path).exists()]
    asked += [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    asked += [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")]
    seen: set[str] = set()
    while asked:
        path = asked.pop()
        if path in seen or (ROOT / path).is_dir():
            continue
        seen.add(path)
        if path.endswith(".md"):
            links = (_target(found[2], path) for found in LINK.finditer((ROOT / path).read_text()))
            asked += [target for target in links if target is not None]
        if not path.startswith("docs/"):
            files.append(_generated(config, path))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes the links of the pages of docs/; those of others have been changed."""
    return _on_site(markdown, f"docs/{page.file.src_uri}") if page.file.generated_by is None else markdown
