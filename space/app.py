"""A page that takes the drafter out of a LiteRT bundle on the Hub: nothing is installed, and nothing kept.

Queue, limits of jobs, and what is removed when are Gradio's own. A bundle is read by ranges, with the token of whoever
is signed in or with none.
"""

from __future__ import annotations

import html
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_space
from huggingface_hub import get_token

import mtp_extract
from mtp_extract.cli._written import is_rounded
from mtp_extract.cli.terminal import format_size
from mtp_extract.errors import MtpExtractError, SourceError, escape
from mtp_extract.formats import ALL_FORMATS, ENGINES, MTP_FORMATS
from mtp_extract.io.address import parse_address
from mtp_extract.pipeline.extraction import choose_directory
from mtp_extract.pipeline.inspection import inspect
from mtp_extract.pipeline.writing import ExtractionResult
from mtp_extract.progress import Reporter
from mtp_extract.report.markdown import escape_markdown

LARGEST = 2_000_000_000
"""Bytes of a drafter: of its section, and of its numbers as F32. That of Gemma 4 E4B has 44 MB and 312 MB."""
LONGEST = 300
"""Seconds that a job may take. That drafter takes 2 s and the time of the download."""
KEPT = 1800
"""Seconds for which files are kept to be downloaded."""
IN_LINE = 20
"""Jobs that may wait; one runs at a time."""
LIMITS = (
    f"Drafters of up to {LARGEST / 1e9:g} GB, {LONGEST // 60} minutes a job, one job at a time. Files are removed "
    f"{KEPT // 60} minutes after they were made."
)
CHOICES = [*dict.fromkeys((*ENGINES, *MTP_FORMATS))]
STYLE = """
.gradio-container { width: 100%; max-width: 56rem !important; min-width: 0 !important; margin: 0 auto !important; }
.small { min-width: min(20rem, 100%) !important; opacity: .75; }
.done, .refused { border-left: 4px solid #2e7d32; padding: .7rem 1rem; overflow-wrap: anywhere; }
.refused { border-color: #b3261e; }
#card { min-width: 0; overflow: hidden; }
#card pre, #card table { display: block; overflow-x: auto; max-width: 100%; }
"""
HEAD = """# LiteRT bundle in, MTP drafter out

Takes the multi-token-prediction drafter out of a `.litertlm` bundle on the Hugging Face Hub and writes it as your
engine loads it. Every operator and constant of the bundle's graph is read; if what is written is not proven to compute
the same, you get nothing."""


def find_hub_address(text: str) -> str:
    """Return the ``hf://`` address of an id or of a URL of the Hub's site; nothing else is opened here.

    Raises:
        SourceError: it is something else, such as a path or another site.
    """
    if (address := parse_address(text.strip())) is not None:
        return address.name
    named = escape(text.strip().partition("?")[0]) or "nothing"
    raise SourceError(f"Expected ORG/NAME[/FILE] of the Hugging Face Hub, or a URL of its site, found {named}.")


class PageReporter(Reporter):
    """Shows bytes done on the page's bar, and ends a job whose time is up by raising MtpExtractError."""

    def __init__(self, progress: Callable[..., Any], what: str) -> None:
        self._progress = progress
        self._what = what
        self._began = time.monotonic()

    def report_progress(self, part: str, number: int, total: int, unit: str = "") -> None:
        if time.monotonic() - self._began > LONGEST:
            late = f"Expected to be done in {LONGEST:g} seconds, and was not. Nothing was kept."
            raise MtpExtractError(f"{late} Try again, or extract it on a machine of yours, with mtp-extract.")
        self._progress(
            number / total if total else 0, desc=f"{self._what}: {format_size(number)} of {format_size(total)}"
        )


def extract_to_folder(
    address: str, choice: str, folder: Path, token: str | None, reporter: Reporter
) -> ExtractionResult:
    """Extract the drafter of ``address`` into ``folder``, for the engine or format ``choice``.

    Raises:
        MtpExtractError: what the library refuses, or a limit of this page.
    """
    # Without a token of the user's none is sent, rather than that of whoever runs this page.
    with mtp_extract.open(address, token=token or False, reporter=reporter) as bundle:
        # Raises what is wrong with it, where looking only says so.
        bundle.read_drafter()
        drafter = inspect(bundle).report["drafter"]
        if (largest := max(drafter["size"], 4 * drafter["parameters"])) > LARGEST:
            raise MtpExtractError(
                f"Expected a drafter of up to {LARGEST / 1e9:g} GB, found one of {format_size(largest)}. Extract it on "
                "a machine of yours, with mtp-extract."
            )
        return mtp_extract.extract(
            bundle, folder / choose_directory(bundle.source.name), format=choice, reporter=reporter
        )


