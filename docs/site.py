"""MkDocs hook: pages from the root of the repository, tabs for one call, links to files outside of docs/ as names."""

import re
from pathlib import Path
from textwrap import indent

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
_CODE = re.compile(r"(?<=(?<!</span>)<code>)[^<]*")  # not that of blocks, which follows a </span>
_WORD = re.compile(r"(?<!\S)(?=\S*[-/\[])\S{2,}")
_PHONE = 36  # characters of code in a line of a phone
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
_EXAMPLE = re.compile(r"^\[(examples/[\w/]+\.py)\]\(.*(?:\n.+)*", re.MULTILINE)
_BLOCKS = re.compile(r"(?:^```(?:sh|python|js|go)\n.*?^```\n\n?){2,}", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```(sh|python|js|go)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {"sh": "curl", "python": "Python", "js": "JavaScript", "go": "Go"}


def _tabs(blocks):
    """The same call in several languages, block after block, as tabs; elsewhere it is read as it stands."""
    found = _BLOCK.findall(blocks[0])
    if len({language for language, _ in found}) < len(found):
        return blocks[0]
    tabs = [(_LANGUAGES[language], indent(f"```{language}\n{code}```\n", " " * 4)) for language, code in found]
    return "".join(f'=== "{name}"\n\n{block}\n' for name, block in tabs)


def _with_code(paragraph):
    """A paragraph that begins with an example, and its code."""
    code = (ROOT / paragraph[1]).read_text(encoding="utf-8")
    return f"{paragraph[0]}\n\n```python\n{code}```"


def on_files(files, config):
    """Add the pages at the root of the repository, whose links are seen from there."""
    for source, name in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](", "](../").replace("](../docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, **_):
    """Write the name of a file that is not part of the site instead of a link to it; find guides before references."""
    if page.file.src_uri.startswith(("client/", "lab/", "reference/")):
        page.meta["search"] = {"boost": 0.01}

    def plain(link):
        target = (Path(config.docs_dir) / page.file.src_uri).parent / link[2]
        outside = "://" not in link[2] and ROOT / "docs" not in target.resolve().parents
        return f"`{link[1].strip('`')}`" if outside else link[0]

    markdown = _EXAMPLE.sub(_with_code, markdown)
    return _LINK.sub(plain, _BLOCKS.sub(_tabs, markdown))


def on_page_content(html, **_):
    """Keep `--model-store` in one line: browsers break words after hyphens. Long words may break, except in tables."""

    def whole(word):
        return f"<span{' class=long' if len(word[0]) > _PHONE else ''}>{word[0]}</span>"

    return _CODE.sub(lambda code: _WORD.sub(whole, code[0]), html)
