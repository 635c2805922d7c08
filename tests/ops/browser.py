"""A real Chromium, driven by WebDriver, with what the tests of the dashboard ask of it."""

import contextlib
import json
import shutil
import subprocess

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
# Limits are for a hang: on a busy machine the browser, or what it looks at, may not run for seconds.
HANG_S = 180
ATTEMPTS = 3
# The whole page, each time that anything in it changes: what a row is like, and how it looks.
RECORDER = """
const [selector] = arguments;
window.recorded = [];
const look = () => {
  const row = document.querySelector(selector);
  if (!row) return;
  const seen = {
    level: row.className, title: document.title, words: row.innerText,
    background: getComputedStyle(row.cells[0]).backgroundColor,
    problems: document.querySelector("#problems").innerText,
  };
  const before = window.recorded.at(-1);
  if (!before || before.level !== seen.level) window.recorded.push(seen);
};
new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true });
look();
"""


class Browser:
    """One window. `errors` are what the page wrote to the console as such."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, url):
        self.driver.get(url)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, script, *arguments, timeout=HANG_S):
        """Wait until the script returns something true, and return it.

        The page asks its server each second and may look otherwise a moment later, so what belongs together is in one
        script: between two scripts an answer may have been late.
        """

        try:
            waiting = WebDriverWait(self.driver, timeout, poll_frequency=0.05)
            return waiting.until(lambda driver: driver.execute_script(script, *arguments))
        except TimeoutException:
            shown = self.run("return document.title + '\\n' + document.body.innerText")
            raise AssertionError(f"never true: {script} {arguments}\n{shown[:3000]}") from None

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def size(self, width, height):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.wait("return innerWidth === arguments[0] && innerHeight === arguments[1]", width, height)
        # What the page does about its new size it has done by the second frame.
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def scheme(self, name):
        """Be a system that prefers light or dark, and no motion."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def press(self, *keys):
        """Press keys as a user without a mouse does."""
        webdriver.ActionChains(self.driver).send_keys(*(getattr(Keys, key, key) for key in keys)).perform()

    def focused(self):
        """What has the focus: its id or its text, and the width of its outline in CSS pixels."""
        return self.run(
            "const e = document.activeElement; const style = getComputedStyle(e);"
            "return [e.id || e.innerText, style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth)]"
        )

    def record(self, selector):
        """Begin to record what becomes of the table row."""
        self.run(RECORDER, selector)

    def recorded(self):
        return self.run("return window.recorded")

    def errors(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in {"SEVERE", "WARNING"}]

    def leave(self):
        """Leave the page, before what serves it goes away; what it wrote to the console as errors, to its end."""
        self.driver.get("about:blank")
        return self.errors()

    def violations(self, axe):
        """What axe-core finds against WCAG 2.2 A and AA and its own best practices, in short.

        Only what it finds again and again: the page changes while it looks.
        """
        for _ in range(ATTEMPTS):
            if not (found := self._violations(axe)):
                break
        return found

    def assert_accessible(self, axe, widths):
        for width in widths:
            self.size(width, 900)
            assert self.overflow() == 0, width
            assert self.violations(axe) == []

    def _violations(self, axe):
        self.run(axe)
        result = self.driver.execute_async_script(
            "const done = arguments[0];"
            "axe.run(document, {resultTypes: ['violations']}).then(result => done(JSON.stringify(result.violations)))"
        )
        return [
            (violation["id"], node["target"], node["any"][0]["message"] if node["any"] else violation["help"])
            for violation in json.loads(result)
            for node in violation["nodes"]
        ]

    def overflow(self):
        """By how many pixels the page is wider than its window."""
        return self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")


@contextlib.contextmanager
def chromium(profile):
    """A browser with a fresh profile in `profile`, ended with the block; the test is skipped where there is none."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("NOT RUN: the dashboard is shown in Chromium; install Debian's chromium and chromium-driver")
    options = Options()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options, Service(driver, log_output=subprocess.DEVNULL))
    try:
        running.set_script_timeout(HANG_S)
        browser = Browser(running)
        browser.size(1280, 900)
        browser.scheme("light")
        yield browser
    finally:
        running.quit()
