"""Whatever a template prints is escaped, and what is not there is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_extract.report import templates as module
from mtp_extract.report.markdown import code, plain
from mtp_extract.report.templates import Templates


@pytest.fixture
def rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def render(text: str, **values: object) -> str:
        (tmp_path / "t.md").write_text(text)
        monkeypatch.setattr(module, "__file__", str(tmp_path / "templates.py"))
        return Templates(plain, code=code).render("t.md", **values)

    return render


def test_what_is_printed_is_escaped_once(rendered) -> None:
    name = "*a* <b> `c` {{ 1 }}"
    escaped = r"\*a\* &lt;b> \`c\` {{ 1 }}"
    assert rendered("*{{ x }}* <i>\n", x=name) == f"*{escaped}* <i>\n"
    assert rendered("{{ x | code }}", x=name) == "`*a* <b> 'c' {{ 1 }}`"
    assert rendered("{{ x.upper() }}{{ x ~ '|' }}", x="<b>") == r"&lt;B>&lt;b>\|"
    assert rendered("{% macro m(y) %}*{{ y }}*{% endmacro %}{{ m(x) }}", x="*") == r"*\**"
    assert rendered("{% set y %}[{{ x }}]{% endset %}{{ y }}", x="[") == r"[\[]"
    assert rendered("{% for one in x %}{{ one }},{% endfor %}", x=["a|", 1, None]) == r"a\|,1,None,"


@pytest.mark.parametrize("text", ["{{ y }}", "{{ x.y }}", "{% if x.y %}{% endif %}", "{% for a in x.y %}{% endfor %}"])
def test_what_is_not_there_is_an_error(rendered, text: str) -> None:
    with pytest.raises(LookupError, match="y"):
        rendered(text, x={})


def test_a_record_cannot_be_changed_or_reached_through(rendered) -> None:
    from jinja2.exceptions import SecurityError

    for text in ("{{ x.update(a=1) }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises((SecurityError, LookupError)):
            rendered(text, x={})
