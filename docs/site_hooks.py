"""Hooks of mkdocs.yml that turn pages written for GitHub into a site.

They add the files outside docs/ that pages link to, and indent blocks in numbered lists as Python-Markdown wants them.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BLOCK = re.compile(
    r"^```.*?^```$|^ {3}```.*?^ {3}```$|^ {3}(?=\S)(?P<last>[^\n]*\n(?=\d+\. ))?", re.MULTILINE | re.DOTALL
)
"""Code, code in a list item, and a line of a list item. GitHub wants three blanks in a list. Python-Markdown wants
four, and an empty line before the next item.
"""
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every linked file of the repository, and the change log, under its path in the repository."""
    docs = Path(config.docs_dir)
    linked = {name for page in docs.glob("*.md") for name in OUTSIDE.findall(page.read_text(encoding="utf-8"))}
    for name in sorted({*linked, "CHANGELOG.md"}):
        if (docs.parent / name).is_file():
            files.append(File.generated(config, name, abs_src_path=str(docs.parent / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between docs/ and the rest of the repository into links of the site, and indent blocks in lists."""
    markdown = BLOCK.sub(_widened, markdown)
    if "/" not in page.file.src_uri and page.file.src_uri != "CHANGELOG.md":
        return OUTSIDE.sub(r"](\1", markdown)
    return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)


def _widened(block: re.Match[str]) -> str:
    if block[0].startswith("```"):
        return block[0]
    return re.sub(r"^(?=.)", " ", block[0], flags=re.MULTILINE) + ("\n" if block["last"] else "")
