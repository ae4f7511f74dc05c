"""A hook of mkdocs: explorer pages, and the files outside of docs/ that pages point at, become part of the site."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from torchcpl.explore import page_of

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\]\(((?:\.\./)+)((?:results|examples)/[^)#]*|CONTRIBUTING\.md|LICENSE)")


def on_files(files: Any, config: Any) -> Any:
    """Add results and examples under the path they have in the repository, and the pages of docs/explorers/*.json.

    Such a JSON is what the element ``data`` of a page holds that ``torchcpl report … --explore PAGE`` has written.
    """
    from mkdocs.structure.files import File

    for path in (ROOT / "LICENSE", *ROOT.glob("results/*.json"), *ROOT.glob("examples/*.*")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    for path in ROOT.glob("docs/explorers/*.json"):
        page = page_of(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"explorers/{path.stem}.html", content=page.html))
        files.remove(files.get_file_from_path(f"explorers/{path.name}"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``../results/x.json``, right in the repository, is ``results/x.json`` in the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, match[1] + match[2]))
        return "](" + posixpath.relpath(target, folder or ".")

    return OUTSIDE.sub(inside, markdown)
