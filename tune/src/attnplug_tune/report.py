"""HTML report of measured times. The page needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnplug_tune.charts import all_sides, chart_spec
from attnplug_tune.results import BenchRow, by_point, sides_of

_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def report_page(title: str, rows: Sequence[BenchRow], notes: Iterable[str] = ()) -> str:
    """Render charts and tables of ``rows``, a section per layer and role, below the notes."""
    import jinja2
    import vl_convert
    from markupsafe import Markup

    sections = []
    colored = all_sides(rows)
    for (layer, role), points in by_point(rows).items():
        sides = sides_of(points)
        lines = []
        for point, found in points.items():
            best = min(row.us for row in found.values())
            lines.append((str(point), [_cell(found.get(side), best) for side in sides]))
        spec = chart_spec(points, colored)
        sections.append({"title": f"{role}: {layer}", "sides": sides, "lines": lines, "spec": spec})
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    # vl-convert's bundle escapes closing tags; Markup keeps Jinja from escaping the rest of it.
    javascript = Markup(vl_convert.javascript_bundle())  # type: ignore[call-arg] # its stub lacks the default
    return template.render(title=title, notes=list(notes), sections=sections, javascript=javascript)


def _cell(row: BenchRow | None, best: float) -> dict[str, Any]:
    if row is None:
        return {}
    share = "" if row.share is None else f" · {row.share:.0%} of the limit"
    return {"text": f"{row.us:.1f}{share}", "best": row.us == best, "quartiles": f"{row.low:.1f}–{row.high:.1f}"}
