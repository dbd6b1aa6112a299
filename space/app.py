"""A page that takes the drafter out of a LiteRT bundle on the Hub: nothing is installed, and nothing kept."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gradio as gr
import job
from gradio.utils import get_space
from huggingface_hub import get_token

import mtp_extract
from mtp_extract.cli.terminal import size
from mtp_extract.formats import EVERY

FOLDERS = job.Folders()
STYLE = """
.gradio-container { width: 100%; max-width: 56rem !important; min-width: 0 !important; margin: 0 auto !important; }
.small p { font-size: .85rem; opacity: .75; }
.done, .refused { border-left: 4px solid; padding: .7rem 1rem; border-radius: 4px; overflow-wrap: anywhere; }
.done { border-color: #2e7d32; background: color-mix(in srgb, #2e7d32 9%, transparent); }
.refused { border-color: #b3261e; background: color-mix(in srgb, #b3261e 9%, transparent); }
.done p { margin: 0 0 .3rem; }
.done p:last-child { margin: 0; }
#status { min-height: 4.5rem; }
#status, #status > *, #published, #published > * { padding: 0; }
.small { min-width: min(20rem, 100%) !important; }
#card { min-width: 0; overflow: hidden; }
#card pre, #card table { display: block; overflow-x: auto; max-width: 100%; }
#files .label-clear-button { display: none; }
#holds table { display: table; width: 100%; }
#holds td, #holds th { padding: .3rem .6rem; border-color: var(--border-color-primary); }
#holds td:last-child, #holds th:last-child { text-align: right; white-space: nowrap; }
"""
HEAD = """# LiteRT bundle in, MTP drafter out

Takes the multi-token-prediction drafter out of a `.litertlm` bundle on the Hugging Face Hub and writes it as your
engine loads it. The bundle's graph and what was written are run side by side; if they part, you get none."""


def refused(error: mtp_extract.MtpExtractError) -> str:
    """The library's one line, as it stands."""
    return f'<div class="refused" role="alert">{html.escape(str(error))}</div>'


def done(made: Mapping[str, Any], seconds: float) -> str:
    """What was written, that it was proven, and what to know of it."""
    total = size(sum(made["files"].values()))
    before = " before rounding" if made["rounded"] else ""
    said = [
        f"<b>Written</b> in {seconds:.0f} s: the {made['layout']} format ({EVERY[made['layout']].about}), {total}.",
        f"<b>Proven{before}</b>: {'; '.join(map(html.escape, made['proof']))}.",
        *map(html.escape, made["notes"]),
    ]
    return f'<div class="done">{"".join(f"<p>{one}</p>" for one in said)}</div>'


def told_by(progress: gr.Progress, what: str) -> Callable[[int, int], None]:
    """What shows bytes done on the page's bar."""
    return lambda done, total: progress(done / total if total else 0, desc=f"{what}: {size(done)} of {size(total)}")


def look(
    source: str,
    token: gr.OAuthToken | None,
    progress: gr.Progress = gr.Progress(),  # noqa: B008 - as Gradio wants it
) -> tuple[str, gr.Accordion, str]:
    """What the bundle holds, or why that cannot be said."""
    progress(0, desc="Reading its header")
    try:
        request = {"source": job.address_of(source), "token": token and token.token}
        found = job.run("look", request, job.LONGEST_LOOK, told_by(progress, "Reading its header"))
    except mtp_extract.MtpExtractError as error:
        return "", gr.Accordion(visible=False), refused(error)
    return job.bundle_in_words(found), gr.Accordion(visible=True, open=True), ""


def extract(
    source: str,
    choice: str,
    token: gr.OAuthToken | None,
    profile: gr.OAuthProfile | None,
    request: gr.Request,
    progress: gr.Progress = gr.Progress(),  # noqa: B008
) -> tuple[str, gr.Files, gr.Accordion, str, gr.Accordion, str, str, gr.Accordion]:
    """What came of it, the files, the card, under which name to publish it; and what the bundle holds is folded."""
    progress(0, desc="Reading its header")
    session, began = str(request.session_hash), time.monotonic()
    folder = FOLDERS.new(session)
    try:
        asked = {"source": job.address_of(source), "token": token and token.token}
        asked |= {"format": choice, "folder": str(folder)}
        made = job.run("extract", asked, job.LONGEST_JOB, told_by(progress, "Fetching and writing"))
        if FOLDERS.of(session) != folder:
            raise mtp_extract.MtpExtractError("The page was left meanwhile. Nothing was kept.")
    except mtp_extract.MtpExtractError as error:
        FOLDERS.remove(session, folder)
        gone = gr.Accordion(visible=False)
        return refused(error), gr.Files([], visible=False), gone, "", gone, "", "", gr.Accordion()
    directory = Path(made["directory"])
    card = (directory / "README.md").read_text(encoding="utf-8").split("\n---\n", 1)[1]
    return (
        done(made, time.monotonic() - began),
        gr.Files([str(directory / name) for name in made["files"]], visible=True),
        gr.Accordion(visible=True),
        card,
        gr.Accordion(visible=profile is not None),
        f"{profile.username}/{directory.name}" if profile else "",
        "",
        gr.Accordion(open=False),
    )


def publish(name: str, private: bool, token: gr.OAuthToken | None, request: gr.Request) -> str:
    """Send what this session has extracted to the account of whoever is signed in."""
    folder = FOLDERS.of(str(request.session_hash))
    try:
        if token is None:
            raise mtp_extract.MtpExtractError("Expected you to be signed in, and you are not. Sign in at the top.")
        if folder is None:
            raise mtp_extract.MtpExtractError(f"The files are gone: {job.LIMITS} Extract again.")
        made = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        if len(made) != 1:
            raise mtp_extract.MtpExtractError("Expected one result, found none yet. Wait until the extraction ends.")
        sent = mtp_extract.upload(made[0], name.strip(), private=private, token=token.token, progress=False)
    except mtp_extract.MtpExtractError as error:
        return refused(error)
    url = html.escape(sent.url)
    said = f'{len(sent.sent)} files sent, and what arrived matches by hash: <a href="{url}">{url}</a>'
    return f'<div class="done">{said}</div>'


def leave(request: gr.Request) -> None:
    """The page was closed."""
    FOLDERS.remove(str(request.session_hash))


def page() -> gr.Blocks:
    """The page, with a login where there is one: in a Space, or where ``hf auth login`` was called."""
    can_login = get_space() is not None or get_token() is not None
    with gr.Blocks(title="MTP drafter extractor", analytics_enabled=False, delete_cache=(60, job.KEPT)) as blocks:
        gr.Markdown(HEAD)
        with gr.Row(equal_height=True):
            gr.Markdown(job.LIMITS, elem_classes="small")
            if can_login:
                gr.LoginButton("Sign in first, to publish", size="sm", scale=0, min_width=220)
        source = gr.Textbox(
            label="Bundle",
            info="An id or a URL of the Hugging Face Hub, with or without the file.",
            placeholder="litert-community/gemma-4-E4B-it-litert-lm",
            elem_id="source",
        )
        choice = gr.Dropdown(job.CHOICES, value="vllm", label="What will serve it, or a format", elem_id="engine")
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

        gr.on([looking.click, source.submit], look, source, [holds, held, status], show_progress_on=status)
        results = [status, files, shown, card, publishing, name, published, held]
        extracting.click(extract, [source, choice], results, show_progress_on=status)
        publish_button.click(publish, [name, private], published)
        blocks.unload(leave)
    return blocks.queue(max_size=job.IN_LINE)


def main() -> None:
    # Fonts of the machine: the page asks no other site for anything.
    theme = gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
    page().launch(
        theme=theme.set(block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_400"),
        css=STYLE,
        footer_links=["gradio"],
        run_history=False,
        ssr_mode=False,
    )


if __name__ == "__main__":
    main()
