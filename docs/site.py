"""MkDocs hook: the README is the first page, and links to files outside of docs/ are the names of those files."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
_CODE = re.compile(r"(?<=(?<!</span>)<code>)[^<]*")  # not that of blocks, which follows a </span>
_WORD = re.compile(r"(?<!\S)(?=\S*[-/\[])\S{2,}")
_PHONE = 36  # characters of code in a line of a phone
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files, config):
    """Add the README, whose links are seen from the root of the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](", "](../").replace("](../docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown, page, config, **_):
    """Write the name of a file that is not part of the site instead of a link to it; find guides before references."""
    if page.file.src_uri.startswith(("client/", "lab/")):
        page.meta["search"] = {"boost": 0.01}

    def plain(link):
        target = (Path(config.docs_dir) / page.file.src_uri).parent / link[2]
        outside = "://" not in link[2] and ROOT / "docs" not in target.resolve().parents
        return f"`{link[1].strip('`')}`" if outside else link[0]

    return _LINK.sub(plain, markdown)


def on_page_content(html, **_):
    """Keep `--model-store` in one line: browsers break words after hyphens. Long words may break, except in tables."""

    def whole(word):
        return f"<span{' class=long' if len(word[0]) > _PHONE else ''}>{word[0]}</span>"

    return _CODE.sub(lambda code: _WORD.sub(whole, code[0]), html)
