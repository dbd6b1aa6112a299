"""The page in headless Chromium, with a Hub on loopback: what a visitor does, and what is refused.

It needs Gradio, Selenium, Chromium and chromedriver, which the package's own tests do without: see README.md.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="needs Gradio: pip install -r space/requirements.txt")
pytest.importorskip("selenium", reason="needs Selenium: pip install selenium")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
if BROWSER is None or shutil.which("chromedriver") is None:
    pytest.skip("needs Chromium and chromedriver", allow_module_level=True)

from helpers import hub_server as loopback  # noqa: E402 - where it can be run
from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from mtp_extract import inspect  # noqa: E402
from mtp_extract.data import sample_bundle  # noqa: E402
from mtp_extract.pipeline.check import CheckpointDirectory  # noqa: E402

HERE = Path(__file__).resolve().parent
MOCKED = "mock-oauth-token-for-local-dev"
"""The token of everybody who signs in where Gradio is in no Space."""
REPO = "org/sample-litert-lm"
PATIENCE = 60.0


@contextmanager
def served(hub: loopback.HubServer, home: Path, before: str = "pass") -> Iterator[str]:
    """The URL of the page, in a process of its own; ``before`` is Python that runs there first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (home / "tmp").mkdir(parents=True)
    own = {"HF_ENDPOINT": hub.url(), "HF_HOME": str(home), "HF_TOKEN": MOCKED, "HF_HUB_DISABLE_XET": "1"}
    own |= {"GRADIO_SERVER_PORT": port, "TMPDIR": str(home / "tmp"), "NO_PROXY": "127.0.0.1"}
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import app; {before}; app.main()"
    with open(home / "log", "w") as log:
        process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | own, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/"
        wait(lambda: process.poll() is not None or urllib.request.urlopen(url).status == 200)
        assert process.poll() is None, (home / "log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait()
        # No token of anybody stands in the log.
        assert MOCKED not in (home / "log").read_text()


def wait(done: Callable[[], Any]) -> Any:
    """What ``done`` says when it is something; until then it may fail, as what it looks for is not there yet."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if found := done():
                return found
        except Exception:
            if time.monotonic() > end:
                raise
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def hub() -> Iterator[loopback.HubServer]:
    with pytest.MonkeyPatch.context() as patch, closing(loopback.HubServer()) as server:
        patch.setattr(loopback, "TOKEN", MOCKED)
        server.add(REPO, "sample.litertlm", sample_bundle().read_bytes())
        me = {"type": "user", "name": "org", "fullname": "Org", "avatarUrl": ""}
        server.plain["/api/whoami-v2"] = loopback.Content.of(json.dumps(me).encode())
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for switch in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-dev-shm-usage"):
        options.add_argument(f"--{switch}")
    folder = str(tmp_path_factory.mktemp("downloads"))
    options.add_experimental_option("prefs", {"download.default_directory": folder})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    driver.downloads = Path(folder)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def url(hub: loopback.HubServer, home: Path) -> Iterator[str]:
    with served(hub, home) as address:
        yield address


class Page:
    """What a visitor sees and does."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        driver.set_window_size(1280, 1400)
        driver.get(url)
        self.find("#extract")

    def find(self, selector: str) -> Any:
        return wait(lambda: self.driver.find_element(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        return str(self.find(selector).text)

    def write(self, selector: str, text: str) -> None:
        field = self.find(f"{selector} input, {selector} textarea")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)

    def choose(self, selector: str, text: str) -> None:
        self.write(selector, text)
        self.find(f"{selector} input").send_keys(Keys.ENTER)

    def press(self, selector: str) -> None:
        self.find(selector).click()

    def says(self, what: str, where: str = "#status") -> str:
        """The text at ``where``, once ``what`` is in it."""
        wait(lambda: what in self.text(where))
        return self.text(where)


@pytest.fixture
def page(browser: webdriver.Chrome, url: str) -> Page:
    return Page(browser, url)


def left(home: Path) -> list[Path]:
    return list((home / "tmp").glob("mtp-space-*"))


def test_looking_reads_headers_alone(page: Page, hub: loopback.HubServer, home: Path) -> None:
    hub.sent.clear()
    page.write("#source", REPO + Keys.ENTER)
    shown = page.says("A drafter", "#holds")
    drafter = inspect(sample_bundle()).report["drafter"]
    assert f"{drafter['parameters'] / 1e6:.2f} M parameters" in shown
    assert "mtp_drafter" in shown
    assert 0 < hub.sent["storage"] < sample_bundle().stat().st_size / 2
    # Nobody has signed in, and the token of this machine is nobody's.
    assert {r.authorization for r in hub.requests if "/resolve/" in r.path or "/tree/" in r.path} == {None}
    assert left(home) == []


def test_extract_and_download(page: Page, home: Path) -> None:
    page.write("#source", f"hf://{REPO}/sample.litertlm")
    page.choose("#engine", "llama.cpp")
    page.press("#extract")
    said = page.says("Verified before rounding")
    assert "the gguf format" in said
    assert "MTP drafter" in page.says("MTP drafter", "#card")
    (directory,) = (made for folder in left(home) for made in folder.iterdir() if "gguf" in str([*made.iterdir()]))
    CheckpointDirectory.of(directory)
    (weights,) = directory.glob("mtp-*.gguf")
    links = page.driver.find_elements(By.CSS_SELECTOR, "#files a")
    assert {link.get_attribute("download") for link in links} == {path.name for path in directory.iterdir()}
    next(link for link in links if link.get_attribute("download") == weights.name).click()
    arrived = page.driver.downloads / weights.name
    wait(lambda: arrived.exists() and arrived.read_bytes() == weights.read_bytes())


@pytest.mark.parametrize(("width", "height"), [(1280, 1000), (390, 1300)])
def test_nothing_is_wider_than_the_screen(page: Page, width: int, height: int) -> None:
    """With PICTURES=DIR, what is seen then is written there."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        page.write("#source", REPO + Keys.ENTER)
        page.says("A drafter", "#holds")
        page.press("#extract")
        page.says("MTP drafter", "#card")
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
        if folder := os.environ.get("PICTURES"):
            page.driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
            page.driver.save_screenshot(f"{folder}/space-{width}.png")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("button", ["#look", "#extract"])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("org/none", "hf://org/none: there is no such repository"),
        ("/etc/passwd", "Expected ORG/NAME[/FILE] of the Hugging Face Hub, or a URL of its site"),
        ("<img src=x>", "found <img src=x>"),
    ],
)
def test_a_wrong_name_is_said_in_one_line(page: Page, button: str, source: str, said: str) -> None:
    page.write("#source", source)
    page.press(button)
    assert "\n" not in page.says(said)


def test_an_engine_that_loads_none(page: Page) -> None:
    page.write("#source", REPO)
    page.choose("#engine", "lm-studio")
    page.press("#extract")
    page.says("LM Studio does not draft with a Gemma 4 drafter")


def test_publish_to_ones_own_account(page: Page, hub: loopback.HubServer) -> None:
    page.write("#source", REPO)
    page.press("#extract")
    page.says("Verified")
    assert not page.driver.find_elements(By.ID, "publish")
    next(b for b in page.driver.find_elements(By.TAG_NAME, "button") if "Sign in" in b.text).click()
    wait(lambda: any("Logout (org)" in b.text for b in page.driver.find_elements(By.TAG_NAME, "button")))
    page.write("#source", REPO)
    page.press("#extract")
    page.says("Verified")
    assert page.find("#name textarea, #name input").get_attribute("value") == "org/sample-mtp-drafter"
    page.write("#name", "someone/else")
    page.press("#send")
    page.says("You don't have the rights to create a model under this namespace", "#published")
    page.write("#name", "org/drafter")
    page.press("#send")
    page.says("matches by hash", "#published")
    assert hub.repos["org/drafter"].private
    assert "model.safetensors" in hub.repos["org/drafter"].files


def test_what_is_too_large_is_refused_before_it_is_fetched(
    browser: webdriver.Chrome, hub: loopback.HubServer, tmp_path: Path
) -> None:
    with served(hub, tmp_path / "home", "app.LARGEST = 100_000") as url:
        page = Page(browser, url)
        hub.sent.clear()
        page.write("#source", REPO)
        page.press("#extract")
        page.says("Expected a drafter of up to 0.0001 GB, found one of ")
        page.says("Extract it on a machine of yours")
        assert hub.sent["storage"] < sample_bundle().stat().st_size / 2
        assert left(tmp_path / "home") == []


def test_what_takes_too_long_is_stopped(browser: webdriver.Chrome, hub: loopback.HubServer, tmp_path: Path) -> None:
    with served(hub, tmp_path / "home", "app.LONGEST = -1") as url:
        page = Page(browser, url)
        page.write("#source", REPO)
        page.press("#extract")
        page.says("Expected to be done in -1 seconds, and was not")
        assert left(tmp_path / "home") == []
