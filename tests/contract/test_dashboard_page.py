"""The pages of node and fleet: one style, nothing from elsewhere, and a policy that names what they run."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from backend_client.cli import dashboard as fleet_dashboard
from worker_node.http import pages

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "backend_client" / "cli" / "dashboard.html"
PLAYGROUND = PAGE.with_name("playground.html")


class Inspector(HTMLParser):
    """Collects the elements, and the text of scripts and styles as a browser takes it."""

    def __init__(self):
        super().__init__()
        self.elements = []
        self.inline = {"script": [], "style": []}

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in self.inline:
            self.inline[tag].append("")

    def handle_data(self, data):
        if self.cdata_elem:
            self.inline[self.cdata_elem][-1] += data


@pytest.fixture(scope="module", params=["/dashboard", "/play"])
def html(request):
    return pages.read_pages()[request.param]


@pytest.fixture(scope="module")
def inspected(html):
    inspector = Inspector()
    inspector.feed(html)
    return inspector


def test_each_page_exists_once_and_the_playground_has_the_style_and_helpers_of_the_dashboard():
    found = [page for package in ("backend_client", "worker_node") for page in (ROOT / package).rglob("*.html")]
    assert found == [PAGE, PLAYGROUND]
    page, playground = pages.read_pages().values()
    assert fleet_dashboard.read_pages() == {"/dashboard": page, "/play": playground}
    assert page == PAGE.read_text(encoding="utf-8")
    assert "--paper: light-dark(" in playground
    assert "function make(" in playground
    assert "function spark(" not in playground


def test_both_servers_send_pages_alike(html):
    assert pages.page_headers(html) == fleet_dashboard.page_headers(html)


@pytest.mark.parametrize("kind", ["script", "style"])
def test_the_policy_names_the_one_inline_block(html, inspected, kind):
    (text,) = inspected.inline[kind]
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    policy = pages.page_headers(html)["Content-Security-Policy"]
    assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy


def test_nothing_comes_from_elsewhere(html, inspected):
    for tag, attributes in inspected.elements:
        assert not {"src", "srcset", "action"} & attributes.keys(), tag
        assert re.fullmatch(r"#\w+|data:,|dashboard|docs|health", attributes.get("href", "#main")), tag
    assert "url(" not in html
    assert "@import" not in html
    assert re.findall(r"https?://[^\s\"'`$]+", html) == ["http://www.w3.org/2000/svg"]


def test_what_a_node_reports_cannot_become_markup(inspected):
    (script,) = inspected.inline["script"]
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert sink not in script
