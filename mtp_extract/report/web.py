"""A report as one page of HTML that needs nothing else: no network, no script, figures inside.

It shows the same tables as the Markdown page. What stands in them comes from files, servers and users, so every word is
escaped, and the page forbids itself to load anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from mtp_extract.report.colours import COLOURS
from mtp_extract.report.columns import Table
from mtp_extract.report.markdown import visible
from mtp_extract.report.tables import FIGURES

_LONG = 60
"""Characters of a cell that is a sentence, and wants room."""

_NUMBER = re.compile(r"[−+-]?[\d.,]*\d(?:e[+-]?\d+)?[×%]?(?:/\d+)?|–")
_WITH_INTERVAL = re.compile(rf"({_NUMBER.pattern}) (\(.*\)[×%]?)")


def web_page(title: str, report: Mapping[str, Any], tables: Iterable[Table], drawn: Mapping[str, str] = {}) -> str:
    """A report in HTML: verdict and findings first, then ``tables`` with their figures.

    Args:
        title: its heading.
        report: ``verdict``, ``findings``, ``notes`` and ``tool``; ``proven`` and ``refuted`` where there are such.
        tables: those that matter first come first and stand open, the others are folded.
        drawn: figures there are, name → SVG, as :func:`~mtp_extract.report.svg.inline` gives it.
    """
    tool = report["tool"]
    standing = next((name for name in ("refuted", "proven") if report.get(name)), "measured")
    body = [
        f"<header><h1>{_text(title)}</h1>",
        f'<p class="verdict {standing}">{_parts(report["verdict"])}</p>',
        _findings(report["findings"], standing == "refuted"),
        "</header><main>",
        *(_section(number, table, drawn) for number, table in enumerate(sorted(tables, key=_folds), 1)),
        *(_folded("notes", "Notes", _list(report["notes"])) if report["notes"] else ()),
        "</main>",
        f"<footer>{_text(tool['name'])} {_text(tool['version'])}</footer>",
    ]
    return _FRAME.format(title=_text(title), style=_STYLE, body="\n".join(body))


def _folds(table: Table) -> bool:
    return not table.first


def _text(text: object) -> str:
    """``text`` as it is, for a page: what is not to be seen is spelled out, and nothing in it is markup."""
    return escape(visible(text))


def _name(text: object) -> str:
    """The same of what may be a long name: it breaks at its parts first."""
    return re.sub(r"(?<=[_/.])(?=\w)", "<wbr>", _text(text))


def _parts(verdict: str) -> str:
    """A line for each of its parts."""
    return "<br>".join(_text(part) for part in re.split(r"(?<=;) ", verdict))


def _about(text: str) -> str:
    """``text`` in Markdown of this package: code and emphasis."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", marked)


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in items) + "</ul>"


def _findings(findings: Sequence[str], opened: bool) -> str:
    if not findings:
        return ""
    many = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    return f"<details{' open' if opened else ''}><summary>{many}</summary>{_list(findings)}</details>"


def _section(number: int, table: Table, drawn: Mapping[str, str]) -> str:
    name = f"table-{number}"
    parts = [
        '<div class="shown">',
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}">{_table(table)}</div>',
        *_figures(table, drawn),
        "</div>",
        *([f"<p>{_text(table.after)}</p>"] if table.after else ()),
        *([f"<details><summary>How to read it</summary><p>{_about(table.about)}</p></details>"] if table.about else ()),
    ]
    if not table.first:
        return "".join(_folded(name, table.title, "".join(parts)))
    heading = f'<h2 id="{name}">{_text(table.title)}</h2>'
    return f'<section aria-labelledby="{name}">{heading}{"".join(parts)}</section>'


def _folded(name: str, title: str, content: str) -> Iterator[str]:
    yield f'<details class="section"><summary><h2 id="{name}">{_text(title)}</h2></summary>{content}</details>'


