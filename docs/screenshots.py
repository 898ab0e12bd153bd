"""Make the pictures of the dashboard: python docs/screenshots.py [DIRECTORY]

It starts a job with three learners, kills its server, changes its learning rate, and takes the
pages by Chromium. Needs playwright and Debian's chromium; and root, so that no other job is seen.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

LEARNER = """
    import os, sys, time
    import numpy as np
    from gadei_ps.learners.client import Client

    number = int(os.environ.get("GADEI_PS_LEARNER", 0))
    chance = np.random.default_rng(number)
    with Client(tensors={"embedding": np.zeros((2000, 64)), "out": np.zeros((64, 20))}) as client:
        while not client.stopping:
            loss = 0.25 + 2.2 * 0.9985 ** client.published + 0.12 * chance.standard_normal()
            time.sleep(0.012 + 0.006 * number + 0.004 * chance.random())
            gradients = {"embedding": np.full((2000, 64), 1e-4), "out": np.full((64, 20), 1e-4)}
            client.push(gradients, loss=abs(loss), samples=32)
"""
SECONDS = 25.0  # of training before and after the failover


def main(out: Path) -> None:
    """Write the pictures to this directory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        here = Path(name)
        for variable in ("RUNTIME", "STATE"):
            os.environ[f"GADEI_PS_{variable}_DIR"] = str(here / variable.lower())
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        (here / "train.py").write_text(textwrap.dedent(LEARNER))
        runs = [start("run", job, "--learners", n, "--", "python", here / "train.py")
                for job, n in (("intents", 3), ("baseline", 1))]  # fmt: skip
        served = start("dashboard", "--port", 0, "--json", stdout=subprocess.PIPE)
        try:
            assert served.stdout is not None
            take(json.loads(served.stdout.readline())["url"], out)
        finally:
            for job in ("intents", "baseline"):
                subprocess.run([*GADEI, "stop", job], check=False)
            served.terminate()
            for one in (*runs, served):
                one.wait()


GADEI = (sys.executable, "-m", "gadei_ps")


def start(*words: object, **how: Any) -> subprocess.Popen[bytes]:
    """Start a command."""
    return subprocess.Popen([*GADEI, *map(str, words)], **how)


def take(link: str, out: Path) -> None:
    """Take the pages."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1100, "height": 760})
        page.set_default_timeout(120_000)
        page.on("dialog", lambda dialog: dialog.accept())
        page.goto(link)
        page.get_by_role("link", name="intents").click()
        page.locator(".chart h3", has_text="loss").first.wait_for()
        time.sleep(SECONDS)
        page.locator("button[aria-label^='Kill server']").click()
        page.locator("#events li", has_text="failover in").wait_for()
        time.sleep(SECONDS / 2)
        page.locator("#settings").fill("lr=0.005")
        page.get_by_role("button", name="Set").click()
        page.locator("#events li", has_text="set lr").wait_for()
        time.sleep(SECONDS / 2)
        page.locator("#smooth").check()
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=out / "dashboard-job.png")
        page.emulate_media(color_scheme="dark")
        time.sleep(1.5)
        page.screenshot(path=out / "dashboard-dark.png")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1100, "height": 300})
        page.get_by_role("link", name="Jobs").click()
        time.sleep(15)
        page.screenshot(path=out / "dashboard-jobs.png")
        browser.close()


if __name__ == "__main__":
    if "alone" not in sys.argv:  # in a mount namespace with an empty /dev/shm
        again = 'mount -t tmpfs shm /dev/shm && exec "$@" alone'
        os.execvp("unshare", ["unshare", "-m", "sh", "-c", again, "sh", sys.executable, *sys.argv])
    sys.argv.remove("alone")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures")
