"""MkDocs hook of the documentation site: pages from outside docs/, an API reference, and working links to sources.

Links in the documents are relative paths that work on a code host. Here each of them leads to a page of the site: pages
of docs/ as they are, the documents in ``ELSEWHERE``, and for any other file or folder of the repository a page that
shows it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "infra/README.md": "servers.md",
    "magrpo_kernels/RESULTS.md": "kernel-results.md",
}
"""Documents outside docs/ that are pages of the site."""
MODULES = {
    "The library": [
        "magrpo.library",
        "magrpo.types",
        "magrpo.interfaces",
        "magrpo.plugins",
        "magrpo.errors",
        "magrpo.config.run",
        "magrpo.config.sections",
        "magrpo.run.steps",
        "magrpo.run.files",
    ],
    "The maths": ["magrpo.algo.*"],
    "The kernels": ["magrpo_kernels", "magrpo_kernels.*"],
}
"""Modules of the API reference. ``*``: every public module of the package."""

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the API reference to the navigation."""
    config.nav.append({"API": [{group: [{m: f"api/{m}.md"} for m in expand_modules(group)]} for group in MODULES]})
    return config


def expand_modules(group: str) -> list[str]:
    """The module names of a group of ``MODULES``, with ``*`` replaced."""
    names: list[str] = []
    for entry in MODULES[group]:
        package, star, _ = entry.partition(".*")
        folder = ROOT.joinpath(*package.split("."))
        paths = sorted(folder.glob("[!_]*.py")) if star else []
        names += [f"{package}.{path.stem}" for path in paths] or [entry]
    return names


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of ``ELSEWHERE``, the API reference, and every file that a document links to."""
    for source, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for group in MODULES:
        for module in expand_modules(group):
            files.append(File.generated(config, f"api/{module}.md", content=f"# {module}\n\n::: {module}\n"))
    documents = [file for file in files if file.src_uri.endswith(".md") and not file.src_uri.startswith("api/")]
    for path in sorted({path for file in documents for path in find_linked_sources(file)}):
        page = File.generated(config, source_uri(path), content=show_source(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a document at pages of the site."""
    here = repository_path(page.file.src_uri)

    def point(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups(default="")
        path = resolve_link(here, target)
        if path is None:
            return match[0]
        uri = posixpath.relpath(site_uri(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"{before}{uri}{anchor}{after}"

    if page.file.src_uri.startswith(("api/", "source/")):
        return markdown
    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [LINK.sub(point, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(point, markdown[end:])])


def find_linked_sources(file: File) -> Iterator[str]:
    """Paths in the repository, outside the documents, that a document links to."""
    for match in LINK.finditer(FENCE.sub("", file.content_string)):
        path = resolve_link(repository_path(file.src_uri), match[2])
        if path is not None and site_uri(path).startswith("source/"):
            yield path


def repository_path(src_uri: str) -> str:
    """Where the document behind a page lies in the repository."""
    return next((path for path, uri in ELSEWHERE.items() if uri == src_uri), f"docs/{src_uri}")


def resolve_link(document: str, target: str) -> str | None:
    """The path in the repository that a link leads to; None for a link to another site or to nothing."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
    return path if "://" not in target and (ROOT / path).exists() else None


def site_uri(path: str) -> str:
    """The page of the site for a path in the repository."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else source_uri(path)


def source_uri(path: str) -> str:
    """The page that shows a source file or folder."""
    return f"source/{path}.md"


def show_source(path: str) -> str:
    """A page with the text of a file, or the names in a folder."""
    full = ROOT / path
    if full.is_dir():
        names = sorted(child.name + "/" * child.is_dir() for child in full.iterdir() if child.name[0] not in "._")
        return f"# {path}/\n\n" + "".join(f"- `{name}`\n" for name in names)
    language = {".py": "python", ".toml": "toml", ".sh": "sh", ".yaml": "yaml", ".json": "json"}.get(
        full.suffix, "text"
    )
    return f"# {path}\n\n``````{language}\n{full.read_text(encoding='utf-8')}``````\n"


class PlainRoles(Extension):
    """Sphinx roles (``:class:`~magrpo.types.Turn```) and ``::`` in docstrings, as Markdown."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            text = re.sub(r":\w+:`(~?)([\w.]+)`", shorten_role, obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def shorten_role(match: re.Match[str]) -> str:
    """The text of a role: the last part of the name after ``~``, else the name."""
    return f"`{match[2].rpartition('.')[2] if match[1] else match[2]}`"