def _figures(table: Table, drawn: Mapping[str, str]) -> Iterator[str]:
    figures = [
        f"<figure>{drawn[name]}<figcaption>{_text(FIGURES[name])}</figcaption></figure>"
        for name in table.figures
        if name in drawn
    ]
    if figures:
        yield f'<div class="figures">{"".join(figures)}</div>'


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{_name(first)}</th>{"".join(map(_cell, cells))}</tr>' for first, *cells in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: str | int) -> str:
    text = str(value)
    if found := _WITH_INTERVAL.fullmatch(text):
        return f'<td class="number">{_text(found[1])} <small>{_text(found[2])}</small></td>'
    if _NUMBER.fullmatch(text):
        return f'<td class="number">{_text(text)}</td>'
    return f'<td class="{"long" if len(text) > _LONG else "short"}">{_name(text)}</td>'


def _variables(dark: bool) -> str:
    return "".join(f"--{name}:{colour.dark if dark else colour.light};" for name, colour in COLOURS.items())


_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = f"""\
:root{{color-scheme:light dark;{_variables(dark=False)}}}
@media (prefers-color-scheme:dark){{:root{{{_variables(dark=True)}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:1rem 1rem 3rem;max-width:72rem;background:var(--page);color:var(--ink);
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;overflow-wrap:anywhere}}
h1{{font-size:1.5rem;line-height:1.25;margin:.5rem 0 1rem}}
h2{{font-size:1.15rem;line-height:1.3;margin:2rem 0 .6rem}}
p,ul{{max-width:46rem}}
ul{{padding-left:1.2rem}}
.verdict{{max-width:52rem;margin:0;padding:.2rem 0 .2rem .9rem;border-left:.3rem solid var(--blue)}}
.verdict.proven{{border-color:var(--green)}}
.verdict.refuted{{border-color:var(--vermilion)}}
.scroll{{overflow-x:auto;max-width:100%;border-bottom:1px solid var(--line)}}
.scroll:focus-visible,summary:focus-visible{{outline:2px solid var(--blue);outline-offset:2px}}
table{{border-collapse:collapse;font-size:.875rem;line-height:1.35;font-variant-numeric:tabular-nums lining-nums}}
th,td{{padding:.4rem .8rem .4rem 0;text-align:left;vertical-align:top;unicode-bidi:isolate;overflow-wrap:break-word;
max-width:28rem}}
.short{{min-width:6rem}}
.long{{min-width:17rem}}
thead th{{max-width:12rem}}
thead th{{font-weight:500;color:var(--faint);vertical-align:bottom;border-bottom:1px solid var(--faint)}}
tbody tr+tr>*{{border-top:1px solid var(--line)}}
tbody th{{font-weight:600;position:sticky;left:0;background:var(--page)}}
th:first-child{{min-width:min(7rem,30vw);max-width:min(14rem,38vw)}}
.number{{white-space:nowrap}}
small{{color:var(--faint);font-size:.9em;display:block}}
code{{font-family:ui-monospace,Consolas,monospace;font-size:.9em}}
.shown{{display:flex;flex-wrap:wrap;gap:1rem 3rem;align-items:flex-start}}
.shown>.scroll{{flex:0 1 auto}}
.figures{{flex:1 1 min(100%,21rem);display:grid;
grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:1rem 2rem}}
figure{{margin:0;max-width:28rem}}
figure svg{{display:block;width:100%;height:auto;color:var(--ink)}}
figure svg *{{stroke-linejoin:round;stroke-linecap:butt}}
figure svg text{{fill:var(--ink)}}
figcaption,footer{{color:var(--faint);font-size:.875rem}}
summary{{cursor:pointer;color:var(--faint);margin:.8rem 0}}
details.section{{border-top:1px solid var(--line)}}
details.section>summary{{margin:0;padding:.6rem 0;color:var(--ink)}}
details.section>summary>h2{{display:inline;font-size:1.05rem;margin:0}}
main>section+details.section{{margin-top:2rem}}
footer{{margin-top:2rem}}
@media (min-width:48rem){{body{{padding:2rem 2rem 4rem}}h1{{font-size:1.9rem}}}}
@media print{{:root{{color-scheme:light;{_variables(dark=False)}}}body{{max-width:none;padding:0;font-size:10pt}}
details::details-content{{content-visibility:visible;display:block;height:auto}}
.scroll{{overflow:visible}}table{{font-size:8pt}}tbody th{{position:static}}figure{{max-width:19rem}}
figure,tr{{break-inside:avoid}}h2,summary{{break-after:avoid}}}}
"""