def describe_bundle(report: Mapping[str, Any]) -> str:
    """Describe an inspection in Markdown: the drafter, and the sections beside it."""
    known = f", {escape_markdown(report['known_bundle'])}" if report["known_bundle"] else ""
    paragraphs = [f"**{escape_markdown(Path(report['name']).name)}**, {format_size(report['size'])}{known}"]
    drafter = report["drafter"]
    if drafter is None:
        paragraphs.append(f"**No drafter.** {escape_markdown(report.get('no_drafter') or report['problem'])}")
    else:
        shape = drafter["geometry"]
        stored = ", ".join(f"{count} {kind}" for kind, count in drafter["stored_types"].items())
        name = f"of {escape_markdown(drafter['known_as'])}'s shape" if drafter["known_as"] else "of an unlisted shape"
        paragraphs.append(
            f"**A drafter**: {name}, {drafter['parameters'] / 1e6:.2f} M parameters in {format_size(drafter['size'])} "
            f"({stored}); {shape['num_layers']} layers, hidden {shape['hidden_size']}, backbone "
            f"{shape['backbone_hidden_size']}, vocabulary {shape['vocab_size']}."
        )
    rows = [
        [str(s["index"]), escape_markdown(s["model_type"] or s["type"]), format_size(s["size"])]
        for s in report["sections"]
    ]
    lines = ("| " + " | ".join(row) + " |" for row in (("#", "holds", "bytes"), ("---",) * 3, *rows))
    return "\n\n".join([*paragraphs, "\n".join(lines)])


def format_refusal(error: MtpExtractError) -> str:
    """Format the library's message, which is one line."""
    return f'<div class="refused" role="alert">{html.escape(str(error))}</div>'


def describe_result(result: ExtractionResult, seconds: float) -> str:
    """Describe what was written and its proof, with the notes."""
    layout, total = result.record["layout"], format_size(sum(result.files.values()))
    before = " before rounding" if is_rounded(result.record) else ""
    said = f"""<p><b>Written</b> in {seconds:.0f} s: the {layout} format ({ALL_FORMATS[layout].about}), {total}.</p>
    <p><b>Verified{before}</b>: it computes what the bundle computes, for every input, in real numbers.</p>"""
    return f'<div class="done">{said}{"".join(f"<p>{html.escape(note)}</p>" for note in result.notes)}</div>'


def look(
    source: str,
    token: gr.OAuthToken | None,
    progress: gr.Progress = gr.Progress(),  # noqa: B008 - as Gradio wants it
) -> tuple[str, gr.Accordion, str]:
    """Show what the bundle holds, or why it cannot be read."""
    try:
        reporter = PageReporter(progress, "Reading its header")
        with mtp_extract.open(
            find_hub_address(source), token=(token and token.token) or False, reporter=reporter
        ) as bundle:
            report = inspect(bundle).report
    except MtpExtractError as error:
        return "", gr.Accordion(visible=False), format_refusal(error)
    return describe_bundle(report), gr.Accordion(visible=True, open=True), ""


def extract(
    source: str,
    choice: str,
    kept: str | None,
    token: gr.OAuthToken | None,
    profile: gr.OAuthProfile | None,
    progress: gr.Progress = gr.Progress(),  # noqa: B008
) -> tuple[str | None, str, gr.Files, gr.Accordion, str, gr.Accordion, str, str]:
    """The folder of what was made, what to say of it, the files, the card, and under which name to publish it."""
    remove(kept)
    folder, began = tempfile.mkdtemp(prefix="mtp-space-"), time.monotonic()
    try:
        reporter = PageReporter(progress, "Fetching and writing")
        result = extract_to_folder(find_hub_address(source), choice, Path(folder), token and token.token, reporter)
    except MtpExtractError as error:
        remove(folder)
        gone = gr.Accordion(visible=False)
        return None, format_refusal(error), gr.Files([], visible=False), gone, "", gone, "", ""
    place, shown = result.directory, gr.Accordion(visible=True)
    files = gr.Files([str(place / name) for name in result.files], visible=True)
    card = (place / "README.md").read_text(encoding="utf-8").split("\n---\n", 1)[1]
    publishing, name = gr.Accordion(visible=profile is not None), f"{profile.username}/{place.name}" if profile else ""
    return str(place), describe_result(result, time.monotonic() - began), files, shown, card, publishing, name, ""


