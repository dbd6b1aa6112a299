"""A figure's SVG as part of a page, whose width, letters and colours it takes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from mtp_extract.report.colours import COLOURS

_BY_LIGHT = {colour.light: f"var(--{name})" for name, colour in COLOURS.items()}
_FAMILY = re.compile(r"font-family:[^;]*;?\s*")
# Up to its release 3.10 matplotlib wrote "font: 700 10px 'DejaVu Sans', …".
_FONT = re.compile(r"font: ([^;]*?)([\d.]+px)[^;]*")
_URL = re.compile(r"url\(#([^)]+)\)")
_LEFT_OUT = ("metadata", "style")


def inline(text: str, name: str, label: str) -> str:
    """``text``, an SVG of matplotlib, to stand in a page of HTML.

    Metadata and what names another document are left out. Ids that nothing refers to are dropped; the others begin with
    ``name``, so that figures of one page do not take each other's.

    Args:
        text: the file.
        name: of letters, digits and ``_``; different for each figure of a page.
        label: what the figure shows, for who does not see it.
    """
    root = ElementTree.fromstring(text)  # noqa: S314 - drawn by this package a moment ago
    for parent in root.iter():
        for child in [child for child in parent if _local(child.tag) in _LEFT_OUT]:
            parent.remove(child)
    referred = {
        found
        for element in root.iter()
        for key, value in element.attrib.items()
        for found in ([value[1:]] if _local(key) == "href" else _URL.findall(value))
    }
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(key): value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in attributes.items():
            if key == "href":
                element.set(key, f"#{name}-{value[1:]}")
            elif key == "style":
                element.set(key, _style(value))
            elif key != "id":
                element.set(key, _URL.sub(rf"url(#{name}-\1)", value))
            elif value in referred:
                element.set(key, f"{name}-{value}")
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-label")
    title = ElementTree.Element("title", {"id": f"{name}-label"})
    title.text = label
    root.insert(0, title)
    for element in root.iter():
        for part in ("text", "tail"):
            if not (getattr(element, part) or "").strip():
                setattr(element, part, None)
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _style(style: str) -> str:
    style = _FONT.sub(lambda found: "; ".join(_shorthand(found)), _FAMILY.sub("", style))
    return re.sub(r"#[0-9a-f]{6}", lambda found: _BY_LIGHT.get(found[0], found[0]), style)


def _shorthand(font: re.Match[str]) -> list[str]:
    weight = font[1].strip()
    return [*([f"font-weight: {weight}"] if weight else []), f"font-size: {font[2]}"]
