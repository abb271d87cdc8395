"""The HTML report in headless Chromium, at desktop and phone width: layout, colours, details."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import TestCase

TESTS = Path(__file__).parent.parent

# Loads the report into a frame of some width, opens the first failure, and writes what it measures into its own page.
MEASURE = """
<!doctype html>
<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>
<pre id=out></pre>
<script>
window.onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const style = (e) => frames[0].getComputedStyle(e);
  const details = page.querySelector("details");
  const closed = details.querySelector("pre").checkVisibility({{contentVisibilityAuto: true}});
  details.querySelector("summary").click();
  const pre = details.querySelector("pre");
  const cells = [...page.querySelectorAll("#matrix td")];
  document.getElementById("out").textContent = JSON.stringify({{
    width: page.documentElement.clientWidth,
    overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    rows: page.querySelectorAll("#matrix tbody tr").length,
    columns: page.querySelectorAll("#matrix thead th").length,
    colors: Object.fromEntries(cells.map((c) => [c.className, style(c).backgroundColor])),
    cut: cells.filter((c) => c.scrollWidth > c.clientWidth).length,
    closed: closed,
    open: pre.getBoundingClientRect().height,
    right: pre.getBoundingClientRect().right,
    text: pre.textContent,
    target: !!page.querySelector(page.querySelector("#matrix a").getAttribute("href")),
  }});
}};
</script>
"""


def report(directory):
    """A report with passes, failures and unsupported cells."""
    path = Path(directory, "report.html")
    command = [sys.executable, "-m", "conformance", "run", "--backend", "hostile_backends:OneFormat"]
    done = subprocess.run([*command, "--html", path], env={"PYTHONPATH": str(TESTS)}, check=False, capture_output=True)
    assert done.returncode == 1, done.stderr
    return path.read_text(encoding="utf-8")


class Page(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        assert cls.chromium, "Chromium is not installed"
        directory = TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.folder = Path(directory.name)
        cls.page = report(directory.name)

    def measured(self, width):
        wrapper = self.folder / f"{width}.html"
        wrapper.write_text(MEASURE.format(width=width, page=html.escape(self.page)), encoding="utf-8")
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += f" --disable-component-update --disable-sync --user-data-dir={self.folder / 'profile'}"
        command = [self.chromium, *flags.split(), "--virtual-time-budget=5000", "--dump-dom", wrapper.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        return json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)[1]))

    def check(self, width):
        found = self.measured(width)
        self.assertLessEqual(abs(found["width"] - width), 20)
        self.assertEqual(found["overflow"], 0)
        self.assertEqual(found["cut"], 0)
        self.assertEqual((found["rows"], found["columns"]), (27, 6))
        colors = {"passed": (46, 125, 50), "failed": (198, 40, 40), "unsupported": (249, 168, 37)}
        for kind, color in colors.items():
            self.assertEqual(found["colors"][kind], f"rgb{color}")
        self.assertFalse(found["closed"])
        self.assertGreater(found["open"], 40)
        self.assertLessEqual(found["right"], width)
        self.assertTrue(found["target"])
        self.assertRegex(found["text"], r"first at \[\d+, \d+\]:\s+expected .* \(0x\w+\), found .* \(0x\w+\)")
        self.assertRegex(found["text"], r"these bytes decide: .* scales\[\d+\]=\w\w")

    def test_desktop(self):
        self.check(1280)

    def test_phone(self):
        self.check(390)