def remove(kept: str | None) -> None:
    """Remove the directory that was made for a visitor, and what it lies in; Gradio calls it when its time is up."""
    if kept is not None:
        folder = Path(kept)
        shutil.rmtree(folder if folder.name.startswith("mtp-space-") else folder.parent, ignore_errors=True)


def publish(name: str, private: bool, kept: str | None, token: gr.OAuthToken | None) -> str:
    """Send what this visitor has extracted to the account of whoever is signed in."""
    try:
        if token is None:
            raise MtpExtractError("Expected you to be signed in, and you are not. Sign in at the top.")
        if kept is None or not Path(kept).is_dir():
            raise MtpExtractError(f"The files are gone: {LIMITS} Extract again.")
        sent = mtp_extract.upload(kept, name.strip(), private=private, token=token.token)
    except MtpExtractError as error:
        return format_refusal(error)
    url = html.escape(sent.url)
    sentence = f'{len(sent.sent)} files sent, and what arrived matches by hash: <a href="{url}">{url}</a>'
    return f'<div class="done">{sentence}</div>'


def build_page() -> gr.Blocks:
    """The page, with a login where there is one: in a Space, or where ``hf auth login`` was called."""
    can_login = get_space() is not None or get_token() is not None
    with gr.Blocks(title="MTP drafter extractor", analytics_enabled=False, delete_cache=(60, KEPT)) as blocks:
        gr.Markdown(HEAD)
        with gr.Row(equal_height=True):
            gr.Markdown(LIMITS, elem_classes="small")
            if can_login:
                gr.LoginButton("Sign in first, to publish", size="sm", scale=0, min_width=220)
        source = gr.Textbox(
            label="Bundle",
            info="An id or a URL of the Hugging Face Hub, with or without the file.",
            placeholder="litert-community/gemma-4-E4B-it-litert-lm",
            elem_id="source",
        )
        choice = gr.Dropdown(CHOICES, value="vllm", label="What will serve it, or a format", elem_id="engine")
        with gr.Row():
            looking = gr.Button("See what it holds", elem_id="look")
            extracting = gr.Button("Extract", variant="primary", elem_id="extract")
        status = gr.HTML(elem_id="status")
        files = gr.Files(label="Files", interactive=False, visible=False, elem_id="files")
        with gr.Accordion("Publish to your account", visible=False, elem_id="publish") as publishing:
            name = gr.Textbox(label="Repository", elem_id="name")
            private = gr.Checkbox(label="Private", value=True)
            publish_button = gr.Button("Publish", elem_id="send")
            published = gr.HTML(elem_id="published")
        with gr.Accordion("Model card", visible=False, elem_id="card") as shown:
            card = gr.Markdown()
        with gr.Accordion("What the bundle holds", visible=False, elem_id="held") as held:
            holds = gr.Markdown(elem_id="holds")
        kept = gr.State(None, time_to_live=KEPT, delete_callback=remove)

        alone: dict[str, Any] = {"concurrency_id": "job", "concurrency_limit": 1, "show_progress_on": status}
        gr.on([looking.click, source.submit], look, source, [holds, held, status], **alone)
        results = [kept, status, files, shown, card, publishing, name, published]
        extracting.click(extract, [source, choice, kept], results, **alone)
        publish_button.click(publish, [name, private, kept], published)
    return blocks.queue(max_size=IN_LINE)


def main() -> None:
    # Fonts of the machine: the page asks no other site for anything.
    theme = gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
    theme.set(block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_400")
    build_page().launch(theme=theme, css=STYLE, footer_links=["gradio"], run_history=False, ssr_mode=False)


if __name__ == "__main__":
    main()
